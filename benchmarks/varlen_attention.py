"""Attention over sequences of different length: ours, cuDNN's, XLA's and PyTorch's.

``python -m benchmarks.varlen_attention --pass fwd --case 'bert_base_b16_*'`` selects by
pass and name, ``--pattern``, ``--head_dim`` and ``--causal`` by what the lengths and
the heads are. Cases come in the order of their importance, those of the targets first.

Every implementation gets the same random packed sequences, laid out as it wants them
before it is timed, in as many sets as pass through the L2 cache twice. Packed buffers
are rounded up to 64 rows, padded rows to the longest sequence and a multiple of 8.
Rates count useful work alone, that of the gradients 2.5 times that of the result.
Errors are those of `benchmarks.rivals.attention_definition`; ``norm_error`` is by
norms. Those of ``fp8_*`` are against operands that nobody rounded, and rounding them is
not timed. Cases with windows, softcap, sinks or ALiBi say so in `features`, and what
cannot do that says so.

Programs of several cases are compiled at once, in threads, before the first is timed.
"""

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import command, harness, timing
from benchmarks.measure.harness import (
    Benchmark,
    Case,
    Custom,
    Measurement,
    NoMeasurement,
    Params,
    Results,
)
from benchmarks.rivals import attention_baselines as baselines
from benchmarks.rivals import attention_definition as definition
from benchmarks.rivals import torch_attention
from benchmarks.rivals.attention_baselines import Form, rounded
from pallas_kernels.varlen_attention.specs import (
    SPECS,
    VarlenSpec,
    bytetransformer,
    documents,
)


FORMS: Mapping[str, Callable[[VarlenSpec, bool], Form]] = {
    "mosaic_gpu": functools.partial(baselines.ours, "mosaic_gpu"),
    "mosaic_gpu_any_order": functools.partial(
        baselines.ours, "mosaic_gpu", deterministic=False
    ),
    "mosaic_gpu_static": baselines.whole_rows,
    "fp8_mosaic_gpu": functools.partial(baselines.ours, "mosaic_gpu", fp8=True),
    "triton": functools.partial(baselines.ours, "triton"),
    "xla": functools.partial(baselines.ours, "xla"),
    "cudnn_packed": baselines.cudnn_packed,
    "cudnn_padded": baselines.cudnn_padded,
    "xla_mask": baselines.xla_mask,
    "jax_sample": baselines.jax_sample,
    "tokamax": baselines.tokamax,
    "flash_attn_2": torch_attention.flash_attn_2,
    "flash_attn_3": torch_attention.flash_attn_3,
    "fp8_flash_attn_3": functools.partial(torch_attention.flash_attn_3, fp8=True),
    "flash_attn_4": torch_attention.flash_attn_4,
    "flash_attn_4_deterministic": functools.partial(
        torch_attention.flash_attn_4, deterministic=True
    ),
    "torch_varlen": torch_attention.torch_varlen,
    "torch_sdpa": torch_attention.torch_sdpa,
    "torch_flex": torch_attention.torch_flex,
}
"""By name: the form of a spec, with gradients or without."""

FP8_ERROR = 0.2
"""Largest error of operands and weights of 8 bits: without a mask, where results are
small, rounding them is off by 0.11 of the largest result, and by 0.05 in norms."""

BATCH = 6
"""Cases whose programs are compiled at once."""
ROUNDS = 3


def _small(name: str, **more: Any) -> VarlenSpec:
    lengths = tuple(map(int, documents(3, 40)))
    return VarlenSpec(
        name=name,
        pattern="documents",
        lengths_q=lengths,
        lengths_k=lengths,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        **more,
    )


QUICK = (
    VarlenSpec(
        name="tiny_full",
        pattern="bytetransformer",
        lengths_q=tuple(map(int, bytetransformer(4, 24))),
        lengths_k=tuple(map(int, bytetransformer(4, 24))),
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
    ),
    _small("tiny_causal", causal=True),
    _small("tiny_alibi", window=(5, 3), alibi=True),
    _small("tiny_sinks", causal=True, window=(7, None), softcap=2.0, sinks=True),
    VarlenSpec(
        name="tiny_prefill",
        pattern="constant",
        lengths_q=(8, 8),
        lengths_k=(24, 24),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        causal=True,
    ),
)


def features(spec: VarlenSpec) -> str:
    """What a spec asks for beyond a causal mask, in words."""
    left, right = spec.window
    window = f"window {left}" if spec.causal else f"window {left}/{right}"
    found = [] if spec.window == (None, None) else [window]
    found += [f"softcap {spec.softcap:g}"] if spec.softcap is not None else []
    found += ["sinks"] if spec.sinks else []
    return ", ".join([*found, *(["alibi"] if spec.alibi else [])])


