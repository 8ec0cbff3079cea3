"""The Triton kernels on a CPU: values by Triton's interpreter, compiled for four GPUs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, DeviceSpec, use_device
from pallas_kernels.varlen_attention import triton, varlen_attention
from pallas_kernels.varlen_attention.inputs import Inputs, Scores
from pallas_kernels.varlen_attention.specs import SPECS
from tests.pallas_kernels.triton_interpreter import interpreted
from tests.pallas_kernels.varlen_attention import cases
from tests.pallas_kernels.varlen_attention.test_xla import assert_matches
from tests.tiers import first
from tests.tolerances import RELATIVE


pytest.importorskip("triton")
SMALL = triton.Launch(block_q=16, block_k=32, num_warps=4, num_stages=2)
DTYPE = "float16"  # the interpreter has no arithmetic of bfloat16


def device_of(capability, smem_bytes):
    return DeviceSpec(
        name=f"sm_{capability}",
        num_sms=108,
        smem_bytes=smem_bytes,
        compute_capability=divmod(capability, 10),
    )


DEVICES = {
    80: device_of(80, 166_912),
    89: device_of(89, 101_376),
    90: H200,
    100: device_of(100, 232_448),
}


def on_cpu(monkeypatch, launch=SMALL):
    interpreted(monkeypatch, triton)
    if launch is not None:
        monkeypatch.setattr(triton, "launch_of", lambda *_: launch)


def run(options):
    return cases.value_and_gradients(
        lambda t, cu_q, cu_k: varlen_attention(
            **t,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            **options,
            return_lse=True,
            implementation="triton",
        )
    )


@pytest.mark.parametrize(
    ("feature", "lengths"),
    [
        ("full", "zeros"),
        ("causal grouped", "awkward"),
        ("window both", "cross"),
        ("window of one", "one long"),
        ("all", "cross"),
        ("all", "none"),
    ],
)
def test_values_and_gradients(feature, lengths, monkeypatch):
    on_cpu(monkeypatch)
    tensors, options = cases.arrays(feature, DTYPE)
    cu_q, cu_k = (cases.prefix_sums(x) for x in cases.LENGTHS[lengths])
    cotangents = cases.cotangents(DTYPE)
    exact = {name: x.astype(np.float32) for name, x in tensors.items()}
    clean = cases.poison(exact, *cotangents, cu_q, cu_k, 0.0)
    expected = cases.reference(options)(*clean, cu_q, cu_k)
    garbage = cases.poison(tensors, *cotangents, cu_q, cu_k, np.nan)
    actual = run(options)(*garbage, cu_q, cu_k)
    assert actual[0].dtype == DTYPE
    assert_matches(actual, expected, cu_q, cu_k, RELATIVE[jnp.dtype(DTYPE)])
