"""Which implementation of each op runs on a device: the ops themselves are asked.

``jaxscale diagnose`` prints it, and docs/install.md has the table for GPUs of all
generations.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import attention
from pallas_kernels.decode_layer import LayerWeights, decode_layer
from pallas_kernels.dispatch import recorded
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.matmul import matmul
from pallas_kernels.mosaic import DeviceSpec, use_device
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.tile_sparse_matmul import TileSparse, tile_sparse_matmul
from pallas_kernels.varlen_attention import varlen_attention


def implementations(device: DeviceSpec | None = None) -> dict[str, str]:
    """The implementation that each op takes for bfloat16 operands of a usual size.

    The ops are traced; nothing is compiled or computed. Of ops that choose by shape
    others may run for other shapes.

    Args:
        device: the device to ask for; None is the one that is there. Where there is no
            GPU, cuDNN is not found for another device either.

    Returns:
        Name of the op to name of the implementation, such as "mosaic_gpu", "triton",
        "cudnn" or "xla".
    """
    found = {}
    with contextlib.nullcontext() if device is None else use_device(device):
        for op, (run, shapes) in _EXAMPLES.items():
            with recorded() as choices:
                # A function of its own, which JAX has not traced before.
                jax.eval_shape(lambda *arrays, run=run: run(*arrays), *shapes)
            found[op] = next(name for chosen, name in choices if chosen == op)
    return found


def summary(found: Mapping[str, str]) -> str:
    """What `implementations` found, in a line.

    Example:
        >>> summary({"matmul": "xla", "layer_norm": "triton", "attention": "xla"})
        'triton for layer_norm; xla for matmul, attention'
    """
    names = sorted(set(found.values()), key=lambda name: (name == "xla", name))
    ops = {n: [op for op, name in found.items() if name == n] for n in names}
    return "; ".join(f"{name} for {', '.join(of)}" for name, of in ops.items())


def table(found: Mapping[str, str]) -> str:
    """What `implementations` found, an op a line.

    Example:
        >>> print(table({"matmul": "xla", "layer_norm": "triton"}))
        op          implementation
        matmul      xla
        layer_norm  triton
    """
    width = max(map(len, found))
    rows = [("op", "implementation"), *found.items()]
    return "\n".join(f"{op:{width}}  {name}" for op, name in rows)


def _of(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _tile_sparse(x: Any, values: Any, rows: Any, counts: Any) -> Any:
    w = TileSparse(values, rows, counts, shape=(4096, 4096))
    return tile_sparse_matmul(x, w)


_INT32, _FP32, _FP8 = jnp.int32, jnp.float32, jnp.float8_e4m3fn
_HEADS = _of(1024, 8, 128)
_EXAMPLES: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "varlen_attention": (
        lambda q, k, v: varlen_attention(q, k, v, causal=True),
        (_HEADS,) * 3,
    ),
    "attention": (
        lambda q, k, v: attention(q, k, v, causal=True),
        (_of(4, 1024, 8, 128),) * 3,
    ),
    "paged_attention": (
        lambda q, kv, pages, table, lengths: paged_attention(
            q, kv, pages, 0, table, lengths
        ),
        (
            _of(8, 1, 8, 128),
            _of(8, 1, 2, 2, 128),
            _of(1, 64, 2, 2, 64, 128),
            _of(8, 8, dtype=_INT32),
            _of(8, dtype=_INT32),
        ),
    ),
    "tile_sparse_matmul": (
        _tile_sparse,
        (
            _of(4096, 4096),
            _of(32, 1024, 128),
            _of(32, 1024, dtype=_INT32),
            _of(32, dtype=_INT32),
        ),
    ),
    "quantized_matmul": (
        quantized_matmul,
        (_of(16, 4096), _of(4096, 4096, dtype=jnp.int8), _of(4096, dtype=_FP32)),
    ),
    "scaled_matmul": (
        scaled_matmul,
        (
            _of(4096, 4096, dtype=_FP8),
            _of(4096, 4096, dtype=_FP8),
            _of(4096, dtype=_FP32),
            _of(4096, dtype=_FP32),
        ),
    ),
    "decode_layer": (
        lambda attended, residual, layer: decode_layer(
            attended, residual, layer, eps=1e-5
        ),
        (
            _of(8, 4096),
            _of(4096, 8, dtype=_FP32),
            LayerWeights(
                out=_of(4096, 4096),
                mlp_norm=_of(4096),
                gate_up=_of(4096, 16384),
                down=_of(8192, 4096),
            ),
        ),
    ),
    "matmul": (matmul, (_of(4096, 4096), _of(4096, 4096))),
    "layer_norm": (
        lambda x, scale: layer_norm(x, scale, eps=1e-5),
        (_of(4096, 1024), _of(1024)),
    ),
}
