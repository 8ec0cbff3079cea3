"""Encoders as one writes them in plain JAX: a padded batch, a mask, one step per line.

The baseline of `benchmarks.encoder`, and, with its switches, the steps from it to ours
that ByteTransformer's paper reports. It reads the parameters of an `EncoderModel` and
computes what that computes. Axes: B sequences, L padded length, T packed tokens, N
heads, H head dim, D model, P entries of the table of relative positions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxscale.models import EncoderConfig
from jaxscale.nn.packing import pack, positions, unpack
from pallas_kernels.matmul import gelu
from pallas_kernels.varlen_attention import varlen_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switches:
    """What a plain encoder does."""

    attention: Literal["cudnn", "xla", "varlen"] = "cudnn"
    """cuDNN's fused attention, stored scores, or ours on packed tokens."""
    token_budget: int | None = None
    """All but the attention works on packed tokens, so many; None: on the padding too.
    Attention other than ours pads again and packs again, in every layer."""
    separate: bool = False
    """Nothing is fused: a kernel for each bias, activation, sum and norm."""
    scan: bool = False
    """Compile one layer and loop over it."""


def hidden(
    model: Any, tokens: jax.Array, lengths: jax.Array, switches: Switches
) -> jax.Array:
    """The activations of the last layer, [B, L, D], zero in the padding.

    Args:
        model: an `EncoderModel`, unstacked, post-norm, whose parameters are read.
        tokens: [B, L], padded on the right.
        lengths: [B].
        switches: how.
    """
    config: EncoderConfig = model.config
    length = tokens.shape[1]
    bounds = None
    places = jnp.arange(length)[None]
    if switches.token_budget is not None:
        tokens, bounds = pack(tokens, lengths, switches.token_budget)
        places = positions(bounds, switches.token_budget)
    own = _Steps(switches.separate, config.norm_eps)
    x = model.embed.table[tokens]
    if model.token_types is not None:
        x = own(x + model.token_types.table[0])
    if model.positions is not None:
        x = own(x + model.positions.table[places + config.position_offset])
    x = own.norm(x, model.embed_norm)
    if model.embed_out is not None:
        x = own.linear(x, model.embed_out)
    relative = None
    if config.relative is not None:
        relative = own.norm(model.relative.table[...], model.relative_norm)
    activate = _activation(config)

    def layer(x: jax.Array, block: Any) -> jax.Array:
        attention = block.attention
        q, k, v = (own.linear(x, p) for p in attention.inputs)
        bias = None
        if relative is not None:
            bias = _relative_bias(q, k, attention, relative, config)
        out = _attend(q, k, v, bias, lengths, bounds, length, config, switches)
        x = own.norm(own(x + own.linear(own(out), attention.out)), block.attention_norm)
        hidden = own(activate(own.linear(x, block.mlp.up)))
        return own.norm(own(x + own.linear(hidden, block.mlp.down)), block.mlp_norm)

    if switches.scan and config.layer_groups is None:
        stacked = jax.tree.map(lambda *p: jnp.stack(p), *model.blocks)
        x, _ = jax.lax.scan(lambda x, block: (layer(x, block), None), x, stacked)
    else:
        for i in range(config.num_layers):
            x = layer(x, model.blocks[config.block_of(i)])
    if bounds is not None:
        return unpack(x, bounds, length)
    inside = jnp.arange(length) < lengths[:, None]
    return jnp.where(inside[..., None], x, jnp.zeros((), x.dtype))


class _Steps:
    """Linear layers and norms; if `separate`, what each gives is a kernel's result."""

    def __init__(self, separate: bool, eps: float):
        self.separate, self.eps = separate, eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(x) if self.separate else x

    def linear(self, x: jax.Array, layer: Any) -> jax.Array:
        product = self(x @ layer.kernel[...])
        return self(product + layer.bias[...])

    def norm(self, x: jax.Array, layer: Any) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y = y * layer.scale[...].astype(jnp.float32)
        return self((y + layer.bias[...].astype(jnp.float32)).astype(x.dtype))


