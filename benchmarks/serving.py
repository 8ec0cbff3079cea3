"""Serving end to end: ours, other ways to serve on our engine, transformers, vLLM.

Each implementation runs in a child process of this command, one after the other, with
random weights in bf16 and greedy answers of given lengths. Requests come from inside
the process: neither HTTP nor text is within the times (``jaxscale bench-serve`` has
both). Cases are of two kinds.

A load: ``requests`` arrive ``gap_ms`` apart on average, all at once with 0, and the
time is that until the last answer ends. ``mean_latency_ms`` counts from the arrival,
and ``latency_vs_solo`` sets it against the same requests by themselves. Lengths are
those of `jaxscale.inference.load.workload`: of Flover's paper, prompts of 8 and answers
of 504 tokens, or like those of ShareGPT. Ours can answer after ``ready_seconds``, with
weights that are there, and has all its programs after ``compile_seconds``; vLLM needs
its ``compile_seconds`` to answer.

- ``jaxscale``: requests join and leave at every token.
- ``concurrent``, ``static``, ``windowed``: see `serving_policies`. The first stands for
  the baseline of Flover's paper, the last for dynamic batching that waits up to
  ``window_s``.
- ``torch_continuous``: see `torch_serving`.
- ``vllm``: vLLM with as many slots as ours; see `vllm_serving`, which says how it is
  found.

With ``slots`` ``default`` ours and vLLM choose them. With ``sizes`` ``one`` batches of
decoding and of prompts have one size each, the largest: the few programs of it are soon
compiled for blocks that are pruned unlike.

A token: ``batch`` sequences of about ``context`` tokens each; the time of a step.
``read_gb_per_second`` is how fast weights, keys and values are read in it, by each
device. With ``tp`` the model
is split over so many GPUs: ``low_latency`` sums over them by the kernel without a
barrier, ``xla_nccl`` by XLA, and ``jaxscale`` by what dispatch picks.

Cases with ``weights`` have them in 8 bits, a byte each (with ``kv`` keys and values are
so as well), or pruned: ``tw50`` and
``tw75`` keep 50% and 25% of the weights of all blocks, as the tile-wise masks of the
trained model ``masks`` do (`benchmarks.pruned_model`), in the layers that
`jaxscale.pruning.sparsify` makes. Beside the same case without ``weights``, which is
the dense model, ``weights_gb`` tells what is there to gain: it is what a step reads of
weights, rows of tiles whole, and `density` the share of the blocks' weights that is
kept.

Where the environment variable ``BENCHMARK_TRACES`` names a folder, ``jaxscale`` serves
each case once more and leaves a timeline of its steps there, for Perfetto.

HTTP: ``streams`` requests at once, by the server (``jaxscale``) and by the same calls
of `LLM` (``llm``), in turns on one engine: see `serving_http`.

A child says on standard error how far it is: a run that is cut off says where it was.
"""

import atexit
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import command, timing
from benchmarks.measure.harness import Benchmark, Custom, Measurement, Params
from benchmarks.workloads.serving_cases import (
    TILE_WISE,
    cases,
    http_case,
    is_pruned,
    load_case,
    token_case,
)
from benchmarks.workloads.serving_model import SMALL, config_of, random_model
from jaxscale.inference.engine.device_share import reserve_for_serving
from jaxscale.observability.trace_events import write_events


OURS = ("jaxscale", "concurrent", "static", "windowed")
SUMS = {"low_latency": "low_latency", "xla_nccl": "xla"}
"""`EngineConfig.all_reduce` of ours on several GPUs; of the others it is None."""
LLM = "llm"
TORCH = "torch_continuous"
_STEPS = 64  # of a token's time
_WARM = 16  # tokens of an answer, where the first ones are enough to warm up
_LONGEST_START = 900.0  # seconds, after which a program has failed to compile
_SOLO = 4  # requests that also run by themselves
_PROGRAMS = "BENCHMARK_PROGRAMS"  # names a folder of compiled programs
_TRACES = "BENCHMARK_TRACES"  # names a folder of timelines
_SAY_SECONDS = 10.0  # at least between two words of what is compiled
_SIZES = ("model", "workload", "gap_ms", "slots", "batch", "context")
_TRACED = (*_SIZES, "weights", "kv", "tp")
_MANY = 64  # requests that are too many to run on instances of their own


