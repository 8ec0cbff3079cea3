"""Parameters as fewer arrays: all come back as they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.inference.encoder.stacked_parameters import StackedParameters
from jaxscale.nn.stacked import LayerOfStack


def random(*shape, dtype, seed):
    """Values of all magnitudes."""
    bits = np.random.default_rng(seed).integers(0, 2**16, shape, np.uint16)
    return jax.lax.bitcast_convert_type(jnp.asarray(bits), dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_come_back_as_they_were(dtype):
    leaves = [random(6, dtype=dtype, seed=i) for i in range(9)]
    leaves[3:3] = [random(6, 6, dtype=dtype, seed=20), jnp.ones(6)]  # fp32
    leaves += [random(7, dtype=dtype, seed=i) for i in range(30, 38)]
    leaves += [random(8, dtype=dtype, seed=i) for i in range(40, 42)]
    stacked = StackedParameters(leaves)
    shapes = [array.shape for array in stacked.arrays]
    assert shapes == [(9, 6), (8, 7), (6, 6), (6,), (8,), (8,)]
    back = jax.jit(stacked.leaves)(stacked.arrays)
    assert len(back) == len(leaves)
    for found, want in zip(back, leaves, strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(
            found.astype(jnp.float32), want.astype(jnp.float32)
        )


def test_stacks_of_layers_are_one_array_each():
    stacks = [random(3, 6, 6, dtype=jnp.bfloat16, seed=i) for i in range(2)]
    leaves = [LayerOfStack(stack, np.int32(i)) for i in range(3) for stack in stacks]
    leaves.insert(2, jnp.ones((2, 2)))
    stacked = StackedParameters(leaves)
    assert [a.shape for a in stacked.arrays] == [(3, 6, 6), (3, 6, 6), (2, 2)]

    found = jax.jit(stacked.leaves)(stacked.arrays)
    assert found[2].shape == (2, 2)
    for part, want in zip(found, leaves, strict=True):
        assert type(part) is type(want) or part is found[2]
        a, b = (np.asarray(x[...], np.float32) for x in (part, want))
        np.testing.assert_array_equal(a, b)


def test_shapes_are_stacked_as_arrays_are():
    leaves = [jax.ShapeDtypeStruct((4,), jnp.bfloat16)] * 8
    (stack,) = StackedParameters(leaves).arrays
    assert (stack.shape, stack.dtype) == ((8, 4), jnp.float32)
