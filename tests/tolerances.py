"""Tolerances against an fp32 reference, by the type of the computation."""

import jax.numpy as jnp
import numpy as np


RELATIVE = {
    jnp.dtype("float32"): 1e-5,  # summation order
    jnp.dtype("float16"): 5e-3,
    jnp.dtype("bfloat16"): 2e-2,  # 8 bits of mantissa, outputs rounded once
}
"""Largest allowed ``max|x - reference| / max|reference|``."""


def relative_error(actual, reference) -> float:
    """``max|actual - reference| / max|reference|``, computed in fp32; NaN stays NaN.

    By numpy, because maxima that XLA computes on a CPU may skip NaN.
    """
    actual, reference = (np.asarray(a).astype(np.float32) for a in (actual, reference))
    with np.errstate(all="ignore"):  # inf - inf
        scale = np.max(np.abs(reference))
        error = np.max(np.abs(actual - reference))
        return float(error / (1.0 if scale == 0 else scale))
