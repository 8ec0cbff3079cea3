"""A feed-forward network and a block of LLaMA in PyTorch, with 2:4 weights.

Matmuls are those of cuSPARSELt, each with its fastest algorithm; what lies between
them is compiled, and SDPA attends. Weights are [out, in], one of every two pairs zero.

Legend: B batch, T tokens of a row, M tokens, D model, F hidden, N query heads, K
key/value heads, H head dim.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.nn import BlockConfig


def prepare(config: BlockConfig, x: Any, weights: Mapping[str, Any]) -> tuple:
    """Arguments of `mlp` and `block` from tensors, the weights compressed.

    Args:
        config: Sizes; a block has RMS norms of scale 1 and rotated heads.
        x: [B, T, D].
        weights: By the name of the layer.
    """
    import torch

    tokens = x.shape[0] * x.shape[1]
    packed = {}
    for name, weight in weights.items():
        compressed = torch._cslt_compress(weight)
        like = x.new_ones(tokens, weight.shape[1]).t()  # [in, M], as activations come
        if name == "down":
            like = like.contiguous()  # behind the activation
        options = {"transpose_result": name not in ("gate", "up")}
        algorithm = torch._cslt_sparse_mm_search(compressed, like, **options)
        packed[name] = compressed, algorithm, options
    cos = sin = None
    if (rope := config.attention.rope) is not None:
        frequencies = x.new_tensor(
            rope.inv_freq(config.attention.head_dim).tolist(), dtype=torch.float32
        )
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = positions[:, None, None] * frequencies  # [T, 1, H / 2]
        cos, sin = angles.cos(), angles.sin()
    return x, packed, config, cos, sin


def _product(packed: Mapping[str, Any], name: str, x: Any) -> Any:
    """[M, out], or [out, M] of gate and up, of [in, M]."""
    import torch

    compressed, algorithm, options = packed[name]
    return torch._cslt_sparse_mm(compressed, x, alg_id=algorithm, **options)


def mlp(x: Any, packed: Mapping[str, Any], *_: Any) -> Any:
    """[B, T, D] to [B, T, D]."""
    flat = x.flatten(0, 1).t()  # [D, M]
    hidden = _compiled(swiglu)(
        _product(packed, "gate", flat), _product(packed, "up", flat)
    )  # [F, M]
    return _product(packed, "down", hidden).view(x.shape)


def block(
    x: Any, packed: Mapping[str, Any], config: BlockConfig, cos: Any, sin: Any
) -> Any:
    """[B, T, D] to [B, T, D]."""
    import torch.nn.functional as F

    heads, kv_heads = config.attention.num_heads, config.attention.num_kv_heads
    rows, length, _ = x.shape
    y = _compiled(norm)(x, config.norm_eps).flatten(0, 1).t()  # [D, M]
    q, k, v = (
        _product(packed, name, y).view(rows, length, count, -1)  # [B, T, N, H]
        for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads))
    )
    q, k = _compiled(rotate)(q, k, cos, sin)
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        enable_gqa=heads != kv_heads,
    ).transpose(1, 2)  # [B, T, N, H]
    x = x + _product(packed, "out", y.reshape(rows * length, -1).t()).view(x.shape)
    return x + mlp(_compiled(norm)(x, config.norm_eps), packed)


def norm(x: Any, eps: float) -> Any:
    """RMS norm with a scale of 1."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def swiglu(gate: Any, up: Any) -> Any:
    """The hidden features."""
    import torch

    return torch.nn.functional.silu(gate) * up


def rotate(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """Queries and keys, rotated in fp32."""
    import torch

    def each(x: Any) -> Any:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    return each(q), each(k)


@functools.cache
def _compiled(function: Callable) -> Callable:
    import torch

    return torch.compile(function)
