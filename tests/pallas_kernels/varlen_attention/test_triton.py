"""The Triton kernels on a CPU: values by its interpreter, compiled for GPUs."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.varlen_attention import triton, varlen_attention
from pallas_kernels.varlen_attention.inputs import Inputs, Scores
from tests.pallas_kernels.triton_compiled import (
    CAPABILITIES,
    DEVICES,
    TENSOR_CORES,
    compile_for,
)
from tests.pallas_kernels.triton_interpreter import interpreted
from tests.pallas_kernels.varlen_attention import cases
from tests.pallas_kernels.varlen_attention.test_xla import assert_matches
from tests.tiers import first
from tests.tolerances import RELATIVE


pytest.importorskip("triton")
SMALL = triton.Launch(block_q=16, block_k=32, num_warps=4, num_stages=2)
DTYPE = "float16"  # the interpreter's numpy has no arithmetic of bfloat16
TOKENS = 112
LENGTHS = {
    "awkward": ([1, 15, 16, 17, 33], [1, 15, 16, 17, 33]),
    "zeros": ([0, 17, 0, 0, 70, 1], [0, 17, 0, 0, 70, 1]),
    "full budget": ([112], [112]),
    "cross": ([33, 1, 16, 0, 17, 31], [7, 40, 17, 8, 0, 34]),
}


def run(options, implementation="triton"):
    return cases.value_and_gradients(
        lambda t, cu_q, cu_k: varlen_attention(
            **t,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            **options,
            return_lse=True,
            implementation=implementation,
        )
    )


@pytest.mark.parametrize(
    ("feature", "lengths", "late"),
    first(
        [
            ("causal grouped", "awkward", True),
            ("window both", "cross", False),
            ("all", "cross", True),
            ("full", "zeros", False),
            ("full", "full budget", True),
            ("window left", "cross", True),
            ("window right", "awkward", False),
            ("window of one", "awkward", False),
            ("multi-query", "awkward", True),
            ("softcap", "cross", False),
            ("sinks", "zeros", True),
            ("alibi", "cross", False),
        ],
        ("causal grouped", "awkward", True),
        ("window both", "cross", False),
        ("all", "cross", True),
        ("full", "zeros", False),
    ),
)
def test_values_and_gradients(feature, lengths, late, monkeypatch):
    """Also with NaN in what no sequence holds and in memory that is not written."""
    interpreted(monkeypatch, triton)
    launch = dataclasses.replace(SMALL, late=late)
    monkeypatch.setattr(triton, "launch_of", lambda *_: launch)
    tensors, options = cases.arrays(feature, DTYPE, TOKENS)
    cu_q, cu_k = (cases.prefix_sums(x) for x in LENGTHS[lengths])
    cotangents = cases.cotangents(DTYPE, TOKENS)
    exact = {name: x.astype(np.float32) for name, x in tensors.items()}
    clean = cases.poison(exact, *cotangents, cu_q, cu_k, 0.0)
    expected = cases.reference(options)(*clean, cu_q, cu_k)
    garbage = cases.poison(tensors, *cotangents, cu_q, cu_k, np.nan)
    actual = run(options)(*garbage, cu_q, cu_k)
    assert actual[0].dtype == DTYPE
    assert_matches(actual, expected, cu_q, cu_k, RELATIVE[jnp.dtype(DTYPE)])


def test_rows_and_vmap_are_one_launch(monkeypatch):
    interpreted(monkeypatch, triton)
    monkeypatch.setattr(triton, "launch_of", lambda *_: SMALL)
    tensors, _ = cases.arrays("causal grouped", DTYPE, 24)
    rows = {n: np.stack([x, 2 * x[::-1]]) for n, x in tensors.items()}
    cu = np.int32([[0, 9, 24], [0, 3, 20]])

    def attend(t, cu):
        return varlen_attention(**t, cu_seqlens_q=cu, implementation="triton")

    rows, cu = jax.tree.map(jnp.asarray, (rows, cu))
    together, mapped = jax.jit(attend)(rows, cu), jax.jit(jax.vmap(attend))(rows, cu)
    np.testing.assert_array_equal(together, mapped)
    for i in range(2):
        alone = attend({n: x[i] for n, x in rows.items()}, cu[i])
        np.testing.assert_array_equal(together[i], alone)


def test_many_sequences(monkeypatch):
    """Many of which are empty."""
    interpreted(monkeypatch, triton)
    monkeypatch.setattr(triton, "launch_of", lambda *_: SMALL)
    lengths = np.random.default_rng(0).choice([0, 0, 1, 2, 5, 17], 26)
    lengths[:5] = 0
    cu = cases.prefix_sums([*lengths, 0, 0])
    tensors, options = cases.arrays("full", DTYPE, int(cu[-1]) + 40)
    tensors = jax.tree.map(jnp.asarray, tensors)
    actual, expected = (
        varlen_attention(
            **tensors, cu_seqlens_q=cu, **options, implementation=implementation
        )
        for implementation in ("triton", "xla")
    )
    np.testing.assert_allclose(actual, expected, atol=2e-3)


# Types of the arrays and outputs, in the order of a kernel's arguments.
_BF16, _FP32 = ["bfloat16"], ["float32"]
_GRADIENTS = [*_BF16 * 4, *_FP32 * 2, *["int32"] * 2, *_FP32, *_BF16]
DTYPES = {
    "forward": [*_BF16 * 3, *["int32"] * 2, *_FP32 * 2, *_BF16, *_FP32, *_BF16],
    "gradient_of_queries": [*_GRADIENTS, *_FP32 * 3],
    "gradient_of_keys": [*_GRADIENTS, *_BF16],
}


@pytest.mark.parametrize(
    ("head_dim", "length"),
    first(itertools.product([128, 64, 256], [8192, 256]), (128, 8192), (64, 256)),
)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", DTYPES)
def test_kernels_compile(name, capability, head_dim, length):
    """They fit shared memory, and registers but for some words of a thread.

    An H200 was fastest with tiles that spill more, outside of the inner loop.
    """
    from pallas_kernels.varlen_attention import triton_kernels

    device = DEVICES[capability]
    launch = triton.launch_of(name, head_dim, length, device)
    q = jax.ShapeDtypeStruct((1, 8192, 32, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 8192, 8, head_dim), jnp.bfloat16)
    scores = Scores((None, 0), head_dim**-0.5)
    cu = jax.ShapeDtypeStruct((1, 17), jnp.int32)
    constants = triton.kernel_constants(Inputs(q, k, k, cu), scores, launch)
    if name == "forward":
        constants |= {"has_sinks": False, "with_rest": True, "late": launch.late}
    found, _, stack = compile_for(
        capability,
        getattr(triton_kernels, name),
        DTYPES[name],
        constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    assert found.metadata.shared <= device.smem_bytes
    assert stack <= (720 if capability == 90 else 80)
    ptx = found.asm["ptx"]
    assert ("cp.async" in ptx) == (launch.num_stages > 1)
    assert TENSOR_CORES.get(capability, "mma.sync") in ptx
    # Loops whose bounds came from a sum over threads were 6% slower on an H200.
    assert "redux" not in ptx


def test_what_it_cannot_do_is_said(monkeypatch):
    tensors = jax.tree.map(jnp.asarray, cases.arrays("full", "bfloat16", 24)[0])
    cu = np.int32([0, 24])
    with pytest.raises(Unsupported, match="needs an NVIDIA Ampere, Ada, Hopper or"):
        varlen_attention(**tensors, cu_seqlens_q=cu, implementation="triton")
    attend = jax.jit(
        lambda t, **o: varlen_attention(
            **t, cu_seqlens_q=cu, implementation="triton", **o
        ),
        static_argnames="config",
    )
    monkeypatch.setattr(triton, "check_triton", lambda device, _: device)
    with use_device(H200):
        with pytest.raises(Unsupported, match="type float32, the Triton kernel takes"):
            attend({n: x.astype(jnp.float32) for n, x in tensors.items()})
        with pytest.raises(Unsupported, match="Triton takes no config, got 'fast'"):
            attend(tensors, config="fast")
        wide = dict.fromkeys("qkv", jnp.zeros((24, 4, 264), jnp.bfloat16))
        with pytest.raises(Unsupported, match=r"head dim 264, .* at most 256"):
            attend(wide)
