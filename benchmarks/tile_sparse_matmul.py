"""Products with tile-wise sparse weights, and with dense, 2:4, block and int8 ones.

``python -m benchmarks.tile_sparse_matmul --rows 4096 --sparsity 0.75`` selects by the
number of tokens and by what is pruned; ``--case 'square_4096*'`` by layer.

Every implementation has operands of its own, as many sets of them as pass through the
L2 cache twice, and is compared with the fp32 product of its own operands. Dense
baselines get full random weights: zeros would save power and flatter them. ``ideal`` is
a dense product with as many input features as a tile keeps, what no sparse kernel beats
by much. Ours read and write feature-major activations, as in a chain of layers.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, timing
from benchmarks.harness import (
    ROUNDS,
    Benchmark,
    Case,
    Custom,
    Measurement,
    NoMeasurement,
    Params,
    Results,
)
from jaxscale.pruning import PruneConfig
from jaxscale.pruning.tilewise import Matrix, make_masks
from pallas_kernels.tile_sparse_matmul import (
    SingleWeights,
    TileSparse,
    reference,
    tile_sparse_matmul,
)
from pallas_kernels.tile_sparse_matmul.specs import SHAPES


OURS = ("mosaic_gpu", "triton", "auto")
SINGLES = 0.02  # of what `tew` keeps, outside of tiles; the default of the pruner
DECODING = 64  # most tokens of a step of decoding
TOKENS = (1, 8, 16, 32, 64, 128, 512, 2048, 4096, 8192)
SPARSITIES = (0.0, 0.25, 0.5, 0.625, 0.75, 0.875, 0.9, 0.95)


@dataclasses.dataclass(frozen=True)
class Form:
    """An implementation on one case.

    Args:
        operands: gives operands from a seed.
        function: what is timed.
        exact: the fp32 definition of what it computes.
        torch: whether the function takes tensors of torch.
        prepare: turns tensors into what the function takes, before the timing.
        metrics: further metrics from the operands.
    """

    operands: Callable[[int], tuple]
    function: Callable
    exact: Callable
    torch: bool = False
    prepare: Callable | None = None
    metrics: Callable[[tuple], dict[str, float]] | None = None


def normal(seed: int, *shape: int) -> jax.Array:
    """Random normal bfloat16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def sparse_weight(params: Params, seed: int) -> TileSparse:
    """A random weight under the mask that ``mask`` names, the same for all seeds.

    Tiles of ``equal`` masks keep equally many random rows, those of ``uneven`` ones
    between 3/4 and 5/4 as many; ``pruned`` is what the pruner (tw_k) makes of a weight
    whose rows and columns have scales of their own, as those of trained models have.
    """
    rng = np.random.default_rng(0)
    k, n, tile, unit = (params[x] for x in ("K", "N", "tile", "k_granularity"))
    if params["mask"] == "pruned":
        pruned = _pruned_weight(params, rng)
        scales = 1 + 0.1 * normal(seed, *pruned.values.shape)
        return pruned.with_values(pruned.values * scales)
    tiles = -(-n // tile)
    mean = k * (1 - params["sparsity"])
    share = (
        rng.uniform(0.75, 1.25, tiles) if params["mask"] == "uneven" else np.ones(tiles)
    )
    counts = np.clip(np.round(mean * share / unit) * unit, unit, k).astype(int)
    room = -(-counts.max() // 64) * 64
    rows = np.zeros((tiles, room), np.int32)
    for t, count in enumerate(counts):
        groups = np.sort(rng.permutation(k // unit)[: count // unit])
        found = (groups[:, None] * unit + np.arange(unit)).reshape(-1)
        rows[t] = np.pad(found, (0, room - count), mode="edge")
    kept = jnp.arange(room) < jnp.asarray(counts)[:, None]
    values = jnp.where(kept[:, :, None], normal(seed, tiles, room, tile), 0)
    return TileSparse(
        values,
        jnp.asarray(rows),
        jnp.asarray(counts, jnp.int32),
        shape=(k, n),
        granularity=unit,
    )


def _pruned_weight(params: Params, rng: np.random.Generator) -> TileSparse:
    """A weight with lognormal scales of rows and columns, pruned by magnitude."""
    k, n = params["K"], params["N"]
    weight = rng.standard_normal((k, n), np.float32)
    for shape in ((k, 1), (1, n)):
        weight *= np.exp(0.5 * rng.standard_normal(shape, np.float32))
    config = PruneConfig(
        pattern="tw_k",
        sparsity=params["sparsity"],
        tile=params["tile"],
        k_granularity=params["k_granularity"],
    )
    (mask,) = make_masks([Matrix(name="weight", scores=np.abs(weight))], config)
    return TileSparse.from_dense(
        weight.astype(jnp.bfloat16),
        mask.kept,
        tile=params["tile"],
        granularity=params["k_granularity"],
    )


def kept_features(params: Params) -> int:
    """Input features that a tile keeps on average."""
    unit = params["k_granularity"]
    return max(round(params["K"] * (1 - params["sparsity"]) / unit), 1) * unit


def _ours(name: str, params: Params) -> Form:
    def operands(seed: int) -> tuple:
        return normal(seed + 1, params["K"], params["M"]), sparse_weight(params, seed)

    def exact(x: jax.Array, w: TileSparse) -> jax.Array:
        return reference.tile_sparse_matmul(x.T, w).T

    return Form(
        operands,
        functools.partial(
            tile_sparse_matmul,
            feature_major=True,
            implementation=None if name == "auto" else name,
        ),
        exact,
        metrics=lambda operands: {"weight_mb": operands[1].nbytes / 1e6},
    )


def _tile_element_wise(name: str | None, params: Params) -> Form:
    """Tiles and, besides, single weights; `name` None lets the op choose the form."""
    room = round(params["K"] * (1 - params["sparsity"]) * SINGLES)
    if params["sparsity"] not in (0.5, 0.75):
        raise NotImplementedError("single weights are measured at 50% and 75%")

    def operands(seed: int) -> tuple:
        keys = jax.random.split(jax.random.key(seed))
        shape = room, params["N"]
        rows = jax.random.randint(keys[0], shape, 0, params["K"], jnp.int32)
        values = jax.random.normal(keys[1], shape, jnp.bfloat16)
        singles = SingleWeights(values, rows, params["K"])
        x = normal(seed + 1, params["K"], params["M"])
        return x, sparse_weight(params, seed), singles

    def function(x: jax.Array, w: TileSparse, singles: SingleWeights) -> jax.Array:
        return tile_sparse_matmul(
            x, w, singles=singles, feature_major=True, implementation=name
        )

    def exact(x: jax.Array, w: TileSparse, singles: SingleWeights) -> jax.Array:
        columns = jnp.broadcast_to(jnp.arange(params["N"]), singles.rows.shape)
        dense = w.to_dense().at[singles.rows, columns].add(singles.values)
        return dense.T @ x

    return Form(operands, function, exact)


def _dense(params: Params, features: int, torch: bool = False) -> Form:
    def operands(seed: int) -> tuple:
        return (
            normal(seed, params["M"], features),
            normal(seed + 1, features, params["N"]),
        )

    return Form(
        operands,
        lambda x, w: x @ w,
        jnp.matmul,
        torch=torch,
        metrics=lambda operands: {"weight_mb": operands[1].nbytes / 1e6},
    )


def _int8(params: Params) -> Form:
    """Weight-only int8 with a scale for each output feature."""
    if params["M"] > DECODING:
        raise NotImplementedError("int8 weights are for decoding")

    def operands(seed: int) -> tuple:
        key = jax.random.key(seed)
        w = jax.random.randint(key, (params["K"], params["N"]), -127, 128, jnp.int8)
        scale = jnp.abs(normal(seed + 1, params["N"])) + 0.1
        return normal(seed, params["M"], params["K"]), w, scale.astype(jnp.bfloat16)

    def function(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        return (x @ w.astype(x.dtype)) * scale

    return Form(operands, function, function)


def _bcoo(params: Params) -> Form:
    from jax.experimental import sparse

    if params["K"] * params["N"] > 768 * 3072 or params["M"] > 128:
        raise NotImplementedError("BCOO is far slower: one small shape is enough")
    kept = round(params["K"] * params["N"] * (1 - params["sparsity"]))

    def operands(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        at = np.sort(rng.permutation(params["K"] * params["N"])[:kept])
        places = jnp.asarray(np.stack(np.divmod(at, params["N"]), axis=1))
        w = sparse.BCOO((normal(seed, kept), places), shape=(params["K"], params["N"]))
        return normal(seed + 1, params["M"], params["K"]), w

    def function(x: jax.Array, w: sparse.BCOO) -> jax.Array:
        y = sparse.bcoo_dot_general(
            w.T,
            x.T,
            dimension_numbers=(((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return y.astype(x.dtype)

    return Form(operands, function, lambda x, w: w.todense().T @ x.T)


def _two_four(params: Params) -> Form:
    """PyTorch's 2:4 weights on cuSPARSELt, with the fastest algorithm."""
    if params["sparsity"] != 0.5:
        raise NotImplementedError("2:4 sparsity prunes 50%")
    if params["M"] % 16:
        raise NotImplementedError(f"M={params['M']}, 2:4 wants a multiple of 16")
    pattern = np.array([1, 0, 0, 1], bool)

    def operands(seed: int) -> tuple:
        mask = jnp.tile(jnp.asarray(pattern), (params["N"], params["K"] // 4))
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

    return Form(operands, function, exact, torch=True, prepare=prepare)


def _block_sparse(params: Params) -> Form:
    """PyTorch's block-sparse rows of 64 x 64, by its Triton kernel."""
    rows, columns = params["N"] // 64, params["K"] // 64
    kept = max(round(rows * columns * (1 - params["sparsity"])), 1)

    def operands(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        mask = np.zeros(rows * columns, bool)
        mask[rng.permutation(rows * columns)[:kept]] = True
        wide = np.kron(mask.reshape(rows, columns), np.ones((64, 64), bool))
        w = jnp.where(jnp.asarray(wide), normal(seed, params["N"], params["K"]), 0)
        return normal(seed + 1, params["M"], params["K"]), w

    def function(x: Any, w: Any) -> Any:
        import torch

        return torch.nn.functional.linear(x, w)

    return Form(
        operands,
        function,
        lambda x, w: x @ w.T,
        torch=True,
        prepare=lambda x, w: (x, w.to_sparse_bsr((64, 64))),
    )


FORMS: Mapping[str, Callable[[Params], Form]] = {
    **{name: functools.partial(_ours, name) for name in OURS},
    "tew": functools.partial(_tile_element_wise, "mosaic_gpu"),
    "tew_auto": functools.partial(_tile_element_wise, None),
    "dense": lambda params: _dense(params, params["K"]),
    "torch_dense": lambda params: _dense(params, params["K"], torch=True),
    "ideal": lambda params: _dense(params, kept_features(params)),
    "cusparselt_2_4": _two_four,
    "torch_bsr": _block_sparse,
    "bcoo": _bcoo,
    "int8_dense": _int8,
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
    operands: tuple
    exact: Callable
    function: Callable
    costs: dict[str, float]


def compiled(form: Form) -> Compiled:
    """Makes a set of operands and compiles, which needs the GPU hardly."""
    if form.torch and not timing.torch_is_there():
        raise NotImplementedError("torch with a GPU is not there")
    operands = form.operands(0)
    # To try out the products of the definition would take longer than to run it once.
    options = {"xla_gpu_autotune_level": 0} if timing.on_gpu() else None
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(form.exact).lower(*harness._to_fp32(operands)).compile(options)
    if form.torch:
        return Compiled(form, operands, exact, form.function, {})
    program = timing.Program(form.function).lower(*operands).compile()
    return Compiled(form, operands, exact, program.program, program.costs)


def make_ready(done: Compiled) -> Ready:
    """Makes all operands and compares."""
    form, function, sets = done.form, done.function, [done.operands]
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(sets[0]))
    count = timing.number_of_sets(nbytes) if timing.on_gpu() else 2
    sets += [form.operands(100 * i) for i in range(1, count)]
    want = done.exact(*harness._to_fp32(sets[0]))
    metrics = done.costs | (form.metrics(sets[0]) if form.metrics else {})
    if form.torch:
        tensors = [harness._to_torch(operands) for operands in sets]
        tensors = [form.prepare(*t) if form.prepare else t for t in tensors]
        output, costs = timing.torch_first_calls(function, tensors[0])
        found, metrics = harness._from_torch(output), metrics | costs
        take = functools.partial(timing.torch_device_time, function, tensors)
    else:
        found = jax.block_until_ready(function(*sets[0]))
        timer = timing.jax_device_time if timing.on_gpu() else timing.jax_wall_time
        take = functools.partial(timer, function, sets)
    return Ready(take, _max_rel_error(found, want), metrics)


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

    return float(worst(harness._to_fp32(jax.tree.map(jnp.asarray, found)), want))


def measure(
    wanted: Sequence[Case],
    names: Sequence[str],
    samples: int,
    forms: Mapping[str, Callable[[Params], Form]] | None = None,
) -> Iterator[tuple[Case, Results]]:
    """Times the implementations of each case in turns, with pauses.

    The clock of a busy GPU falls within a tenth of a second: without pauses what runs
    after a long product would look slow.

    Args:
        wanted: the cases.
        names: of implementations.
        samples: times to take of each.
        forms: of the implementations; None is `FORMS`.
    """
    forms = FORMS if forms is None else forms
    for case in wanted:
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
    """Speed-up over the best dense product of the same run."""
    dense = [medians[name] for name in ("dense", "torch_dense") if name in medians]
    if not dense:
        return {}
    return {name: {"speed_up": min(dense) / t} for name, t in medians.items()}


def metrics(params: Params, seconds: float) -> dict[str, float]:
    """Rate as if nothing were pruned."""
    work = 2 * params["M"] * params["N"] * params["K"]
    return {"dense_tflops": work / seconds / 1e12}


def case(
    layer: str,
    m: int,
    sparsity: float,
    tile: int = 128,
    granularity: int = 1,
    mask: str = "equal",
) -> Case:
    """One problem."""
    k, n = SHAPES[layer]
    return Case(
        layer,
        {
            "M": m,
            "N": n,
            "K": k,
            "sparsity": sparsity,
            "tile": tile,
            "k_granularity": granularity,
            "mask": mask,
        },
    )


def cases() -> list[Case]:
    """All layers, tokens and sparsities; tiles, groups and uneven tiles at one."""
    found = [case(layer, m, s) for layer in SHAPES for m in TOKENS for s in SPARSITIES]
    for sparsity in (0.5, 0.75):
        found += [case("square_4096", 4096, sparsity, tile=t) for t in (64, 256)]
        found += [case("square_4096", 4096, sparsity, granularity=g) for g in (8, 64)]
        for mask in ("uneven", "pruned"):
            found.append(case("square_4096", 4096, sparsity, mask=mask))
    return found


QUICK = Case(
    "tiny",
    {
        "M": 32,
        "N": 192,
        "K": 128,
        "sparsity": 0.5,
        "tile": 64,
        "k_granularity": 1,
        "mask": "uneven",
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
    selectors={
        "rows": "M",
        "sparsity": "sparsity",
        "tile": "tile",
        "granularity": "k_granularity",
        "mask": "mask",
    },
)

if __name__ == "__main__":
    BENCHMARK.main()
