"""Tolerances against an fp32 reference, by the type of the computation."""

import jax.numpy as jnp


RELATIVE = {
    jnp.dtype("float32"): 1e-5,  # summation order
    jnp.dtype("float16"): 5e-3,
    jnp.dtype("bfloat16"): 2e-2,  # 8 bits of mantissa, outputs rounded once
}
"""Largest allowed ``max|x - reference| / max|reference|``."""


def relative_error(actual, reference) -> float:
    """``max|actual - reference| / max|reference|``, computed in fp32; NaN stays NaN."""
    actual, reference = (
        jnp.asarray(a).astype(jnp.float32) for a in (actual, reference)
    )
    scale = jnp.max(jnp.abs(reference))
    return float(
        jnp.max(jnp.abs(actual - reference)) / jnp.where(scale > 0, scale, 1.0)
    )
