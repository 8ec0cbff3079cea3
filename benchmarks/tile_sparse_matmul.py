"""Matmuls with the weights that pruning leaves, and with dense, 2:4 and int8 ones.

``python -m benchmarks.tile_sparse_matmul --case llama3_8b_up --rows 4096`` selects by
layer and by the number of tokens.

The masks are those of a trained model that was pruned by ``tw`` (columns that go as a
whole, then rows of each tile, so that tiles are uneven) and ``tew`` (the same and
single weights besides), at the sizes of larger models: `benchmarks.pruned_model` says
how. ``tw24`` has tiles as ``tw``, and 2:4 in their rows.
``bits_per_byte`` is that of the very model, under the mask of the row or, for
baselines, dense, under 2:4 or with int8 weights.

Times are those of the matrix in all ``layers`` of the model, one after another, since
blocks keep unequal shares. ``sparsity`` is that of the whole model; what is ``kept`` of
one kind of matrix may be more or less. A baseline takes every layer alike: one is timed
and counted as often. ``ideal_speed_up`` is what the kept matmuls would take at the
rate of the dense matmul: one over ``kept``. Tiles of ``tew`` keep rows for the sake of
single weights: ``multiplied`` is what they have. Every implementation has operands of
its own, as many sets of them as pass through the L2 cache twice, and is compared with
the fp32 matmul of its own operands. Dense baselines get full random weights: zeros
would save power and flatter them. Ours read and write feature-major activations, as in
a chain of layers.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import pruned_model
from benchmarks.measure import command, harness, timing
from benchmarks.measure.harness import (
    ROUNDS,
    Benchmark,
    Case,
    Custom,
    Measurement,
    NoMeasurement,
    Params,
    Results,
)
from benchmarks.pruned_model import Part, normal
from jaxscale.nn.quantized_linear import quantize_kernel
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.quantized_matmul import reference as quantized
from pallas_kernels.tile_sparse_matmul import (
    TileSparse,
    TileSparse24,
    tile_sparse_matmul,
)


OURS = ("mosaic_gpu", "triton", "auto")
TOKENS = (1, 32, 128, 512, 2048, 4096, 8192)
LAYERS = {
    "llama3_8b_query": ("query", 4096, 4096),
    "llama3_8b_out": ("out", 4096, 4096),
    "llama3_8b_up": ("up", 4096, 14336),
    "llama3_8b_down": ("down", 14336, 4096),
    "llama3_70b_up": ("up", 8192, 28672),
    "llama3_70b_down": ("down", 28672, 8192),
}
"""Kind of matrix, input and output features."""

THREADS = 16
"""That compile the layers of a model side by side."""

ACCURACY = {
    "dense": "dense",
    "torch_dense": "dense",
    "cusparselt_2_4": "two_four",
    "int8": "int8",
}
"""Which model's bits per byte stand beside a baseline."""


@dataclasses.dataclass(frozen=True)
class Form:
    """An implementation on one case.

    Args:
        operands: gives those of a layer, from a seed and the place of the layer.
        function: what is timed.
        exact: the fp32 definition of what it computes.
        torch: whether the function takes tensors of torch.
        prepare: turns tensors into what the function takes, before the timing.
        metrics: further metrics from the operands of all layers.
        layers: how many layers there are, each with a pattern of its own.
        repeats: how often they are in the model: one layer stands for all alike.
    """

    operands: Callable[[int, int], tuple]
    function: Callable
    exact: Callable
    torch: bool = False
    prepare: Callable | None = None
    metrics: Callable[[Sequence[tuple]], dict[str, float]] | None = None
    layers: int = 1
    repeats: int = 1


def parts_of(params: Params) -> list[Part]:
    """What the mask of a case keeps of its matrix in each layer."""
    model = pruned_model.load(params["model"])
    found = model.parts(params["mask"], params["sparsity"], params["part"])
    return [part.scaled(params["K"], params["N"]) for part in found]


def _mask_of(params: Params) -> Any:
    """What the mask of a case keeps of all blocks, if the model has it."""
    return pruned_model.load(params["model"]).of(params["mask"], params["sparsity"])


def kept(parts: Iterable[Part]) -> float:
    """The share of the weights of several matrices that is kept."""
    found = [(part.weights, part.shape[0] * part.shape[1]) for part in parts]
    return sum(weights for weights, _ in found) / sum(size for _, size in found)