def parts_of(params: Params) -> Any:
    """What is kept in each block of a pruned case; see `benchmarks.pruned_model`."""
    from benchmarks import pruned_model

    sparsity = TILE_WISE[params["weights"]]
    return pruned_model.layers_for(config_of(params), params["masks"], "tw", sparsity)


def read_weights(params: Params) -> tuple[float, float]:
    """The weights that a step reads, and the share of the blocks' that is kept.

    The table of embeddings is looked up, not read; the output projection is.
    """
    config = config_of(params)
    table = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    read = config.num_parameters() - table
    if not is_pruned(params):
        return read, 1.0
    parts = [part for block in parts_of(params) for part in block.values()]
    size = sum(part.shape[0] * part.shape[1] for part in parts)
    stays = sum(part.multiplied * part.shape[0] * part.shape[1] for part in parts)
    return read - size + stays, sum(part.weights for part in parts) / size


def model_of(params: Params, seed: int) -> Any:
    """The decoder of a case, of 16 bits or pruned."""
    if not is_pruned(params):
        return random_model(params, seed)
    from benchmarks import pruned_model

    blocks = parts_of(params)
    return random_model(
        params, seed, lambda model: pruned_model.with_sparse_layers(model, blocks, seed)
    )


# --- In a child -----------------------------------------------------------------------


_BEGUN = time.perf_counter()


def _say(what: str) -> None:
    """Tell how far this process is: what it returns is lost if it is ended."""
    print(f"{time.perf_counter() - _BEGUN:5.0f} s: {what}", file=sys.stderr, flush=True)


