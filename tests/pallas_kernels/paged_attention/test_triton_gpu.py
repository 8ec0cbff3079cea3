"""The Triton kernels of paged attention on a GPU."""

import jax.numpy as jnp
import pytest

from tests.pallas_kernels.paged_attention.cases import Case, check


pytestmark = pytest.mark.gpu
pytest.importorskip("jax_triton", exc_type=ImportError)
LENGTHS = (0, 1, 63, 64, 255, 256, 257, 900)


@pytest.mark.parametrize("pages", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("head_dim", "page"), [(64, 16), (128, 64), (256, 8)])
def test_values(head_dim, page, window, pages):
    case = Case(
        lengths=LENGTHS,
        heads=(8, 2),
        head_dim=head_dim,
        page=page,
        dtype=jnp.bfloat16,
        pages_dtype=jnp.dtype(pages),
        window=window,
    )
    check(case, implementation="triton")


def test_drafts_and_softcap():
    case = Case(
        lengths=LENGTHS,
        queries=4,
        num_new=(4, 0, 1, 2, 3, 4, 4, 1),
        heads=(8, 1),
        head_dim=96,
        page=32,
        dtype=jnp.float16,
        softcap=3.0,
    )
    check(case, implementation="triton")
