"""Attention of unpacked sequences by cuDNN's flash attention, through JAX.

Axis letters: B batch, T queries, S keys, N query heads, K key/value heads, H head dim.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention.config import Problem
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec


def unsupported(problem: Problem, device: DeviceSpec | None) -> str | None:
    """Say why cuDNN cannot do it, or is not there; None where it can."""
    p = problem
    unlimited = p.causal or p.window == (None, None)
    plain = p.queries == p.keys and unlimited
    plain = plain and p.softcap is None and not p.sinks and not p.alibi
    types = (jnp.bfloat16, jnp.float16)
    if not plain or p.dtype not in types or p.head_dim % 8 or not p.queries:
        return (
            "cudnn attention needs bf16 or fp16, a head dim divisible by 8, as many"
            " queries as keys, at least one, no softcap, sinks or ALiBi, and a window"
            f" only if causal, got {p}; use implementation=None to fall back"
        )
    if device is None:
        return "cudnn attention needs an NVIDIA GPU; use implementation=None"
    widest = 256 if device.compute_capability >= (9, 0) else 128
    if p.head_dim > widest:
        return (
            f"cudnn attention: head dim {p.head_dim}, expected at most {widest} on"
            f" {device.name}; use implementation='xla'"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and len(mesh.manual_axes) < len(mesh.axis_names):
        return (
            "cudnn attention: JAX cannot partition it inside a jax.shard_map over only"
            f" {mesh.manual_axes} of the mesh axes {mesh.axis_names}; map over all of"
            " them, or use implementation=None"
        )
    return _missing()


@functools.cache
def _missing() -> str | None:
    """JAX's message where there is no cuDNN, as where programs are lowered on a CPU."""
    x = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    call = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(call, x, x, x)
    except RuntimeError as error:
        return f"cudnn attention: {error} Use implementation=None"
    return None


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    alibi_slopes: jax.Array | None,
    *,
    problem: Problem,
    scale: float,
    device: DeviceSpec | None,
) -> jax.Array:
    """See `pallas_kernels.attention.attention`; defaults are resolved.

    Args:
        q: [B,T,N,H].
        k: [B,T,K,H].
        v: [B,T,K,H].
        sinks: must be None.
        alibi_slopes: must be None.
        problem: mask and shape.
        scale: factor of the scores.
        device: the GPU.

    Returns:
        [B,T,N,H].

    Raises:
        Unsupported: cuDNN cannot do it, or it is not installed.
    """
    if (reason := unsupported(problem, device)) is not None:
        raise Unsupported(reason)
    del sinks, alibi_slopes
    left, _ = problem.window
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=problem.causal,
        local_window_size=None if left is None else (left, 0),
        implementation="cudnn",
    )
