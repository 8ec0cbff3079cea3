"""Layers and training steps with tile-wise sparse weights, all included.

``python -m benchmarks.tile_sparse_layers --case 'swiglu*' --pass fwd`` selects.

The layers are those of `jaxscale.nn`, with every projection pruned to the same
sparsity, as `jaxscale.pruning.sparsify` makes them: what transposes the activations,
biases and activations cost is in the times. `swiglu_dropped` is the same feed-forward
network with half of its hidden features pruned as a whole, and left out. ``fwd_bwd`` is
forward, gradient of the input and gradients of the kept weights, as in training under a
frozen mask. ``ideal`` computes dense layers with as many input features as a tile
keeps. Kernels of one case are told apart by ``implementation``.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import tile_sparse_matmul as products
from benchmarks.harness import Benchmark, Case, Custom, Measurement, Params
from jaxscale.nn import (
    MLP,
    Block,
    BlockConfig,
    TileSparseLinear,
    attention_state,
)
from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.linear import Linear
from jaxscale.pruning.layers import linears, replace_linears
from pallas_kernels.tile_sparse_matmul import TileSparse


SCALE = 0.02  # of weights and biases, as models are initialized


def make_layer(params: Params, dtype: Any) -> Any:
    """The dense layer, with random weights and biases."""
    types = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
    if params["layer"] == "mlp":
        return MLP(params["D"], params["F"], activation="swiglu", **types)
    heads = params["D"] // 64
    config = BlockConfig(
        d_model=params["D"],
        d_ff=params["F"],
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=64,
            causal=False,
            rope=None,
            use_bias=True,
            use_out_bias=True,
        ),
        norm="layernorm",
        post_norm=True,
        activation="gelu",
        mlp_bias=True,
    )
    block = Block(config, **types)
    for i, layer in enumerate(linears(block).values()):
        bias = SCALE * products.normal(i, layer.kernel.shape[1])
        layer.bias = nnx.Param(bias.astype(dtype))
    return block


def _sparse(params: Params, implementation: str | None, seed: int) -> Any:
    """The layer with sparse projections."""

    def convert(name: str, layer: Linear) -> TileSparseLinear:
        k, n = layer.kernel.shape
        sparsity = params["sparsity"]
        if dropped := params["dropped"]:  # the rest keeps more, so that all is equal
            if name.endswith("down"):
                k = round(k * (1 - dropped))
            else:
                n = round(n * (1 - dropped))
            sparsity = 1 - (1 - sparsity) / (1 - dropped)
        w = products.sparse_weight(
            {**params, "K": k, "N": n, "sparsity": sparsity, "mask": "equal"},
            seed + len(name),
        )
        return TileSparseLinear(
            TileSparse.stack([w.with_values(w.values * SCALE)]),
            split=None,
            kernel_axes=layer.kernel_axes,
            out_axes=layer.out_axes,
            bias=layer.bias,
            dtype=layer.dtype,
            implementation=implementation,
        )

    layer = make_layer(params, jnp.bfloat16)
    return replace_linears(
        layer, {name: functools.partial(convert, name) for name in linears(layer)}
    )


def densified(layer: Any) -> Any:
    """The layer in fp32 with dense weights, differentiable in what is stored."""
    found = jax.tree.map(lambda x: x, layer)
    for path, node in nnx.iter_modules(layer):
        if not isinstance(node, TileSparseLinear):
            continue
        stored = copy.copy(node)
        stored.dtype = jnp.float32
        w = jax.tree.map(lambda x: x[0], stored.weight)
        dense = Linear(
            *w.shape,
            kernel_axes=node.kernel_axes,
            out_axes=node.out_axes,
            use_bias=node.bias is not None,
            rngs=nnx.Rngs(0),
        )
        dense.kernel = nnx.Param(w.to_dense())
        if node.bias is not None:
            dense.bias = node.bias
        parent = found
        for key in path[:-1]:
            parent = getattr(parent, str(key))
        setattr(parent, str(path[-1]), dense)
    for _, node in nnx.iter_modules(found):
        if hasattr(node, "dtype"):
            setattr(node, "dtype", jnp.float32)  # noqa: B010  of no common class
    return found


def _inputs(params: Params, seed: int) -> tuple[jax.Array, jax.Array]:
    rows = params["M"] // params["length"]
    shape = rows, params["length"], params["D"]
    return products.normal(seed + 1, *shape), products.normal(seed + 2, *shape)


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
    # But for rounding, the bias of keys has none: a softmax does not see it.
    named = nnx.to_flat_state(grads)
    return y, dx, [grad[...] for path, grad in named if path[-2:] != ("key", "bias")]


def _form(params: Params, layer_of: Callable[[int], Any]) -> products.Form:
    def exact(x: jax.Array, layer: Any) -> jax.Array:
        return _apply(x, densified(layer))

    if params["pass"] == "fwd":
        return products.Form(
            lambda seed: (_inputs(params, seed)[0], layer_of(seed)), _apply, exact
        )
    return products.Form(
        lambda seed: (*_inputs(params, seed), layer_of(seed)),
        functools.partial(_step, _apply),
        functools.partial(_step, exact),
    )


def _ours(name: str, params: Params) -> products.Form:
    if name == "triton" and params["pass"] != "fwd":
        raise NotImplementedError("Triton has no kernel for gradients")
    implementation = None if name == "auto" else name
    return _form(params, functools.partial(_sparse, params, implementation))


def _dense(params: Params) -> products.Form:
    def layer_of(seed: int) -> Any:
        layer = make_layer(params, jnp.bfloat16)
        for i, one in enumerate(linears(layer).values()):
            weight = products.normal(seed + i, *one.kernel.shape) * SCALE
            one.kernel = nnx.Param(weight.astype(jnp.bfloat16))
        return layer

    return _form(params, layer_of)


def _ideal(params: Params) -> products.Form:
    """A dense feed-forward network whose products have fewer input features."""
    if params["layer"] != "mlp" or params["pass"] != "fwd":
        raise NotImplementedError("for the forward pass of feed-forward networks")
    features, hidden = params["D"], params["F"]
    few, little = (round(n * (1 - params["sparsity"])) for n in (features, hidden))

    def operands(seed: int) -> tuple:
        shapes = (few, hidden), (few, hidden), (little, features)
        weights = [
            (products.normal(seed + i, *s) * SCALE).astype(jnp.bfloat16)
            for i, s in enumerate(shapes)
        ]
        return products.normal(seed + 9, params["M"], few), *weights

    def function(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return (jax.nn.silu(x @ gate) * (x @ up))[:, :little] @ down

    return products.Form(operands, function, function)


FORMS: Mapping[str, Callable[[Params], products.Form]] = {
    **{name: functools.partial(_ours, name) for name in products.OURS},
    "dense": _dense,
    "ideal": _ideal,
}


def case(
    name: str, m: int, sparsity: float, run: str, granularity: int = 1, **changes: Any
) -> Case:
    """One layer."""
    mlp = name.startswith("swiglu")
    shape = {"D": 4096, "F": 14336} if mlp else {"D": 768, "F": 3072}
    params = {
        "layer": "mlp" if mlp else "block",
        "pass": run,
        "M": m,
        **shape,
        "length": 128,
        "sparsity": sparsity,
        "dropped": 0.5 if name.endswith("dropped") else 0.0,
        "tile": 128,
        "k_granularity": granularity,
    }
    return Case(name, params | changes)


def cases() -> list[Case]:
    """The layers of a Llama-3 8B and of a BERT-base."""
    return [
        case("swiglu", 4096, 0.75, "fwd"),
        case("swiglu_dropped", 4096, 0.75, "fwd"),
        case("swiglu", 4096, 0.75, "fwd_bwd"),
        case("swiglu", 4096, 0.75, "fwd_bwd", granularity=64),
        case("bert_base", 8192, 0.75, "fwd"),
        case("swiglu", 4096, 0.5, "fwd"),
        case("swiglu", 4096, 0.5, "fwd_bwd"),
        case("bert_base", 8192, 0.75, "fwd_bwd"),
        case("bert_base", 8192, 0.5, "fwd"),
    ]


QUICK = case("swiglu", 128, 0.5, "fwd_bwd", D=64, F=128, length=64, tile=64)


def compare(params: Params, medians: Mapping[str, float]) -> Mapping[str, dict]:
    """Speed-up over the dense layer of the same run."""
    if "dense" not in medians:
        return {}
    return {name: {"speed_up": medians["dense"] / t} for name, t in medians.items()}


def _elsewhere(params: Params, seed: int, samples: int) -> Measurement:
    raise NotImplementedError("`measure` times all implementations")


def measure(wanted: Sequence[Case], names: Sequence[str], samples: int) -> Any:
    """As the products are measured."""
    return products.measure(wanted, names, samples, FORMS)


BENCHMARK = Benchmark(
    name="tile_sparse_layers",
    cases=cases(),
    quick_cases=[QUICK],
    kernels=("tile_sparse_matmul", "matmul"),
    inputs=lambda params, key: (),
    implementations={name: Custom(_elsewhere) for name in FORMS},
    measure=measure,
    compare=compare,
    max_rel_error=5e-2,  # each step of a layer rounds to bfloat16
    selectors={
        "rows": "M",
        "pass": "pass",
        "sparsity": "sparsity",
        "granularity": "k_granularity",
    },
)

if __name__ == "__main__":
    BENCHMARK.main()