def importance(spec: VarlenSpec) -> int:
    """Lower comes first: the targets name these cases."""
    name = spec.name
    if name.startswith(("dense_d64_l4096_full", "dense_d128_l4096")):
        return 0
    if name.startswith("bert_base_b16_") or spec.pattern == "documents":
        return 1
    if features(spec) or name.startswith(("long_tail", "bimodal", "prefill", "wide")):
        return 2
    if name.startswith("bert_base"):
        return 3
    return 4 if spec.pattern != "constant" else 5


BY_NAME = {spec.name: spec for spec in (*QUICK, *SPECS)}


def case(spec: VarlenSpec, what: str) -> Case:
    """One problem: a spec and ``fwd`` or ``fwd_bwd``."""
    grouped = spec.num_heads != spec.num_kv_heads
    heads = f"{spec.num_heads}/{spec.num_kv_heads}" if grouped else str(spec.num_heads)
    more = features(spec)
    return Case(
        spec.name,
        {
            "pass": what,
            "pattern": spec.pattern,
            "head_dim": spec.head_dim,
            **({"value_dim": spec.value_dim} if spec.value_dim else {}),
            "heads": heads,
            "causal": spec.causal,
            "batch": len(spec.lengths_q),
            "max_len": spec.max_len,
            "tokens": sum(spec.lengths_q),
            **({"features": more} if more else {}),
        },
    )


def cases(specs: Sequence[VarlenSpec]) -> list[Case]:
    """Both passes of specs."""
    return [case(spec, what) for spec in specs for what in ("fwd", "fwd_bwd")]


# --- Compile and time -----------------------------------------------------------------


@dataclasses.dataclass
class Prepared:
    """A case whose programs are being compiled."""

    case: Case
    spec: VarlenSpec
    gradient: bool
    draw: Future
    definition: list[Future]
    forms: dict[str, tuple[Form, Future, Future | None]]
    """Form, program that lays operands out, program to be timed (none for torch)."""
    results: Results


def _drawing(spec: VarlenSpec) -> Callable:
    """Random normal packed q, k, v and gradients of the result, in bfloat16."""
    queries = rounded(sum(spec.lengths_q)), spec.num_heads, spec.head_dim
    keys = rounded(sum(spec.lengths_k)), spec.num_kv_heads, spec.head_dim
    results, values = ((*shape[:2], spec.value_size) for shape in (queries, keys))

    def draw(seed: Any) -> tuple:
        # The bit generator of the hardware: threefry takes long to compile.
        each = jax.random.split(jax.random.key(seed, impl="rbg"), 4)
        shapes = (queries, keys, values, results)
        return tuple(
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(each, shapes, strict=True)
        )

    return draw


def prepare(case: Case, names: Sequence[str], pool: ThreadPoolExecutor) -> Prepared:
    """Lower the forms of a case and begin to compile them."""
    spec, gradient = BY_NAME[case.name], case.params["pass"] == "fwd_bwd"
    drawing = jax.jit(_drawing(spec)).lower(jax.ShapeDtypeStruct((), jnp.uint32))
    forms: dict[str, Any] = {}
    results: Results = {}
    for name in names:
        try:
            start = time.perf_counter()
            form = FORMS[name](spec, gradient)
            if form.torch and not timing.torch_is_there():
                raise NotImplementedError("torch with a GPU is not there")
            lay = jax.jit(functools.partial(form.lay, spec, gradient))
            laid = lay.lower(*drawing.out_info)
            program = None
            if not form.torch:
                # jax.nn promotes types.
                with jax.numpy_dtype_promotion("standard"):
                    lowered = jax.jit(form.function(gradient)).lower(*laid.out_info)
                seconds = time.perf_counter() - start
                program = pool.submit(timing.compiled, lowered, seconds)
            forms[name] = form, pool.submit(laid.compile), program
        except NotImplementedError as error:
            results[name] = NoMeasurement(f"not supported: {error}")
        except Exception as error:
            results[name] = harness.failed(error)
    return Prepared(
        case,
        spec,
        gradient,
        pool.submit(drawing.compile),
        definition.programs(spec, pool),
        forms,
        results,
    )


