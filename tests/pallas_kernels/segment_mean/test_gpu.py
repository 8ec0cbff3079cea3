"""Means of packed sequences, on a GPU."""

import jax
import numpy as np
import pytest

from pallas_kernels.segment_mean import segment_mean
from pallas_kernels.segment_mean.specs import SPECS
from tests.pallas_kernels.segment_mean.test_segment_mean import expected, operands


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SPECS)
def test_values_repeat_and_are_right(name):
    spec = SPECS[name]
    draw = np.random.default_rng(0)
    ends = np.sort(draw.integers(0, spec.tokens + 1, (2, spec.sequences)))
    bounds = [[0, *row.tolist()] for row in ends]
    x, cu = operands(spec.tokens, spec.features, *bounds)
    f = jax.jit(lambda x, cu: segment_mean(x, cu, implementation="mosaic_gpu"))
    found = np.asarray(f(x, cu))
    np.testing.assert_allclose(found, expected(x, cu), atol=1e-5)
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(f(x, cu)), found)
