"""Values of arrays that are concrete at trace time."""

import jax
import numpy as np
from jax import Array
from jax.core import Tracer


def concrete(x: Array | np.ndarray) -> np.ndarray | None:
    """The values of `x` if they are concrete, None if they are traced."""
    if isinstance(x, Tracer):
        return None
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return None
    values = np.asarray(x)
    # Differences of unsigned integers never fall below zero.
    return values.astype(np.int64) if values.dtype.kind == "u" else values
