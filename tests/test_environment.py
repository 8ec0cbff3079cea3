"""The rules under which every test runs are in force."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jaxscale.checks import pip_install
from jaxscale.sharding import constrain, dp


def test_eight_simulated_devices():
    assert len(jax.devices("cpu")) == 8


def test_dtypes_are_promoted_strictly():
    with pytest.raises(ValueError, match="no available implicit dtype promotion"):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.bfloat16)


def test_warnings_are_errors():
    with pytest.raises(UserWarning, match="loud"):
        warnings.warn("loud", UserWarning, stacklevel=1)


def test_shapes_of_public_functions_are_checked():
    pytest.importorskip("beartype")
    with pytest.raises(TypeCheckError, match="parameter 'x'"):
        constrain([1.0, 2.0], ("batch",), dp())


def test_types_of_functions_without_shapes_are_checked():
    pytest.importorskip("beartype")
    with pytest.raises(TypeCheckError, match="extra"):
        pip_install(3)


def test_shape_checks_can_be_switched_off(no_shape_hook):
    assert constrain(jnp.ones(2), ("batch",), dp()).shape == (2,)
    assert "3" in pip_install(3)
    with pytest.raises(AttributeError):
        constrain([1.0, 2.0], ("batch",), dp())
