"""Features, lengths and data that the tests of every implementation share.

All cases have one budget of tokens and one number of sequences, so that one
compilation of a feature serves all patterns of lengths.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.varlen_attention import varlen_attention_reference
from tests.tolerances import relative_error


TOKENS = 480
HEADS, HEAD_DIM, VALUE_DIM = 4, 8, 12
MAX_SEQS = 10

AWKWARD = [1, 7, 8, 9, 63, 64, 65, 127, 129]
LENGTHS = {
    "awkward": (AWKWARD, AWKWARD),
    "zeros": ([0, 65, 0, 0, 129, 1, 0, 64, 0, 0], [0, 65, 0, 0, 129, 1, 0, 64, 0, 0]),
    "one long": ([3, 1, 2, 441, 1, 1, 4, 7, 9, 2], [3, 1, 2, 441, 1, 1, 4, 7, 9, 2]),
    "full budget": ([480], [480]),
    "none": ([], []),
    # Longer, shorter, missing on either side.
    "cross": (
        [129, 1, 64, 0, 65, 7, 9, 63, 127],
        [7, 127, 65, 8, 0, 64, 63, 9, 129],
    ),
}

# (key/value heads, options); sinks and slopes are replaced by arrays.
FEATURES = {
    "full": (4, {}),
    "causal": (4, {"causal": True}),
    "causal grouped": (2, {"causal": True}),
    "multi-query": (1, {}),
    "window left": (2, {"window": (20, None)}),
    "window right": (4, {"window": (None, 5)}),
    "window both": (2, {"window": (12, 33)}),
    "window causal": (1, {"causal": True, "window": (31, 9)}),
    "window of one": (4, {"window": (0, 0)}),
    "softcap": (2, {"softcap": 0.7, "causal": True}),
    "sinks": (2, {"sinks": True, "causal": True}),
    "alibi": (1, {"alibi_slopes": True}),
    "all": (
        2,
        {
            "causal": True,
            "window": (40, None),
            "scale": 0.6,
            "softcap": 1.5,
            "sinks": True,
            "alibi_slopes": True,
        },
    ),
}


def prefix_sums(lengths):
    """[MAX_SEQS + 1], the last value repeated."""
    lengths = [*lengths, *[0] * (MAX_SEQS - len(lengths))]
    return np.cumsum([0, *lengths]).astype(np.int32)


def arrays(feature, dtype="float32", tokens=TOKENS):
    """``(arrays, options)`` of a feature: q, k, v and perhaps sinks, alibi_slopes."""
    num_kv_heads, options = FEATURES[feature]
    options = dict(options)
    tensors = random_arrays(
        tokens,
        HEADS,
        num_kv_heads,
        sinks=options.pop("sinks", False),
        alibi=options.pop("alibi_slopes", False),
    )
    for name in "qkv":
        tensors[name] = tensors[name].astype(jnp.dtype(dtype))
    return tensors, options


def random_arrays(tokens, heads, num_kv_heads, *, sinks, alibi):
    """numpy arrays, because preparing data with jax would compile each operation."""
    rng = np.random.default_rng(0)
    shapes = {
        "q": (tokens, heads, HEAD_DIM),
        "k": (tokens, num_kv_heads, HEAD_DIM),
        "v": (tokens, num_kv_heads, VALUE_DIM),
    }
    tensors = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    if sinks:
        tensors["sinks"] = rng.normal(size=heads).astype(np.float32)
    if alibi:
        tensors["alibi_slopes"] = np.float32([0.5, 0.1, 0.02, 0.0])[:heads]
    return tensors


def cotangents(dtype="float32", tokens=TOKENS, heads=HEADS):
    """Random gradients of ``out`` and ``lse``."""
    rng = np.random.default_rng(1)
    dout = rng.normal(size=(tokens, heads, VALUE_DIM)).astype(jnp.dtype(dtype))
    return dout, rng.normal(size=(tokens, heads)).astype(np.float32)


def poison(tensors, dout, dlse, cu_q, cu_k, value):
    """Copies with `value` in what lies past the last sequence."""
    tensors = {name: x.copy() for name, x in tensors.items()}
    dout, dlse = dout.copy(), dlse.copy()
    for x in (tensors["q"], dout, dlse):
        x[cu_q[-1] :] = value
    for x in (tensors["k"], tensors["v"]):
        x[cu_k[-1] :] = value
    return tensors, dout, dlse


def value_and_gradients(attention):
    """``f(tensors, dout, dlse, ...) -> (out, lse, gradients of tensors)``, jitted."""

    def run(tensors, dout, dlse, *args):
        (out, lse), pullback = jax.vjp(lambda t: attention(t, *args), tensors)
        return out, lse, pullback((dout.astype(out.dtype), dlse))[0]

    return jax.jit(run)


@functools.cache
def _definition(scale, softcap):
    def attention(tensors, cu_q, cu_k, window):
        return varlen_attention_reference(
            **tensors,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            window=window,
            scale=scale,
            softcap=softcap,
        )

    return value_and_gradients(attention)


def reference(options):
    """`value_and_gradients` of the definition, in fp32.

    Features that are off are passed as values that do nothing, so that a handful of
    compilations serves all of them.
    """
    left, right = options.get("window", (None, None))
    right = 0 if options.get("causal") else right
    window = tuple(np.int32(10**6 if w is None else w) for w in (left, right))
    run = _definition(options.get("scale", HEAD_DIM**-0.5), options.get("softcap"))

    def call(tensors, dout, dlse, cu_q, cu_k):
        heads = tensors["q"].shape[1]
        off = {
            "sinks": np.full(heads, -np.inf, np.float32),
            "alibi_slopes": np.zeros(heads, np.float32),
        }
        out, lse, grads = run(off | tensors, dout, dlse, cu_q, cu_k, window)
        return out, lse, {name: grads[name] for name in tensors}

    return call


def saturated(tokens, gap=2.5):
    """bf16 q, k, v, dout of one head: a query has nearly all weight on its own key."""
    rng = np.random.default_rng(2)
    k, v, dout = rng.normal(size=(3, tokens, 1, 64)).astype(np.float32)
    return [x.astype(jnp.bfloat16) for x in (gap * k, k, v, dout)]


def assert_gradients_of_saturated_weights(gradients, tokens):
    """As good as in plain JAX, or off by no more than fp32 sums of ``dout . v`` are.

    Args:
        gradients: ``f(q, k, v, dout) -> (dq, dk, dv)``.
        tokens: of one sequence.
    """
    for gap in (2.5, 5.0):
        arrays = [jnp.asarray(x) for x in saturated(tokens, gap)]
        low = [np.asarray(x, np.float32) for x in arrays]
        q, k, v, dout = low
        exact = plain_gradients(*map(jnp.asarray, low))
        plain, ours = plain_gradients(*arrays), gradients(*arrays)
        # Of a difference between two sums, times keys or queries.
        noise = 2**-22 * np.abs(dout * v).sum(-1).max() * q.shape[-1] ** -0.5
        floors = noise * np.abs(k).max(), noise * np.abs(q).max(), 0.0
        for x, y, z, floor in zip(ours, plain, exact, floors, strict=True):
            if gap == 5.0 and floor:
                # What plain JAX loses here depends on what XLA merges.
                assert relative_error(x, z) < floor / np.abs(z).max()
            else:
                assert relative_error(y, z) < 0.01
                assert relative_error(x, z) < 2 * relative_error(y, z)


def plain_gradients(q, k, v, dout):
    """What plain JAX gives for one sequence, softmax in fp32, in the type of q."""

    def attend(q, k, v):
        scores = jnp.einsum("tnh,snh->nts", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(q.shape[-1] ** -0.5 * scores, axis=-1)
        return jnp.einsum("nts,snh->tnh", weights.astype(v.dtype), v)

    return jax.jit(lambda q, k, v, dout: jax.vjp(attend, q, k, v)[1](dout))(
        q, k, v, dout
    )
