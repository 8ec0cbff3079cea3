"""An encoder layer in one launch, on a GPU."""

import jax
import pytest

from tests.pallas_kernels.encode_layer.test_encode_layer import check, operands, run
from tests.tolerances import num_different


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("m", "last"), [(8, False), (256, False), (688, True), (1024, False)]
)
def test_values_repeat_and_are_right(m, last):
    widths = () if last else (768, 768, 768)
    arrays = jax.jit(lambda: operands(m, 768, 3072, widths, attended=768))()
    # In turns with others, whose values lie in the same memory: what is read too early
    # is theirs.
    x, residual, *rest = arrays
    others = x[..., ::-1], residual[..., ::-1], *rest
    f = jax.jit(lambda *arrays: run(arrays, "mosaic_gpu"))
    found = f(*arrays), f(*others)
    check(found[0], arrays)
    for _ in range(20):
        again = f(*arrays), f(*others)
        leaves = map(jax.tree.leaves, (found, again))
        for y, z in zip(*leaves, strict=True):
            assert num_different(y, z) == 0
