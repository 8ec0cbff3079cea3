"""Device memory in which small arrays keep out of the way of large ones."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array


_NUM = 64
_BYTES = 256 << 10  # more than the inputs and results of a step
_SEPARATOR = 256


def reserve_small(devices: Sequence[Any]) -> list[Array]:
    """Reserve 16 MiB of each GPU for arrays of at most 256 KiB.

    A CUDA graph holds the addresses of what its kernels read and write. Where they are
    others than at the launch before, XLA changes every node, which takes the host more
    than the launch. The memory that a program computes in is freed with it, so it is
    the same again, unless an array that is kept, such as the tokens of the step before,
    has been put there meanwhile.

    XLA puts an array into the smallest gap that it fits into. So there are gaps for
    small ones, from now on.

    Args:
        devices: Those of the model. Nothing happens on CPUs.

    Returns:
        What lies between the gaps; they last as long as this is kept.
    """
    kept = []
    for device in devices:
        if device.platform != "gpu" or device.process_index != jax.process_index():
            continue
        gaps = []
        for _ in range(_NUM):
            for size, held in ((_BYTES, gaps), (_SEPARATOR, kept)):
                held.append(jax.device_put(np.zeros(size, np.int8), device))
        jax.block_until_ready(gaps)
        for gap in gaps:
            gap.delete()
    return jax.block_until_ready(kept)
