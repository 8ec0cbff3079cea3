"""Decoding whose sums over devices are a kernel, on several GPUs."""

import jax
import numpy as np
import pytest

from tests.inference.test_decode_all_reduce import BF16, decoded, on_devices
from tests.tolerances import RELATIVE, relative_error


@pytest.mark.multigpu
@pytest.mark.parametrize("count", [2, 4])
def test_the_tokens_of_xla_again_and_again(count):
    """Programs in turn, whose memory for the sums is that of others in between."""
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} GPUs")
    by_xla, by_kernel = (on_devices(count, name) for name in ("xla", "low_latency"))
    tokens, logprobs = decoded(by_xla)
    live = tokens[..., 0] >= 0
    for _ in range(20):
        found, found_logprobs = decoded(by_kernel)
        np.testing.assert_array_equal(found, tokens)
        assert relative_error(found_logprobs[live], logprobs[live]) < RELATIVE[BF16]
        decoded(by_xla)
