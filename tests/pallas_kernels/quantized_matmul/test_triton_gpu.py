"""The Triton kernel on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import quantized_matmul, reference
from tests.tolerances import RELATIVE, relative_error


pytestmark = pytest.mark.gpu
pytest.importorskip("jax_triton", exc_type=ImportError)


@pytest.mark.parametrize("weight", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("tokens", "depth", "features"),
    [
        *((1, 4096, 14336), (17, 1024, 4096), (64, 4096, 6144), (500, 1000, 1032)),
        (2048, 4096, 6144),
    ],
)
def test_values(tokens, depth, features, weight):
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, depth)), jnp.bfloat16)
    w = jnp.asarray(rng.integers(-127, 128, (features, depth)), jnp.dtype(weight))
    scale = jnp.asarray(rng.uniform(0.01, 0.02, features), jnp.float32)
    y = quantized_matmul(x, w, scale, implementation="triton")
    want = reference.quantized_matmul(x, w, scale)
    assert relative_error(y, want) < RELATIVE[x.dtype]