def load_of(params: dict[str, Any], seed: int) -> Any:
    """The requests of a case of either kind."""
    from benchmarks.workloads import serving_policies as policies

    vocab_size = config_of(params).vocab_size
    if "context" not in params:
        return policies.make_load(params, vocab_size, seed)
    # Who is first goes on until the prompt of the last is computed, too.
    batch, context = params["batch"], params["context"]
    spare = 64 + batch * context // (2048 if timing.on_gpu() else 256)
    output = min(_STEPS, context // 2) + spare
    prompt = max(1, context - output // 2)
    sizes = {"workload": f"{prompt}/{output}", "requests": batch}
    return policies.make_load(
        sizes | {"gap_ms": 0, "arrivals": "constant"}, vocab_size, seed
    )


def token_seconds(events: Sequence[Sequence[float]]) -> float:
    """Seconds of a token of the last request that began, while all were there."""
    last = max(events, key=lambda times: times[0])
    end = min(times[-1] for times in events)
    shared = [moment for moment in last if moment <= end]
    if len(shared) < 2 or shared[-1] == shared[0]:
        raise RuntimeError("the first request ended before the last one began")
    after = sum(moment > shared[0] for moment in shared)
    return (shared[-1] - shared[0]) / after


def _started(
    policy: str, params: dict[str, Any], load: Any, seed: int
) -> tuple[list[Any], Callable[[Any], list[Any]], dict[str, float]]:
    """The engines of a policy, how they serve a load, and what starting them took."""
    from benchmarks.workloads import serving_policies as policies
    from jaxscale.inference.engine.make import freeze_gc_heap

    model = model_of(params, seed)
    _say("the model is there")
    start = time.perf_counter()
    if "weights" in params and not is_pruned(params):
        from jaxscale import models

        model = models.quantize(model, params["weights"])
        _say(f"its weights are {params['weights']}")
    slots: Any = max(2, 1 << (params.get("batch", 1) - 1).bit_length())
    slots = params.get("slots", slots)
    if slots == "default":
        slots = None
    elif policy == "concurrent":
        slots = 2
    few = "context" in params or "sizes" in params  # programs
    buckets = None if policy == "jaxscale" and not few else [slots]
    more: dict[str, Any] = {"program_cache": os.environ.get(_PROGRAMS)}
    if policy in SUMS:
        more["all_reduce"] = SUMS[policy]
    if "kv" in params:
        more["kv_dtype"] = params["kv"]
    if few and timing.on_gpu():
        more["prefill_tokens"] = (2048,)
    engine = policies.engine_for(model, load, slots, buckets, wait=False, **more)
    costs = {"ready_seconds": time.perf_counter() - start}
    table, said = engine.runner.table, -_SAY_SECONDS
    while not table.whole:
        passed = time.perf_counter() - start
        if passed > _LONGEST_START:
            raise RuntimeError("programs are missing, see the log")
        if passed > said + _SAY_SECONDS:
            said = passed
            _say("programs: {} of {}".format(*table.num_compiled))
        time.sleep(0.05)
    costs["compile_seconds"] = time.perf_counter() - start
    _say("all programs are there")
    costs["slots"] = float(engine.runner.config.num_slots)
    engines = [engine]
    if policy == "concurrent":
        engines = policies.instances_of(engine, len(load.due))
    del model
    freeze_gc_heap(engine)  # as `jaxscale serve` does
    for each in engines:
        each.start()

    def run(load: Any) -> list[Any]:
        if policy == "jaxscale":
            return policies.continuous(engine, load)
        if policy == "concurrent":
            return policies.concurrent_instances(engines, load)
        window = params["window_s"] if policy == "windowed" else 0.0
        return policies.static(engine, load, slots, window)

    return engines, run, costs


def _serve_ours(policy: str, params: dict[str, Any], seed: int, samples: int) -> Any:
    load = load_of(params, seed)
    with timing.preparing():
        started = _started(policy, params, load, seed)
    with timing.turn():
        return _timed(policy, params, load, samples, *started)


def _timed(
    policy: str,
    params: dict[str, Any],
    load: Any,
    samples: int,
    engines: list[Any],
    run: Callable[[Any], list[Any]],
    costs: dict[str, float],
) -> Any:
    from benchmarks.workloads import serving_policies as policies

    policies.alone(engines[0], load, [0])
    # Without joining a load takes minutes, and all steps have one shape.
    warm = load.to_warm_up() if policy == "jaxscale" else load.cut(_WARM)
    runs = []
    for number, each in enumerate([warm] + [load] * samples):
        runs.append(run(each))
        tokens, seconds = sum(each.outputs), max(o.ended for o in runs[-1])
        name = f"sample {number} of {samples}" if number else "warmed up"
        _say(f"{name}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:,.0f}/s")
    del runs[0]
    if policy == "jaxscale" and _TRACES in os.environ:
        with engines[0].recorded() as timeline:
            run(load)
        words = [policy, *(str(params[name]) for name in _TRACED if name in params)]
        path = Path(os.environ[_TRACES], "_".join(words).replace("/", "_") + ".json")
        write_events(timeline.events(), path)
        print(f"{path}: {timeline.shares()}")
    if "context" in params:
        times = [token_seconds([o.events for o in run]) for run in runs]
        return {"seconds": times, "metrics": costs}
    order = sorted(range(len(load.outputs)), key=lambda i: load.outputs[i])
    chosen = [order[(2 * i + 1) * len(order) // (2 * _SOLO)] for i in range(_SOLO)]
    chosen = sorted(set(chosen))
    solo = dict(zip(chosen, policies.alone(engines[0], load, chosen), strict=True))
    return _summary(runs, solo, costs)


def _peak_gib(name: str) -> float | None:
    """Most device memory of this process, weights among it, where it is known."""
    if name == TORCH:
        import torch

        return torch.cuda.max_memory_allocated() / 2**30
    import jax

    used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None if used is None else used / 2**30


def _summary(
    runs: Sequence[Any], solo: dict[int, float] | None, costs: dict[str, float]
) -> dict[str, Any]:
    from benchmarks.workloads import serving_policies as policies

    found = [policies.figures(run, solo) for run in runs]
    return {
        "seconds": [max(outcome.ended for outcome in run) for run in runs],
        "metrics": {k: statistics.median(f[k] for f in found) for k in found[0]}
        | costs,
    }


@timing.turn()
def _serve_torch(policy: str, params: dict[str, Any], seed: int, samples: int) -> Any:
    from benchmarks.rivals import torch_serving
    from benchmarks.workloads import serving_policies as policies

    config, load = config_of(params), load_of(params, seed)
    shape = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": max(config.max_seq_len, load.longest),
        "rope_theta": config.rope_theta,
    }
    batch = params["batch"] if "context" in params else params["slots"]
    loads = [dataclasses.asdict(load)] * samples
    runs, compile_seconds = torch_serving.measure(shape, loads, batch, seed, _WARM)
    costs = {"compile_seconds": compile_seconds}
    if "context" in params:
        return {"seconds": [token_seconds(run) for run in runs], "metrics": costs}
    return _summary([policies.outcomes_of(load, run) for run in runs], None, costs)


# --- The command ----------------------------------------------------------------------


def _serve_vllm(params: Params, seed: int, samples: int) -> Measurement:
    """Measure vLLM on the requests of the others."""
    from benchmarks.rivals import vllm_serving
    from benchmarks.workloads import serving_policies as policies
    from jaxscale.models.families.registry import config_to_hf

    load = load_of(dict(params), seed)
    config = config_to_hf(config_of(params))
    # Tables of cosines as long as this; ours are computed as they are needed.
    longest = max(load.longest, config["max_position_embeddings"])
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": load.longest,
        "tensor_parallel_size": params.get("tp", 1),
        "seed": seed,
    }
    if params.get("slots", "default") != "default":
        settings["max_num_seqs"] = params["slots"]
    if "tp" in params:
        # Its sum with a norm goes through NVLink multicast where FlashInfer is there.
        settings["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if "weights" in params:
        # Which rounds activations, too, and has no form that does not.
        settings["quantization"] = "fp8"
    if "kv" in params:
        settings["kv_cache_dtype"] = params["kv"]
    with timing.turn():
        found = vllm_serving.run(
            config | {"max_position_embeddings": longest},
            dataclasses.asdict(load),
            samples,
            settings,
            dataclasses.asdict(load.to_warm_up()),
        )
    costs = {"compile_seconds": found["seconds"], **found["settings"]}
    if "context" in params:
        times = [token_seconds(run) for run in found["runs"]]
        result = {"seconds": times, "metrics": costs}
    else:
        runs = [policies.outcomes_of(load, run) for run in found["runs"]]
        result = _summary(runs, None, costs)
    return Measurement(
        **result,
        max_rel_error=None,
        num_devices=params.get("tp", 1),
        versions={"vllm": found["version"]},
    )


@functools.cache
def _serve_http(
    params: tuple[tuple[str, Any], ...], samples: int
) -> dict[str, Measurement]:
    """Measure the server and `LLM`, in turns."""
    from benchmarks.workloads import serving_http

    with timing.turn():
        found = serving_http.compare(**dict(params), rounds=samples)
    return {
        name: Measurement(
            [each.seconds for each in rounds],
            None,
            metrics=serving_http.figures(rounds),
        )
        for name, rounds in zip(("jaxscale", LLM), found, strict=True)
    }


@functools.cache
def _programs() -> str:
    """A folder for the programs of all children, which goes with this process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


def _refused(params: Any, name: str) -> str | None:
    """Why an implementation does not run a case; None if it may."""
    if "streams" in params:
        return None if name in ("jaxscale", LLM) else "it has no server here"
    if name == LLM:
        return "it is what the server is set against"
    if "context" in params and name in OURS[1:]:
        return "a step is the same however requests are served"
    if name in SUMS and "tp" not in params:
        return "there is nothing to sum on one GPU"
    if "tp" in params and name == TORCH:
        return "transformers runs on one GPU here"
    if "weights" in params and name == TORCH:
        return "weights of 8 bits and sparse ones are ours"
    if is_pruned(params) and name == "vllm":
        return "vLLM has no tile-wise sparse weights"
    if params.get("weights") == "int8" and name == "vllm":
        return "vLLM rounds no weights to int8 by itself"
    if "sizes" in params and name != "jaxscale":
        return "it chooses the sizes of its batches by itself"
    if params.get("slots") == "default" and name not in ("jaxscale", "vllm"):
        return "it has no number of slots of its own"
    if params.get("requests", 0) > _MANY and name == "concurrent":
        return f"it is run with at most {_MANY} requests"
    return None


def _in_child(name: str) -> Custom:
    """Run an implementation in a process of its own."""

    def measure(params: Any, seed: int, samples: int) -> Measurement:
        if name == TORCH and not timing.torch_is_there():
            raise NotImplementedError("torch with a GPU is not installed")
        if refused := _refused(params, name):
            raise NotImplementedError(refused)
        if name == "vllm":
            return _serve_vllm(params, seed, samples)
        if "streams" in params:
            return _serve_http(tuple(params.items()), samples)[name]
        job = json.dumps([name, dict(params), seed, samples])
        environment = {_PROGRAMS: _programs(), **os.environ}
        if name != TORCH:
            # One piece of memory, as servers have it: in pieces that grow as needed,
            # half of a GPU may not be free in one.
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.serving", "--child", job],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{name} failed with {done.returncode}")
        *said, last = done.stdout.splitlines()
        print("\n".join(said), file=sys.stderr)
        result = json.loads(last)
        return Measurement(
            result["seconds"],
            None,
            metrics=result["metrics"] | read_metrics(params),
            num_devices=params.get("tp", 1),
        )

    return Custom(measure, takes_turns=True)


def read_metrics(params: Params) -> dict[str, float]:
    """What a step reads of weights, and how much of the blocks is kept."""
    size = 2 if timing.on_gpu() else 4
    weights, density = read_weights(params)
    if "weights" in params and not is_pruned(params):
        size = 1  # norms and biases do not count
    found = {"weights_gb": size * weights / 1e9}
    return found | {"density": density} if is_pruned(params) else found


def metrics(params: Any, seconds: float) -> dict[str, float]:
    """Of a step: tokens per second, and how fast memory is read."""
    if "context" not in params:
        return {}
    config, batch = config_of(params), params["batch"]
    cache = (2 if timing.on_gpu() else 4) * batch * params["context"]
    cache *= config.num_layers * 2 * config.num_kv_heads * config.head_dim
    read = 1e9 * read_metrics(params)["weights_gb"] + cache
    return {
        "tokens_per_second": batch / seconds,
        "read_gb_per_second": read / params.get("tp", 1) / seconds / 1e9,
    }


BENCHMARK = Benchmark(
    name="serving",
    cases=cases(),
    quick_cases=[
        token_case("llama_tiny", 2, 24),
        *(token_case("llama_tiny", 2, 24, weights) for weights in ("int8", "fp8")),
        token_case("llama_tiny", 2, 24, "fp8_dynamic"),
        token_case(SMALL, 2, 24),
        token_case(SMALL, 2, 24, "tw75", masks="untrained"),
        load_case(
            "poisson", "llama_tiny", "alpaca", 2, arrivals="poisson", requests=6,
            slots=4, shrink=16, window_s=0.01,
        ),
        http_case("small", 8, 32, 64),
    ],
    kernels=("paged_attention", "varlen_attention", "tile_sparse_matmul"),
    trains=lambda case: False,
    runs=lambda case, name, op: op != "tile_sparse_matmul" or is_pruned(case.params),
    inputs=lambda params, key: (),
    implementations={
        name: _in_child(name) for name in (*OURS, *SUMS, TORCH, "vllm", LLM)
    },
    metrics=metrics,
    time="wall",
    devices=lambda params: params.get("tp", 1),
    offers=lambda case, name: _refused(case.params, name) is None,
    packages={"torch*": ("torch", "transformers", "flash-attn", "flash-attn-4")},
    samples=3,
    selectors={"model": "model"},
)  # fmt: skip


_KINDS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((*OURS, *SUMS), _serve_ours),
    TORCH: _serve_torch,
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        name, *arguments = json.loads(sys.argv[2])
        if name != TORCH:
            reserve_for_serving()
        result = _KINDS[name](name, *arguments)
        if (peak := _peak_gib(name)) is not None:
            result["metrics"]["peak_gib"] = peak
        print(json.dumps(result))
    else:
        command.run(BENCHMARK)