def _ours(name: str, params: Params) -> Form:
    parts = parts_of(params)

    def operands(seed: int, layer: int) -> tuple:
        part, seed = parts[layer], seed + 10 * layer
        if part.dense:
            return (
                normal(seed + 1, params["K"], params["M"]),
                normal(seed, params["K"], params["N"]),
            )
        return normal(seed + 1, part.inputs, params["M"]), part.weight(seed)

    def function(x: jax.Array, w: Any) -> jax.Array:
        if not isinstance(w, TileSparse | TileSparse24):
            return w.T @ x
        return tile_sparse_matmul(
            x,
            w,
            feature_major=True,
            implementation=None if name == "auto" else name,
        )

    def exact(x: jax.Array, w: Any) -> jax.Array:
        return (w if isinstance(w, jax.Array) else w.to_dense()).T @ x

    return Form(
        operands,
        function,
        exact,
        metrics=lambda layers: {
            "kept": kept(parts),
            "multiplied": sum(part.multiplied for part in parts) / len(parts),
            "weight_mb": sum(_megabytes(weights) for _, *weights in layers),
        },
        layers=len(parts),
    )


def _megabytes(tree: Any) -> float:
    return sum(x.nbytes for x in jax.tree.leaves(tree)) / 1e6


def _dense(params: Params, torch: bool = False) -> Form:
    def operands(seed: int, layer: int) -> tuple:
        return (
            normal(seed, params["M"], params["K"]),
            normal(seed + 1, params["K"], params["N"]),
        )

    def metrics(layers: Sequence[tuple]) -> dict[str, float]:
        return {"weight_mb": params["layers"] * _megabytes(layers[0][1])}

    return Form(
        operands,
        lambda x, w: x @ w,
        jnp.matmul,
        torch=torch,
        metrics=metrics,
        repeats=params["layers"],
    )


def _int8(params: Params) -> Form:
    """Weight-only int8 with a scale for each output feature, by what dispatch picks."""

    def operands(seed: int, layer: int) -> tuple:
        # Drawn in fp32: in bf16 the largest of each feature would be the same.
        key = jax.random.key(seed + 1)
        wide = jax.random.normal(key, (params["K"], params["N"]))
        numbers, scale = jax.jit(quantize_kernel, static_argnums=1)(wide, "int8")
        return normal(seed, params["M"], params["K"]), numbers, scale

    return Form(
        operands,
        quantized_matmul,
        quantized.quantized_matmul,
        repeats=params["layers"],
    )


