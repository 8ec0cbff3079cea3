"""Linear layers behind a norm on a GPU."""

import functools

import jax
import pytest

from tests.pallas_kernels.matmul.test_dense import PLAIN, assert_close
from tests.pallas_kernels.matmul.test_norm_dense import by_kernel, expected, operands
from tests.tolerances import num_different


pytestmark = pytest.mark.gpu
draw = jax.jit(operands, static_argnums=(0, 1, 2))
products = jax.jit(functools.partial(expected, activation=None))


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize(
    ("m", "widths", "k"),
    [
        (8, (64,), 64),
        (128, (768, 768, 768), 768),
        (128, (3072,), 768),
        (144, (384, 384, 384), 384),
        (256, (768, 768, 768), 768),
        (200, (64, 1024), 512),
    ],
)
def test_values_repeat_and_are_right(m, widths, k, activation):
    arrays = draw(m, widths, k)
    f = jax.jit(functools.partial(by_kernel, activation=activation))
    y, zs = f(*arrays)
    want_y, *want = products(*arrays)
    assert_close([y, *zs], [want_y, *(PLAIN[activation](z) for z in want)])
    for _ in range(10):
        again = jax.tree.leaves(f(*arrays))
        for a, b in zip([y, *zs], again, strict=True):
            assert num_different(a, b) == 0