def _make_ready(
    prepared: Prepared,
    form: Form,
    lay: Callable,
    program: timing.Compiled | None,
    packed: Sequence[tuple],
    wanted: Sequence[Sequence[np.ndarray]],
) -> tuple[Callable, float, dict[str, float]]:
    """A timer, the error, and what else the row says."""
    sets = [lay(*arrays) for arrays in packed]
    if program is None:
        function = form.function(prepared.gradient)
        sets = [harness.to_torch(operands) for operands in sets]
        output, costs = timing.torch_first_calls(function, sets[0])
        found = harness.from_torch(output)
        timer = timing.torch_device_time
    else:
        function, costs = program.program, program.costs
        found = jax.block_until_ready(function(*sets[0]))
        timer = timing.jax_device_time if timing.on_gpu() else timing.jax_wall_time
    found = [np.asarray(x) for x in found]
    by_largest, by_norm = definition.errors(prepared.spec, form, found, wanted)

    def take(calls: int) -> list[float]:
        # All calls in one go: to begin to profile takes longer than the calls.
        return timer(function, sets * -(-calls // len(sets)), calls)

    return take, by_largest, {"norm_error": by_norm, **costs}


def run(prepared: Prepared, names: Sequence[str], samples: int) -> Results:
    """Time the forms of a case in turns, with pauses: a busy GPU slows down."""
    spec, results = prepared.spec, prepared.results
    draw = prepared.draw.result()
    packed = [draw(np.uint32(0))]
    nbytes = sum(x.nbytes for x in packed[0])
    count = timing.number_of_sets(nbytes)
    count = min(count, max(2, samples // ROUNDS))
    packed += [draw(np.uint32(i)) for i in range(1, count)]
    wanted = definition.expected(spec, packed[0], prepared.definition)
    ready, taken = {}, {}
    for name, (form, lay, program) in prepared.forms.items():
        try:
            done = None if program is None else program.result()
            one = _make_ready(prepared, form, lay.result(), done, packed, wanted)
            ready[name], taken[name] = one, []
        except NotImplementedError as error:
            results[name] = NoMeasurement(f"not supported: {error}")
        except Exception as error:
            results[name] = harness.failed(error)
    for _ in range(ROUNDS):
        for name in [name for name in ready if name not in results]:
            try:
                times = ready[name][0](-(-samples // ROUNDS))
            except Exception as error:
                results[name] = harness.failed(error)
                continue
            taken[name] += times
            if timing.on_gpu():
                time.sleep(min(3 * sum(times), 0.2))
    flops = spec.flops() * (3.5 if prepared.gradient else 1.0)
    for name in [name for name in ready if name not in results]:
        _, by_largest, more = ready[name]
        rate = flops / statistics.median(taken[name]) / 1e12
        metrics = {"tflops": rate, **more}
        versions = dict(prepared.forms[name][0].versions)
        results[name] = Measurement(taken[name], by_largest, metrics, versions=versions)
    return {name: results[name] for name in names}


def measure(
    wanted: Sequence[Case], names: Sequence[str], samples: int
) -> Iterator[tuple[Case, Results]]:
    """Compile the programs of a few cases, time them, and so on."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for i in range(0, len(wanted), BATCH):
            start = time.monotonic()
            batch = [prepare(case, names, pool) for case in wanted[i : i + BATCH]]
            lowered = time.monotonic() - start
            for one in batch:
                futures = [one.draw, *one.definition]
                futures += [f for _, *both in one.forms.values() for f in both if f]
                for future in futures:
                    future.exception()
            compiled = time.monotonic() - start
            print(
                f"-- {len(batch)} cases lowered in {lowered:.0f} s, compiled after "
                f"{compiled:.0f} s",
                flush=True,
            )
            for one in batch:
                try:
                    with timing.turn():
                        results = run(one, names, samples)
                except Exception as error:  # memory for the operands, for example
                    results = dict.fromkeys(names, harness.failed(error))
                yield one.case, results


def compare(params: Params, medians: Mapping[str, float]) -> Mapping[str, dict]:
    """How much faster than cuDNN: than the packed, and than the better of two."""
    found: dict[str, dict] = {name: {} for name in medians}
    rivals = [medians[n] for n in ("cudnn_packed", "cudnn_padded") if n in medians]
    for name, seconds in medians.items():
        if "cudnn_packed" in medians:
            found[name]["vs_cudnn_packed"] = medians["cudnn_packed"] / seconds
        if rivals:
            found[name]["vs_cudnn"] = min(rivals) / seconds
    return found


def _elsewhere(params: Params, seed: int, samples: int) -> Measurement:
    raise NotImplementedError("`measure` times all implementations")


OF_GRADIENTS = ("mosaic_gpu_any_order", "flash_attn_4_deterministic")
"""Forms that differ from another one in their gradients alone."""


def offered(case: Case, name: str) -> bool:
    """Whether a form may have a row of a case."""
    if case.params["pass"] == "fwd":
        return name not in OF_GRADIENTS
    return not name.startswith("fp8_")  # 8-bit operands have no gradients


BENCHMARK = Benchmark(
    name="varlen_attention",
    cases=cases(sorted(SPECS, key=importance)),
    quick_cases=cases(QUICK),
    kernels=("varlen_attention",),
    inputs=lambda params, key: (),
    implementations={name: Custom(_elsewhere) for name in FORMS},
    measure=measure,
    compare=compare,
    offers=offered,
    errors_of={name: FP8_ERROR for name in FORMS if name.startswith("fp8_")},
    samples=18,
    selectors={
        "pass": "pass",
        "pattern": "pattern",
        "head_dim": "head_dim",
        "causal": "causal",
    },
)

if __name__ == "__main__":
    command.run(BENCHMARK)