def _two_four(params: Params) -> Form:
    """PyTorch's 2:4 weights on cuSPARSELt, with the fastest algorithm."""
    check_two_four(params)
    if params["M"] % 16:
        raise NotImplementedError(f"M={params['M']}, 2:4 wants a multiple of 16")

    def operands(seed: int, layer: int) -> tuple:
        pattern = jnp.array([True, False, False, True])
        mask = jnp.tile(pattern, (params["N"], params["K"] // 4))
        w = jnp.where(mask, normal(seed, params["N"], params["K"]), 0)
        return normal(seed + 1, params["M"], params["K"]), w

    def prepare(x: Any, w: Any) -> tuple:
        import torch

        compressed = torch._cslt_compress(w)
        algorithm = torch._cslt_sparse_mm_search(compressed, x.t())
        return x, compressed, algorithm

    def function(x: Any, compressed: Any, algorithm: Any) -> Any:
        import torch

        return torch._cslt_sparse_mm(compressed, x.t(), alg_id=algorithm)

    def exact(x: jax.Array, w: jax.Array) -> jax.Array:
        return w @ x.T

    return Form(
        operands,
        function,
        exact,
        torch=True,
        prepare=prepare,
        repeats=params["layers"],
    )


def check_two_four(params: Params) -> None:
    """Raise unless 2:4 is a rival: of what is pruned alike, and of tiles times 2:4."""
    if params["sparsity"] != 0.5 and params["mask"] != "tw24":
        raise NotImplementedError("2:4 sparsity prunes 50%")


FORMS: Mapping[str, Callable[[Params], Form]] = {
    **{name: functools.partial(_ours, name) for name in OURS},
    "dense": _dense,
    "torch_dense": functools.partial(_dense, torch=True),
    "cusparselt_2_4": _two_four,
    "int8": _int8,
}


@dataclasses.dataclass
class Ready:
    """An implementation with its operands, compiled and compared."""

    take: Callable[[int], list[float]]
    max_rel_error: float
    metrics: dict[str, float]
    seconds: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Compiled:
    """An implementation, a set of operands, and programs for them."""

    form: Form
    operands: tuple[tuple, ...]
    """Of each layer."""
    exact: dict[int, Callable]
    """The definition, for the first layer of each kind."""
    functions: list[Callable]
    """What is timed, of each layer."""
    costs: dict[str, float]


def compiled(form: Form) -> Compiled:
    """Makes a set of operands and compiles, which needs the GPU hardly.

    Layers whose operands have the same shapes share their programs.
    """
    if form.torch and not timing.torch_is_there():
        raise NotImplementedError("torch with a GPU is not there")
    # To try out the matmuls of the definition would take longer than to run it once.
    options = {"xla_gpu_autotune_level": 0} if timing.on_gpu() else None

    def define(operands: tuple) -> Callable:
        with jax.default_matmul_precision("highest"):
            lowered = jax.jit(form.exact).lower(*harness.to_fp32(operands))
            return lowered.compile(options)

    def build(operands: tuple) -> timing.Compiled:
        return timing.Program(form.function).lower(*operands).compile()

    with ThreadPoolExecutor(THREADS) as pool:
        layers = (*pool.map(functools.partial(form.operands, 0), range(form.layers)),)
        kinds = [_kind(operands) for operands in layers]
        first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
        exact = {i: pool.submit(define, layers[i]) for i in first.values()}
        built = {} if form.torch else {i: pool.submit(build, layers[i]) for i in exact}
        exact = {i: future.result() for i, future in exact.items()}
        programs = {i: future.result() for i, future in built.items()}
    if form.torch:
        return Compiled(form, layers, exact, [form.function] * len(layers), {})
    functions = [programs[first[kind]].program for kind in kinds]
    costs = [program.costs for program in programs.values()]
    return Compiled(form, layers, exact, functions, _costs(costs))


def _kind(operands: tuple) -> Any:
    """What layers have in common that share a program."""
    leaves, structure = jax.tree.flatten(operands)
    return str(structure), tuple((x.shape, x.dtype.name) for x in leaves)


def _costs(costs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of programs that run one after another: all must be compiled, the largest fit."""
    joins: dict[str, Callable] = {"compile_seconds": sum, "memory_mb": max}
    return {key: joins[key](each[key] for each in costs) for key in costs[0]}


def make_ready(done: Compiled) -> Ready:
    """Makes all operands and compares."""
    form, sets = done.form, [done.operands]
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(sets[0]))
    count = timing.number_of_sets(nbytes)
    sets += [
        tuple(form.operands(100 * i, layer) for layer in range(form.layers))
        for i in range(1, count)
    ]
    metrics = done.costs | (form.metrics(sets[0]) if form.metrics else {})
    wants = {i: exact(*harness.to_fp32(sets[0][i])) for i, exact in done.exact.items()}

    def function(*layers: tuple) -> list[Any]:
        return [f(*own) for f, own in zip(done.functions, layers, strict=True)]

    if form.torch:
        tensors = harness.to_torch(sets)
        if prepare := form.prepare:
            tensors = [tuple(prepare(*own) for own in layers) for layers in tensors]
        output, costs = timing.torch_first_calls(function, tensors[0])
        found, metrics = harness.from_torch(output), metrics | costs
        take = functools.partial(timing.torch_device_time, function, tensors)
    else:
        found = jax.block_until_ready(function(*sets[0]))
        timer = timing.jax_device_time if timing.on_gpu() else timing.jax_wall_time
        take = functools.partial(timer, function, sets)
    errors = [_max_rel_error(found[i], want) for i, want in wants.items()]
    return Ready(
        lambda calls: [form.repeats * seconds for seconds in take(calls)],
        max(errors),
        metrics,
    )


def _max_rel_error(found: Any, want: Any) -> float:
    """As `harness.max_rel_error`, on the device; NaN counts as infinite."""

    @jax.jit
    def worst(found: Any, want: Any) -> jax.Array:
        errors = [
            jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True)
        ]
        finite = [jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(found)]
        all_finite = jnp.all(jnp.stack(finite))
        return jnp.where(all_finite, jnp.max(jnp.stack(errors)), jnp.inf)

    return float(worst(harness.to_fp32(jax.tree.map(jnp.asarray, found)), want))


def measure(
    wanted: Sequence[Case],
    names: Sequence[str],
    samples: int,
    forms: Mapping[str, Callable[[Params], Form]] | None = None,
) -> Iterator[tuple[Case, Results]]:
    """Times the implementations of each case in turns, with pauses.

    The clock of a busy GPU falls within a tenth of a second: without pauses what runs
    after a long matmul would look slow.

    Args:
        wanted: the cases.
        names: of implementations.
        samples: times to take of each.
        forms: of the implementations; None is `FORMS`.
    """
    forms = FORMS if forms is None else forms
    for name in {case.params["model"] for case in wanted}:
        pruned_model.load(name)  # here, since threads would each make it
    for case in wanted:
        try:
            _mask_of(case.params)
        except NotImplementedError as error:
            lacking = NoMeasurement(f"not supported: {error}")
            yield case, dict.fromkeys(names, lacking)
            continue
        pending = {}
        with ThreadPoolExecutor(max(len(names), 1)) as pool:  # they compile together
            for name in names:
                make = lambda n=name, p=case.params: compiled(forms[n](p))  # noqa: E731
                pending[name] = pool.submit(make)
        with timing.turn():
            results = _timed(pending, samples)
        yield case, {name: results[name] for name in names}


def _timed(pending: Mapping[str, Future], samples: int) -> Results:
    """Times what was compiled, in turns."""
    results: Results = {}
    ready: dict[str, Ready] = {}
    for name, future in pending.items():
        try:
            ready[name] = make_ready(future.result())
        except NotImplementedError as error:
            results[name] = NoMeasurement(f"not supported: {error}")
        except Exception as error:
            results[name] = harness.failed(error)
    for _ in range(ROUNDS):
        for name in [name for name in ready if name not in results]:
            try:
                taken = ready[name].take(-(-samples // ROUNDS))
            except Exception as error:
                results[name] = harness.failed(error)
                continue
            ready[name].seconds += taken
            if timing.on_gpu():
                time.sleep(min(6 * sum(taken), 0.5))
    for name, one in ready.items():
        if name not in results:
            results[name] = Measurement(one.seconds, one.max_rel_error, one.metrics)
    return results


def compare(params: Params, medians: Mapping[str, float]) -> Mapping[str, dict]:
    """Speed-up over the best dense matmul of the same run, and the ideal one."""
    dense = [medians[name] for name in ("dense", "torch_dense") if name in medians]
    found = accuracy(params, medians)
    if not dense:
        return found
    share = kept(parts_of(params))
    for name, t in medians.items():
        found[name]["speed_up"] = min(dense) / t
        if name in OURS:
            found[name]["ideal_speed_up"] = 1 / share
    return found


def accuracy(params: Params, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Bits per byte of the model that each implementation computes."""
    model = pruned_model.load(params["model"])
    mask = pruned_model.label(params["mask"], params["sparsity"])
    return {name: model.bits_of(ACCURACY.get(name, mask)) for name in names}


def metrics(params: Params, seconds: float) -> dict[str, float]:
    """Rate as if nothing were pruned."""
    work = 2 * params["layers"] * params["M"] * params["N"] * params["K"]
    return {"dense_tflops": work / seconds / 1e12}


def masked(case: Case) -> Iterator[Case]:
    """A case under every mask."""
    for mask, sparsity in pruned_model.masks():
        yield Case(case.name, {**case.params, "mask": mask, "sparsity": sparsity})


def cases() -> list[Case]:
    """All layers and tokens under every mask."""
    plain = [
        Case(
            name,
            {
                "M": m,
                "N": n,
                "K": k,
                "part": kind,
                "model": pruned_model.TRAINED,
                "layers": pruned_model.LAYERS[pruned_model.TRAINED],
            },
        )
        for name, (kind, k, n) in LAYERS.items()
        for m in TOKENS
    ]
    return [case for one in plain for case in masked(one)]


QUICK = Case(
    "tiny",
    {
        "M": 16,
        "N": 256,
        "K": 128,
        "part": "query",
        "model": pruned_model.UNTRAINED,
        "layers": pruned_model.LAYERS[pruned_model.UNTRAINED],
        "mask": "tw",
        "sparsity": 0.5,
    },
)


def _elsewhere(params: Params, seed: int, samples: int) -> Measurement:
    raise NotImplementedError("`measure` times all implementations")


BENCHMARK = Benchmark(
    name="tile_sparse_matmul",
    cases=cases(),
    quick_cases=[QUICK],
    kernels=("tile_sparse_matmul",),
    inputs=lambda params, key: (),
    implementations={name: Custom(_elsewhere) for name in FORMS},
    metrics=metrics,
    measure=measure,
    compare=compare,
    selectors={"rows": "M", "mask": "mask", "sparsity": "sparsity"},
)

if __name__ == "__main__":
    command.run(BENCHMARK)