def _activation(config: EncoderConfig) -> Callable[[jax.Array], jax.Array]:
    if config.activation == "gelu":
        return gelu  # faster than that of jax
    return lambda x: jax.nn.gelu(x, approximate=True)


def _heads(x: jax.Array, config: EncoderConfig) -> jax.Array:
    return x.reshape(*x.shape[:-1], config.num_heads, config.head_dim)


def _scale(config: EncoderConfig) -> float:
    terms = 0 if config.relative is None else config.relative.num_terms
    return (config.head_dim * (1 + terms)) ** -0.5


def _relative_bias(
    q: jax.Array, k: jax.Array, attention: Any, table: jax.Array, config: EncoderConfig
) -> jax.Array:
    """DeBERTa's terms of all pairs of a padded batch, [B, N, L, L]."""
    relative = config.relative
    if relative is None or q.ndim != 3:
        raise NotImplementedError("relative positions of packed tokens")
    if not relative.share_projections or relative.num_terms != 2:
        raise NotImplementedError("tables with projections of their own")
    steps = _Steps(False, 0.0)
    to_keys, to_queries = (
        _heads(steps.linear(table, p), config) for p in (attention.key, attention.query)
    )
    i = jnp.arange(q.shape[1])
    entries = relative.buckets.entry(i[:, None] - i)[None, None]  # [1, 1, L, L]
    by_query = jnp.einsum("blnh,pnh->bnlp", _heads(q, config), to_keys)
    by_key = jnp.einsum("blnh,pnh->bnlp", _heads(k, config), to_queries)
    bias = jnp.take_along_axis(by_query, entries, axis=3)
    read = jnp.take_along_axis(by_key, entries.swapaxes(2, 3), axis=3)
    return (bias + read.swapaxes(2, 3)) * jnp.asarray(_scale(config), q.dtype)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    lengths: jax.Array,
    bounds: jax.Array | None,
    length: int,
    config: EncoderConfig,
    switches: Switches,
) -> jax.Array:
    q, k, v = (_heads(x, config) for x in (q, k, v))
    scale, width = _scale(config), config.d_model
    if switches.attention == "varlen":
        if bounds is None:
            raise NotImplementedError("our attention takes packed tokens")
        out = varlen_attention(q, k, v, bounds, scale=scale)
        return jnp.asarray(out).reshape(-1, width)
    if bounds is not None:
        q, k, v = (unpack(x, bounds, length) for x in (q, k, v))
    if switches.attention == "cudnn":
        out = _cudnn(q, k, v, bias, lengths, scale)
    else:
        out = _stored_scores(q, k, v, bias, lengths, scale, switches.separate)
    out = out.reshape(*out.shape[:2], width)
    if bounds is None:
        return out
    return pack(out, lengths, switches.token_budget or 0)[0]


def _cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    lengths: jax.Array,
    scale: float,
) -> jax.Array:
    if jax.devices()[0].platform != "gpu":
        raise NotImplementedError("cuDNN needs a GPU")
    options: dict[str, Any] = {
        "query_seq_lengths": lengths,
        "key_value_seq_lengths": lengths,
    }
    if bias is not None:
        inside = jnp.arange(q.shape[1]) < lengths[:, None]
        lowest = jnp.asarray(-1e9, q.dtype)
        options = {"bias": jnp.where(inside[:, None, None], bias, lowest)}
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, implementation="cudnn", **options
    )


def _stored_scores(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    lengths: jax.Array,
    scale: float,
    separate: bool,
) -> jax.Array:
    own = _Steps(separate, 0.0)
    inside = jnp.arange(q.shape[1]) < lengths[:, None]
    scores = own(jnp.einsum("blnh,bsnh->bnls", q, k))
    scores = own(scores.astype(jnp.float32) * scale)
    if bias is not None:
        scores += bias.astype(jnp.float32)
    scores = own(jnp.where(inside[:, None, None], scores, -1e30))
    weights = own(jax.nn.softmax(scores, axis=-1).astype(v.dtype))
    return jnp.einsum("bnls,bsnh->blnh", weights, v)
