"""The measure of errors: what it must not miss."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import error_on_gpu, num_different, relative_error


BOTH = pytest.mark.parametrize("measure", [relative_error, error_on_gpu])


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_never_close(measure, dtype, wrong):
    expected = jnp.ones((216, 1, 64))
    for actual in (expected.at[3:5].set(wrong), jnp.full_like(expected, wrong)):
        assert not measure(actual.astype(dtype), expected) < 1e6


@BOTH
def test_relative_to_the_largest_of_the_reference(measure):
    actual, reference = np.array([4.0, 1.0]), np.array([4.0, 0.0])
    assert measure(actual, reference) == 0.25
    assert measure(actual, np.zeros(2)) == 4.0


def test_every_bit_counts():
    x = jnp.asarray([0.0, 1.0, np.nan, np.inf], jnp.bfloat16)
    assert num_different(x, x) == 0
    assert num_different(x, -x) == 4
    assert num_different(x, x.at[1].set(np.nan)) == 1
