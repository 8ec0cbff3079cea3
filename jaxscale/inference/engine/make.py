"""An engine for a model: sizes that fit, programs compiled, on one host or several."""

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxscale.checks import check_type
from jaxscale.inference.engine import hosts
from jaxscale.inference.engine.config import EngineConfig
from jaxscale.inference.engine.engine import Engine
from jaxscale.inference.engine.kv_scales import measure_kv_scales
from jaxscale.inference.engine.memory import fit
from jaxscale.inference.engine.program_cache import ProgramCache
from jaxscale.inference.engine.runner import Runner, Weights
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.inference.engine.scheduling.scheduler_config import bucket_sizes
from jaxscale.inference.gc_heap import FrozenHeap
from jaxscale.inference.grammar import GrammarCompiler
from jaxscale.models.adapters import adapter_names
from jaxscale.models.decoder import Decoder
from jaxscale.models.serving import is_abstract
from jaxscale.models.tokenizer import Tokenizer
from jaxscale.observability.bar import progress_bar


type Progress = Callable[[int, int, bool], None]
"""Told programs that are compiled, those that are waited for, and whether the weights
are there."""


def make_engine(
    model: Decoder,
    tokenizer: Tokenizer | None = None,
    *,
    config: EngineConfig | None = None,
    eos_ids: Sequence[int] = (),
    compiler: GrammarCompiler | None = None,
    kv_scales: np.ndarray | None = None,
    quiet: bool = False,
    wait: bool = True,
    weights: Callable[[], Decoder] | None = None,
    progress: Progress | None = None,
) -> Engine:
    """A compiled engine for `model`, not started yet.

    Args:
        model: A decoder, on one device or split over the mesh axis `tensor`.
        tokenizer: Tokenizer, for detokenization and stop strings.
        config: Engine settings.
        eos_ids: End-of-sequence tokens, besides the tokenizer's.
        compiler: Compiler of guides, for guided requests.
        kv_scales: [L, 2, K], scales of an fp8 KV cache; by default measured by
            `measure_kv_scales`.
        quiet: Do not print memory and compilation.
        wait: False: return once a few programs are compiled, and compile the others
            behind; larger ones stand in until then. Several processes always wait.
        weights: Reads an abstract `model`, while its programs are compiled. Of one
            process alone.
        progress: Told how many programs are compiled, of how many, and whether the
            weights are there; on any thread.

    Raises:
        ValueError: sizes do not fit the model or the device, or there are `kv_scales`
            for a KV cache that is not fp8.
    """
    config = config or EngineConfig()
    ends = list(eos_ids)
    if tokenizer is not None and tokenizer.eos_id is not None:
        ends.append(tokenizer.eos_id)
    runner = _make_runner(model, config, ends, kv_scales, quiet)
    followers = None
    if hosts.spans_hosts(runner.devices):
        if jax.process_index():
            raise ValueError(
                f"process {jax.process_index()} has no engine of its own where a model "
                "is split over several processes; call jaxscale.inference.follow there"
            )
        followers = hosts.gather(runner)
        runner.on_dispatch = followers.send
    steps = _Steps(progress, read=weights is None)

    def read(weights: Callable[[], Decoder]) -> Weights:
        loaded, scales = weights(), kv_scales
        if config.kv_dtype is not None and scales is None:
            scales = measure_kv_scales(loaded)
        steps.weights()
        return loaded, scales

    behind = not wait and followers is None
    reads = None if weights is None else functools.partial(read, weights)
    _compile(runner, config, quiet, steps, behind=behind, weights=reads)
    engine = Engine(
        runner, Scheduler(runner.config), tokenizer=tokenizer, compiler=compiler
    )
    engine.at_end.append(lambda error: runner.table.stop())
    if followers is not None:
        engine.at_end.append(followers.close)
        followers.on_lost(engine.fail)
    return engine


