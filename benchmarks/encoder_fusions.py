"""What XLA fuses of a layer of BERT, and what the rest costs.

``python -m benchmarks.encoder_fusions``. ByteTransformer writes kernels by hand for
bias + residual + norm and for bias + GELU behind a matmul; here the compiler is
expected to make them. For each, on packed tokens in bf16, device time and ``kernels``,
how many a call launches:

- ``xla``: left to the compiler.
- ``separate``: a kernel for each step.
- ``jaxscale``: matmuls with their bias and activation by our kernel, as in our models.

``product`` is that of the case ``product_bias_gelu`` alone, what no fusion behind it
can beat; ``product_bias_jax_gelu`` is the same with the function of jax. ``qkv`` are
three products of one input with their biases, which XLA turns into one product and
takes apart again; ``qkv_apart`` keeps it from doing so. ``layer`` is a whole layer with
our attention, to weigh the others by, and ``layer_with_barriers`` the same with the
matmuls of one input kept apart and norms computed once.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import encoder
from benchmarks.measure import command
from benchmarks.measure.harness import Benchmark, Case, Jax, Params
from jaxscale.nn.norms import layer_norm
from pallas_kernels import layer_norm as kernels
from pallas_kernels.matmul import dense, gelu
from pallas_kernels.varlen_attention import varlen_attention
from pallas_kernels.varlen_attention.specs import bytetransformer


HEAD_DIM = 64
EPS = 1e-12


def _barrier(separate: bool) -> Callable[[jax.Array], jax.Array]:
    return jax.lax.optimization_barrier if separate else (lambda x: x)


def _norm(own: Callable, product: Any, residual: Any, w: Any) -> jax.Array:
    x = own(residual + own(product + w["bias"]))
    return layer_norm(x, w["scale"], w["shift"], EPS).astype(x.dtype)


def _gelu(own: Callable, product: Any, w: Any) -> jax.Array:
    return gelu(own(product + w["bias"]))


type Piece = Callable[[Any, Any], Any]


def bias_residual_norm(own: Callable) -> Piece:
    """``norm(residual + product + bias)``."""
    return lambda x, w: _norm(own, x["product"], x["residual"], w)


def product_bias_gelu(own: Callable) -> Piece:
    """``gelu(x @ kernel + bias)``."""
    return lambda x, w: _gelu(own, own(x["residual"] @ w["kernel"]), w)


def product_bias_jax_gelu(own: Callable) -> Piece:
    """The same with the GELU of jax, by the complementary error function."""

    def run(x: Any, w: Any) -> jax.Array:
        wide = own(own(x["residual"] @ w["kernel"]) + w["bias"])
        return jax.nn.gelu(wide, approximate=False)

    return run


def product(own: Callable) -> Piece:
    """``x @ kernel``."""
    return lambda x, w: x["residual"] @ w["kernel"]


def qkv(own: Callable) -> Piece:
    """Three matmuls of one input and their biases."""
    return lambda x, w: _three([x["residual"]] * 3, w)


def qkv_apart(own: Callable) -> Piece:
    """The same matmuls of what the compiler takes for three inputs."""
    return lambda x, w: _three(jax.lax.optimization_barrier([x["residual"]] * 3), w)


def _three(inputs: Any, w: Any) -> tuple:
    named = zip(inputs, "qkv", strict=True)
    return tuple(x @ w[name]["kernel"] + w[name]["bias"] for x, name in named)


def layer(own: Callable) -> Piece:
    """A post-norm layer on packed tokens, as the compiler takes it."""
    return lambda x, w: _layer(own, lambda y: y, x, w)


def layer_with_barriers(own: Callable) -> Piece:
    """The same as our models say it."""
    return lambda x, w: _layer(own, jax.lax.optimization_barrier, x, w)


def qkv_dense(x: Any, w: Any) -> tuple:
    """`qkv` by our kernel."""
    return _dense(x["residual"], [w[name] for name in "qkv"])


def product_bias_gelu_dense(x: Any, w: Any) -> jax.Array:
    """`product_bias_gelu` by our kernel."""
    return _dense(x["residual"], [w], "gelu")[0]


def bias_residual_norm_dense(x: Any, w: Any) -> jax.Array:
    """`bias_residual_norm` by our kernel."""
    return _norm_dense(x["product"], x["residual"], w)


def layer_dense(x: Any, w: Any) -> jax.Array:
    """`layer` as in our models."""
    residual, keep = x["residual"], jax.lax.optimization_barrier
    heads = _heads(residual)
    q, k, v = (y.reshape(-1, heads, HEAD_DIM) for y in qkv_dense(x, w))
    out = jnp.asarray(varlen_attention(q, k, v, x["bounds"])).reshape(residual.shape)
    h = keep(_norm_dense(out @ w["out"]["kernel"], residual, w["out"]))
    (wide,) = _dense(h, [w["up"]], "gelu")
    return _norm_dense(wide @ w["down"]["kernel"], h, w["down"])


def _norm_dense(product: Any, residual: Any, w: Any) -> jax.Array:
    return kernels.layer_norm(
        product,
        w["scale"],
        w["shift"],
        residual=residual,
        x_bias=w["bias"],
        eps=EPS,
    )


def _dense(x: Any, layers: Any, activation: str | None = None) -> tuple:
    kernels, biases = ([w[name] for w in layers] for name in ("kernel", "bias"))
    return dense(x, kernels, biases, activation=activation)


def _layer(own: Callable, keep: Callable, x: Any, w: Any) -> jax.Array:
    residual = x["residual"]
    inputs = keep([residual] * 3)
    products = [own(y @ w[n]["kernel"]) for y, n in zip(inputs, "qkv", strict=True)]
    q, k, v = (
        own(y + w[n]["bias"]).reshape(-1, _heads(residual), HEAD_DIM)
        for y, n in zip(products, "qkv", strict=True)
    )
    out = jnp.asarray(varlen_attention(q, k, v, x["bounds"])).reshape(residual.shape)
    h = keep(_norm(own, own(own(out) @ w["out"]["kernel"]), residual, w["out"]))
    h = own(h)
    wide = own(_gelu(own, own(h @ w["up"]["kernel"]), w["up"]))
    return _norm(own, own(wide @ w["down"]["kernel"]), h, w["down"])


def _heads(x: jax.Array) -> int:
    return max(1, x.shape[-1] // HEAD_DIM)


PIECES: Mapping[str, Callable[[Callable], Piece]] = {
    piece.__name__: piece
    for piece in (
        layer,
        layer_with_barriers,
        qkv,
        qkv_apart,
        product_bias_gelu,
        product_bias_jax_gelu,
        product,
        bias_residual_norm,
    )
}


DENSE: Mapping[str, Piece] = {
    "layer": layer_dense,
    "qkv": qkv_dense,
    "product_bias_gelu": product_bias_gelu_dense,
    "bias_residual_norm": bias_residual_norm_dense,
}


FUSED = ("layer", "bias_residual_norm", "product_bias_gelu")
"""What is also measured step by step."""


def make(separate: bool, params: Params) -> Piece:
    """The piece of a case."""
    what = params["what"]
    if separate and what not in FUSED:
        raise NotImplementedError("there is nothing to fuse")
    return PIECES[what](_barrier(separate))


def make_dense(params: Params) -> Piece:
    """The piece of a case by our kernel."""
    if params["what"] not in DENSE:
        raise NotImplementedError("our kernel does not compute this")
    return DENSE[params["what"]]


def _lengths(params: Params) -> np.ndarray:
    return bytetransformer(params["batch"], params["max_len"])


def case(what: str, batch: int, max_len: int, features: int = 768) -> Case:
    """A piece of a layer on the tokens of a batch."""
    params = {"batch": batch, "max_len": max_len, "features": features, "what": what}
    params["tokens"] = encoder.token_budget({"tokens": int(_lengths(params).sum())})
    return Case(what, params)


def inputs(params: Params, key: jax.Array) -> tuple:
    """Random activations and parameters."""
    rows, d = params["tokens"], params["features"]
    keys = iter(jax.random.split(key, 40))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    def weights(fan_in: int, fan_out: int) -> dict[str, jax.Array]:
        kernel = normal(fan_in, fan_out) * jnp.asarray(fan_in**-0.5, jnp.bfloat16)
        small = {n: normal(fan_out) for n in ("bias", "scale", "shift")}
        return {"kernel": kernel, **small}

    bounds = np.cumsum([0, *_lengths(params)], dtype=np.int32)
    x = {"residual": normal(rows, d), "product": normal(rows, d)}
    x["bounds"] = jnp.asarray(bounds)
    if params["what"].startswith("product"):
        return x, weights(d, 4 * d)
    if params["what"] == "bias_residual_norm":
        return x, weights(1, d)
    shapes = dict.fromkeys(("q", "k", "v", "out"), (d, d))
    shapes |= {"up": (d, 4 * d), "down": (4 * d, d)}
    return x, {name: weights(*shape) for name, shape in shapes.items()}


BENCHMARK = Benchmark(
    name="encoder_fusions",
    cases=[case(what, 16, 1024) for what in PIECES],
    quick_cases=[case(what, 2, 16, 128) for what in PIECES],
    kernels=("varlen_attention", "matmul", "layer_norm"),
    trains=lambda case: False,
    inputs=inputs,
    reference=lambda params: PIECES[params["what"]](_barrier(False)),
    implementations={
        "jaxscale": Jax(make_dense),
        "xla": Jax(functools.partial(make, False)),
        "separate": Jax(functools.partial(make, True)),
    },
    count_kernels=True,
)

if __name__ == "__main__":
    command.run(BENCHMARK)
