"""The Triton kernels on a GPU: values, gradients, repeatability, poisoned memory."""

import itertools

import jax.numpy as jnp
import pytest

from tests.pallas_kernels.varlen_attention.test_mosaic_gpu_gpu import (
    AWKWARD,
    FEATURES,
    LENGTHS,
    check,
)
from tests.tiers import first


pytestmark = pytest.mark.gpu
pytest.importorskip("jax_triton", exc_type=ImportError)


CASES = list(itertools.product([64, 128, 256], FEATURES, LENGTHS))
# Each feature with each head dim, and over these with each kind of lengths.
QUICK = [case for i, case in enumerate(CASES) if i % 5 == (i // 5 + i // 30) % 5]


@pytest.mark.parametrize(("head_dim", "feature", "lengths"), first(CASES, *QUICK))
def test_values_and_gradients(head_dim, feature, lengths):
    options = FEATURES[feature]
    check(*LENGTHS[lengths], head_dim, *options, implementation="triton")


@pytest.mark.parametrize("head_dim", [16, 80, 96, 192])
def test_other_head_dims(head_dim):
    options = {"causal": True}
    check(AWKWARD, AWKWARD, head_dim, 2, options, jnp.float16, implementation="triton")
