"""Layers with the weights that pruning leaves, transposes and activations included.

``python -m benchmarks.tile_sparse_layers --case 'swiglu*' --pass fwd`` selects.

The layers are those of `jaxscale.nn` at the sizes of LLaMA-3 8B: the feed-forward
network (`swiglu`) and a whole block with attention (`block`), every projection pruned
as `benchmarks.pruned_model` says and stored as `jaxscale.pruning.sparsify` does, hidden
features left out where it leaves them out. ``length`` 1 is the size of a step of
decoding, of which a block has everything but the reading of a cache. ``fwd_bwd`` is
forward, gradient of the input and gradients of the kept weights, as in training under a
frozen mask. Kernels of one case are told apart by ``implementation``; ``int8`` are
ours, quantized; ``cusparselt_2_4`` are layers in PyTorch:
`benchmarks.rivals.torch_two_four`.

Times are those of all ``layers`` of the model that was pruned, one after another, each
with an input of its own: blocks keep unequal shares, and the bits per byte are those of
the model. Baselines take every layer alike: one is timed and counted as often.

``matmul_only`` are the dense matmuls alone. With the share of them that is ``kept``
they say what a layer would take whose matmuls ran at their rate: ``ideal_speed_up`` is
the time of the dense layer over that.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import pruned_model
from benchmarks import tile_sparse_matmul as products
from benchmarks.measure import command
from benchmarks.measure.harness import Benchmark, Case, Custom, Measurement, Params
from benchmarks.pruned_model import SCALE, normal
from benchmarks.rivals import torch_two_four
from benchmarks.workloads import byte_text
from jaxscale import models
from jaxscale.nn import (
    MLP,
    Block,
    BlockConfig,
    QuantizedLinear,
    TileSparseLinear,
    attention_state,
)
from jaxscale.nn.linear import Linear
from jaxscale.nn.tile_sparse_linear import can_join_sparse
from jaxscale.pruning.layers import linears, replace_linears


def sizes(name: str) -> BlockConfig:
    """A block of an architecture."""
    if name == "tiny":
        return byte_text.decoder(128, 1, 32, 64).block()
    return models.preset(name).block()


def make_layer(params: Params, dtype: Any) -> Any:
    """The dense layer, with random weights."""
    config = sizes(params["architecture"])
    types = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
    if params["layer"] == "mlp":
        return MLP(config.d_model, config.d_ff, activation=config.activation, **types)
    return Block(config, **types)


type Parts = dict[str, pruned_model.Part]
"""What a mask keeps of each linear layer of a block, by name."""


def _parts(params: Params, layer: Any) -> list[Parts]:
    """Of each block of the model."""
    model = pruned_model.load(params["model"])
    blocks = model.of(params["mask"], params["sparsity"])
    return [
        {
            name: block[name.rpartition(".")[2]].scaled(*one.kernel.shape)
            for name, one in linears(layer).items()
        }
        for block in blocks
    ]


def kept(params: Params) -> float:
    """The share of the weights of all layers that is kept."""
    blocks = _parts(params, _outline(params))
    return products.kept(part for parts in blocks for part in parts.values())


def _outline(params: Params) -> Any:
    """The dense layer, without arrays."""
    return jax.eval_shape(lambda: make_layer(params, jnp.bfloat16))


def _filled(layer: Any, make: Mapping[str, Callable[[Linear], Any]]) -> Any:
    """The layer with these linear layers; scales of norms are 1."""
    return jax.tree.map(
        lambda x: (
            jnp.ones(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
        ),
        replace_linears(layer, make),
    )


def _random(seed: int, layer: Linear) -> Linear:
    """The layer with random weights."""
    weight = normal(seed, *layer.kernel.shape) * SCALE
    layer.kernel = nnx.Param(weight.astype(jnp.bfloat16))
    return layer


def _sparse(
    params: Params, implementation: str | None, blocks: list[Parts], seed: int, i: int
) -> Any:
    """Layer `i` with sparse projections, those dense that stay so."""

    def convert(name: str, layer: Linear) -> Any:
        own = seed + 10 * i + len(name)
        if blocks[i][name].dense:
            return _random(own, layer)
        return blocks[i][name].linear(layer, own, implementation=implementation)

    layer = _filled(
        _outline(params), {n: functools.partial(convert, n) for n in blocks[i]}
    )
    if params["pass"] == "fwd":  # as served
        mlp = layer if isinstance(layer, MLP) else layer.mlp
        if can_join_sparse(mlp.inputs):
            mlp.join_inputs(1)
    return layer


def densified(layer: Any) -> Any:
    """The layer in fp32 with dense weights, differentiable in what is stored."""
    found = jax.tree.map(lambda x: x, layer)
    for path, node in nnx.iter_modules(layer):
        if not isinstance(node, TileSparseLinear | QuantizedLinear):
            continue
        weight = _dense_weight(node)
        dense = Linear(
            *weight.shape,
            kernel_axes=node.kernel_axes,
            out_axes=node.out_axes,
            rngs=nnx.Rngs(0),
        )
        dense.kernel = nnx.Param(weight)
        parent = found
        for key in path[:-1]:
            parent = getattr(parent, str(key))
        setattr(parent, str(path[-1]), dense)
    for _, node in nnx.iter_modules(found):
        if hasattr(node, "dtype"):
            setattr(node, "dtype", jnp.float32)  # noqa: B010  of no common class
    return found


def _dense_weight(layer: TileSparseLinear | QuantizedLinear) -> jax.Array:
    if isinstance(layer, QuantizedLinear):
        whole = layer.kernel[...].astype(jnp.float32) * layer.scale[...][:, None]
        return whole[: layer.features].T
    stored = copy.copy(layer)
    stored.dtype = jnp.float32
    return jax.tree.map(lambda x: x[0], stored.weight).to_dense()


def _inputs(params: Params, seed: int) -> tuple[jax.Array, jax.Array]:
    rows, width = params["M"] // params["length"], sizes(params["architecture"]).d_model
    shape = rows, params["length"], width
    return normal(seed + 1, *shape), normal(seed + 2, *shape)


def _apply(x: jax.Array, layer: Any) -> jax.Array:
    if isinstance(layer, MLP):
        return layer(x)
    return layer(x, attention_state(x.shape[:2]))[0]


def _step(run: Callable, x: jax.Array, dy: jax.Array, layer: Any) -> tuple:
    """Forward, the gradient of the input, and those of the parameters."""
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def forward(x: jax.Array, params: Any) -> jax.Array:
        return run(x, nnx.merge(graph, params, rest))

    y, pullback = jax.vjp(forward, x, params)
    dx, grads = pullback(dy)
    return y, dx, jax.tree.leaves(grads)


def _form(
    params: Params, layer_of: Callable[[int, int], Any], **options: Any
) -> products.Form:
    def exact(x: jax.Array, layer: Any) -> jax.Array:
        return _apply(x, densified(layer))

    if params["pass"] == "fwd":
        return products.Form(
            lambda seed, i: (_inputs(params, seed + 10 * i)[0], layer_of(seed, i)),
            _apply,
            exact,
            **options,
        )
    return products.Form(
        lambda seed, i: (*_inputs(params, seed + 10 * i), layer_of(seed, i)),
        functools.partial(_step, _apply),
        functools.partial(_step, exact),
        **options,
    )


def _ours(name: str, params: Params) -> products.Form:
    if name == "triton" and params["pass"] != "fwd":
        raise NotImplementedError("Triton has no kernel for gradients")
    implementation = None if name == "auto" else name
    blocks = _parts(params, _outline(params))
    layer_of = functools.partial(_sparse, params, implementation, blocks)
    return _form(params, layer_of, layers=len(blocks))


def _dense_layer(params: Params, seed: int, i: int = 0) -> Any:
    layer = _outline(params)
    return _filled(
        layer,
        {
            name: functools.partial(_random, seed + place)
            for place, name in enumerate(linears(layer))
        },
    )


def _dense(params: Params) -> products.Form:
    layer_of = functools.partial(_dense_layer, params)
    return _form(params, layer_of, repeats=params["layers"])


def _int8(params: Params) -> products.Form:
    if params["pass"] != "fwd":
        raise NotImplementedError("weights of 8 bits have no gradients")

    def layer_of(seed: int, i: int) -> Any:
        layer = _dense_layer(params, seed)
        quantized = functools.partial(QuantizedLinear.of, weights="int8")
        return replace_linears(layer, dict.fromkeys(linears(layer), quantized))

    return _form(params, layer_of, repeats=params["layers"])


def _products(params: Params) -> products.Form:
    """The matmuls of the dense layer, each with an input of its own."""
    if params["pass"] != "fwd":
        raise NotImplementedError("the products of the forward pass alone")

    def operands(seed: int, i: int) -> tuple:
        layer = _dense_layer(params, seed)
        weights = [one.kernel[...] for one in linears(layer).values()]
        widths = {w.shape[0] for w in weights}
        xs = {str(k): normal(seed + k, params["M"], k) for k in sorted(widths)}
        return xs, weights

    def function(xs: Mapping[str, Any], weights: Sequence[Any]) -> list:
        return [xs[str(w.shape[0])] @ w for w in weights]

    return products.Form(operands, function, function, repeats=params["layers"])


def _two_four(params: Params) -> products.Form:
    """The layer in PyTorch, with matmuls of cuSPARSELt."""
    products.check_two_four(params)
    if params["pass"] != "fwd":
        raise NotImplementedError("for the forward pass")
    if params["M"] % 16:
        raise NotImplementedError(f"M={params['M']}, 2:4 wants a multiple of 16")
    config = sizes(params["architecture"])

    def operands(seed: int, i: int) -> tuple:
        pattern = jnp.array([True, False, False, True])
        weights = {}
        for place, (name, one) in enumerate(linears(_outline(params)).items()):
            inputs, outputs = one.kernel.shape
            mask = jnp.tile(pattern, (outputs, inputs // 4))
            w = normal(seed + place, outputs, inputs) * SCALE
            key = name.rpartition(".")[2]
            weights[key] = jnp.where(mask, w, 0).astype(jnp.bfloat16)
        return _inputs(params, seed)[0], weights

    def exact(x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
        def convert(name: str, layer: Linear) -> Linear:
            layer.kernel = nnx.Param(weights[name.rpartition(".")[2]].T)
            return layer

        layer = _outline(params)
        makers = {name: functools.partial(convert, name) for name in linears(layer)}
        return _apply(x, densified(_filled(layer, makers)))

    return products.Form(
        operands,
        torch_two_four.block if params["layer"] == "block" else torch_two_four.mlp,
        exact,
        torch=True,
        prepare=functools.partial(torch_two_four.prepare, config),
        repeats=params["layers"],
    )


FORMS: Mapping[str, Callable[[Params], products.Form]] = {
    **{name: functools.partial(_ours, name) for name in products.OURS},
    "dense": _dense,
    "cusparselt_2_4": _two_four,
    "int8": _int8,
    "matmul_only": _products,
}


def case(name: str, m: int, length: int, run: str = "fwd") -> Case:
    """One layer, without a mask."""
    params = {
        "layer": "mlp" if name == "swiglu" else "block",
        "pass": run,
        "M": m,
        "length": length,
        "architecture": "llama3_8b",
        "model": pruned_model.TRAINED,
        "layers": pruned_model.LAYERS[pruned_model.TRAINED],
    }
    return Case(name, params)


def cases() -> list[Case]:
    """Prompts, decode steps and training, under every mask."""
    plain = [
        case("swiglu", 4096, 2048),
        case("block", 4096, 2048),
        *(case(name, m, 1) for name in ("swiglu", "block") for m in (1, 32)),
        case("swiglu", 4096, 2048, "fwd_bwd"),
    ]
    return [case for one in plain for case in products.masked(one)]


QUICK = {
    "architecture": "tiny",
    "model": pruned_model.UNTRAINED,
    "layers": pruned_model.LAYERS[pruned_model.UNTRAINED],
}


def compare(params: Params, medians: Mapping[str, float]) -> Mapping[str, dict]:
    """Speed-up over the dense layer of the same run, and the ideal one."""
    found = products.accuracy(params, medians)
    found.get("matmul_only", {}).clear()  # it is no model
    if "dense" not in medians:
        return found
    dense, share = medians["dense"], kept(params)
    for name, t in medians.items():
        found[name]["speed_up"] = dense / t
        if name in products.OURS:
            found[name]["kept"] = share
            if "matmul_only" in medians:
                saved = medians["matmul_only"] * (1 - share)
                found[name]["ideal_speed_up"] = dense / (dense - saved)
    return found


def _elsewhere(params: Params, seed: int, samples: int) -> Measurement:
    raise NotImplementedError("`measure` times all implementations")


def measure(wanted: Sequence[Case], names: Sequence[str], samples: int) -> Any:
    """As the matmuls are measured."""
    return products.measure(wanted, names, samples, FORMS)


BENCHMARK = Benchmark(
    name="tile_sparse_layers",
    cases=cases(),
    quick_cases=[
        Case("swiglu", {**one.params, **QUICK, "mask": mask, "sparsity": 0.5})
        for one, mask in (
            (case("swiglu", 128, 64, "fwd_bwd"), "tw"),
            (case("swiglu", 128, 64), "tew"),
        )
    ],
    kernels=("tile_sparse_matmul", "matmul"),
    inputs=lambda params, key: (),
    implementations={name: Custom(_elsewhere) for name in FORMS},
    measure=measure,
    compare=compare,
    max_rel_error=5e-2,  # each step of a layer rounds to bfloat16
    selectors={
        "rows": "M",
        "pass": "pass",
        "mask": "mask",
        "sparsity": "sparsity",
    },
)

if __name__ == "__main__":
    command.run(BENCHMARK)