class _Steps:
    """Tells how far a start is."""

    def __init__(self, progress: Progress | None = None, *, read: bool = True) -> None:
        self._tell, self._lock = progress, threading.Lock()
        self._compiled = self._programs = 0
        self._read = read

    def programs(self, total: int) -> None:
        """So many are to be compiled."""
        with self._lock:
            self._compiled, self._programs = 0, total
            self._say()

    def compiled(self) -> None:
        """Another one is."""
        with self._lock:
            self._compiled += 1
            self._say()

    def weights(self) -> None:
        """They are there."""
        with self._lock:
            self._read = True
            self._say()

    def _say(self) -> None:
        if self._tell is not None:
            self._tell(self._compiled, self._programs, self._read)


def freeze_gc_heap(engine: Engine) -> None:
    """Keep Python's garbage collector from what is there now, for the process to serve.

    Args:
        engine: Its programs may still be compiled behind.
    """
    table = engine.runner.table
    engine.after_step.append(FrozenHeap(lambda: table.whole).again)


def follow(
    model: Decoder,
    *,
    config: EngineConfig | None = None,
    kv_scales: np.ndarray | None = None,
    quiet: bool = False,
) -> None:
    """Execute the plans of process 0's engine, until it is closed.

    If a model is split over the devices of several processes, all but the first call
    this, with the arguments that the first passes to `make_engine` or `LLM`.

    Args:
        model: The same decoder, on a mesh of all devices.
        config: Engine settings.
        kv_scales: As for `make_engine`.
        quiet: Do not print memory and compilation.

    Raises:
        HostLost: process 0 has ended, does not respond, or its engine has failed.
        ValueError: sizes do not fit, or differ from those of process 0.
    """
    config = config or EngineConfig()
    runner = _make_runner(model, config, (), kv_scales, quiet)
    if not hosts.spans_hosts(runner.devices):
        raise ValueError("model is on the devices of one process, where nobody follows")
    connection = hosts.join(runner)
    _compile(runner, config, quiet, _Steps())
    hosts.follow(runner, connection)


def _make_runner(
    model: Decoder,
    config: EngineConfig,
    eos_ids: Sequence[int],
    kv_scales: np.ndarray | None,
    quiet: bool,
) -> Runner:
    """A runner that fits the devices, not yet compiled."""
    if config.kv_dtype is None and kv_scales is not None:
        raise ValueError("kv_scales are for kv_dtype 'fp8', got kv_dtype None")
    check_type("model", model, Decoder, "LLM.from_pretrained(path) loads one")
    model = model.for_inference()
    device = min(jax.tree.leaves(model)[0].sharding.device_set, key=lambda d: d.id)
    on_cpu = device.platform == "cpu"
    sizes = config.scheduler(model.config, eos_ids, on_cpu=on_cpu)
    sizes = dataclasses.replace(sizes, adapters=adapter_names(model))
    sizes, memory = fit(model, sizes, config)
    if not quiet:
        print(memory, file=sys.stderr)
    if config.kv_dtype is not None and kv_scales is None:
        if is_abstract(model):
            shape = model.config  # its scales come with its weights
            kv_scales = np.ones((shape.num_layers, 2, shape.num_kv_heads), np.float32)
        else:
            kv_scales = measure_kv_scales(model)
    buckets = bucket_sizes(sizes, config.buckets)
    return Runner(
        model,
        sizes,
        prefill_tokens=config.chunks(on_cpu=on_cpu),
        mixed=config.mixed(buckets, on_cpu=on_cpu),
        buckets=config.buckets,
        kv_scales=kv_scales,
        all_reduce=config.all_reduce,
    )


def _compile(
    runner: Runner,
    config: EngineConfig,
    quiet: bool,
    steps: _Steps,
    *,
    behind: bool = False,
    weights: Callable[[], Weights] | None = None,
) -> None:
    """Compile all programs, with a progress bar for those that are waited for."""
    cache = None
    # On several hosts XLA exchanges autotuning results, so all must compile, or none.
    if config.program_cache is not None and not hosts.spans_hosts(runner.devices):
        cache = ProgramCache(config.program_cache, runner.devices)
    programs = list(runner.programs())
    total = len(runner.table.order(programs)[0] if behind else programs)
    steps.programs(total)
    with progress_bar("compile", False if quiet else None, total) as advance:

        def compiled() -> None:
            advance(1)
            steps.compiled()

        runner.compile(compiled, cache, behind=behind, weights=weights)
