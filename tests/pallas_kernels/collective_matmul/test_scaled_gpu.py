"""Collective products of 8-bit operands on two GPUs: right, and equal each time."""

import numpy as np
import pytest

from pallas_kernels.collective_matmul import CollectiveConfig
from tests.pallas_kernels.collective_matmul.test_kernels_gpu import gpus
from tests.pallas_kernels.collective_matmul.test_scaled import (
    E4M3,
    E5M2,
    assert_close,
    gather,
    reduce,
)


pytestmark = pytest.mark.multigpu
ORDER_OF_K = CollectiveConfig(
    tile_k=128, gather_order="k", store_slots=1, buffers=8, buffer_bytes=1024
)


@pytest.mark.parametrize(
    ("op", "shape", "types", "axis", "config"),
    [
        (gather, ((), 512, (256, 512), 512), (E4M3, E4M3), -1, None),
        (gather, ((), 512, (256,), 512), (E4M3, E5M2), None, ORDER_OF_K),
        (gather, ((2,), 2 * 136, (1024,), 2048), (E5M2, E4M3), None, None),
        (reduce, ((), 512, 512, 512), (E4M3, E4M3), -1, None),
        (reduce, ((2,), 2 * 136, 1024, 2048), (E5M2, E4M3), None, None),
    ],
)
def test_values_repeat_and_are_right(op, shape, types, axis, config):
    mesh = gpus(2)
    options = {"implementation": "mosaic_gpu", "config": config}
    first, wants = op(mesh, *shape, types, axis, **options)
    assert_close(first, wants)
    for _ in range(3):
        again, _ = op(mesh, *shape, types, axis, **options)
        for y, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(np.asarray(y), np.asarray(other))
