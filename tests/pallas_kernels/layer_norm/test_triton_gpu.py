"""The Triton kernel on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layer_norm import layer_norm, reference
from tests.tolerances import RELATIVE, relative_error


pytestmark = pytest.mark.gpu
pytest.importorskip("jax_triton", exc_type=ImportError)


@pytest.mark.parametrize("shape", [(1, 768), (4097, 768), (300, 1000), (64, 8192)])
def test_values(shape):
    rng = np.random.default_rng(0)
    x, residual = (
        jnp.asarray(3 + rng.normal(size=shape), jnp.bfloat16) for _ in range(2)
    )
    scale, bias, first = (
        jnp.asarray(rng.normal(size=shape[1]), jnp.bfloat16) for _ in range(3)
    )
    more = {"residual": residual, "x_bias": first, "eps": 1e-5}
    y = layer_norm(x, scale, bias, implementation="triton", **more)
    want = reference.layer_norm(x, scale, bias, **more)
    assert relative_error(y, want) < RELATIVE[x.dtype]
