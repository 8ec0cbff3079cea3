"""The measure of errors: what it must not miss."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import relative_error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_never_close(dtype, wrong):
    expected = jnp.ones((216, 1, 64))
    for actual in (expected.at[3:5].set(wrong), jnp.full_like(expected, wrong)):
        assert not relative_error(actual.astype(dtype), expected) < 1e6


def test_relative_to_the_largest_of_the_reference():
    actual, reference = np.array([4.0, 1.0]), np.array([4.0, 0.0])
    assert relative_error(actual, reference) == 0.25
    assert relative_error(actual, np.zeros(2)) == 4.0
