"""A linear layer with a residual and the norm of the sum, on a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.pallas_kernels.matmul.test_dense_norm import expected, operands, run
from tests.tolerances import RELATIVE, num_different, relative_error


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (8, 256, 64),
        (256, 768, 3072),
        (688, 768, 768),
        (2688, 1024, 1024),
        (9984, 768, 3072),
    ],
)
def test_values_repeat_and_are_right(m, n, k):
    x, w, bias, *added = jax.jit(operands, static_argnums=(0, 1, 2))(m, n, k)
    spoil = [jnp.stack([jnp.full_like(a, jnp.nan), a]) for a in (w, bias)]
    options = {"layer": jnp.int32(1), "implementation": "mosaic_gpu"}
    f = jax.jit(functools.partial(run, **options))
    y = f(x, *spoil, *added)
    want = jax.jit(expected)(x, w, bias, *added)
    assert relative_error(y, want) < RELATIVE[jnp.dtype(jnp.bfloat16)]
    for _ in range(10):
        assert num_different(f(x, *spoil, *added), y) == 0
