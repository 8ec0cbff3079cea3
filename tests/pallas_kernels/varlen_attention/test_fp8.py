"""Attention with operands of 8 bits: the definition, the kernel, what is refused."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.pallas_kernels.varlen_attention.stand_ins  # noqa: F401  registers them
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.varlen_attention import (
    ForwardBlocks,
    MosaicGpuConfig,
    quantize_heads,
    varlen_attention,
    varlen_attention_reference,
)
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.pallas_kernels.varlen_attention.test_mosaic_gpu import one_sm
from tests.tiers import first
from tests.tolerances import relative_error


attend: Any = varlen_attention
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
ROUNDED_WEIGHTS = 4e-2
"""Largest error of sums of values with weights of 3 bits of mantissa."""


def quantized(lengths_q, lengths_k, tokens, keys, heads, kv_heads, head_dim, seed=0):
    """8-bit q, k, v, NaN past the last sequence, prefix sums, scales, and fp32 q, k, v.

    Sequences and heads differ in size, so that a scale of another one tells.
    """
    rng = np.random.default_rng(seed)
    cu = [np.cumsum([0, *x], dtype=np.int32) for x in (lengths_q, lengths_k)]
    arrays, descales, wide = [], [], []
    for tokens_, heads_, bounds in (
        (tokens, heads, cu[0]), (keys, kv_heads, cu[1]), (keys, kv_heads, cu[1])
    ):  # fmt: skip
        x = rng.normal(size=(tokens_, heads_, head_dim)).astype(np.float32)
        for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
            x[start:stop] *= 1 + 0.3 * i
        x[:, ::2] *= 0.7
        data, descale = quantize_heads(jnp.asarray(x), bounds, num_kv_heads=kv_heads)
        data, descale = np.array(data), np.asarray(descale)
        factors = np.repeat(descale, np.diff(bounds), axis=0)
        factors = np.repeat(factors, heads_ // kv_heads, axis=1)[..., None]
        exact = np.zeros(x.shape, np.float32)
        exact[: bounds[-1]] = data[: bounds[-1]].astype(np.float32) * factors
        data[bounds[-1] :] = np.nan
        arrays.append(jnp.asarray(data))
        descales.append(descale)
        wide.append(exact)
    names = "q_descale", "k_descale", "v_descale"
    return arrays, cu, dict(zip(names, descales, strict=True)), wide


def expected(wide, cu, options, extra):
    left, right = options.get("window", (None, None))
    return varlen_attention_reference(
        *map(jnp.asarray, (*wide, *cu)),
        window=(left, 0 if options.get("causal") else right),
        scale=wide[0].shape[-1] ** -0.5,
        softcap=options.get("softcap"),
        **jax.tree.map(jnp.asarray, extra),
    )


def compare(got, want, end):
    finite = np.isfinite(want[1])
    assert got[0].dtype == jnp.bfloat16
    assert (np.isfinite(got[1]) == finite).all()
    lse, want_lse = (np.where(finite, x[1], 0.0) for x in (got, want))
    assert relative_error(lse, want_lse) < 5e-3
    assert relative_error(got[0], want[0]) < ROUNDED_WEIGHTS
    assert (np.asarray(got[0], np.float32)[end:] == 0).all()


CASES = {
    "awkward lengths": (([7, 1, 129], [7, 1, 129], 144, 144, 1, 1, 128), {}, None),
    "causal, grouped, more steps than stages": (
        ([3, 200, 0, 20], [3, 330, 0, 20], 240, 360, 4, 2, 128),
        {"causal": True},
        ForwardBlocks(block_k=64),
    ),
    "window, cross lengths, heads of 64": (
        ([5, 100, 0, 9, 3], [64, 133, 7, 0, 5], 120, 216, 2, 1, 64),
        {"window": (20, 3)},
        None,
    ),
    "everything, two chunks of keys": (
        ([70, 9], [139, 5], 80, 200, 2, 1, 128),
        {
            "causal": True,
            "window": (60, None),
            "softcap": 2.0,
            "sinks": True,
            "alibi_slopes": True,
        },
        ForwardBlocks(block_k=192, stages=2, held=1),
    ),
    "heads of 256": (([3, 66], [9, 80], 70, 90, 1, 1, 256), {"causal": True}, None),
    "keys before the first, unmasked steps after them": (
        ([5, 70], [5, 260], 80, 270, 1, 1, 128),
        {},
        ForwardBlocks(block_k=64, overlap=False),
    ),
    "fewer keys than a step, padded heads": (
        ([3, 20], [30, 1], 40, 37, 1, 1, 72),
        {},
        ForwardBlocks(overlap=False, ping_pong=True),
    ),
}


@pytest.mark.parametrize(
    "name", first(CASES, "awkward lengths", "everything, two chunks of keys")
)
def test_interpreted_kernel_equals_the_reference(name):
    shape, options, blocks = CASES[name]
    arrays, cu, descales, wide = quantized(*shape)
    options = dict(options)
    per_head = [n for n in ("sinks", "alibi_slopes") if options.pop(n, False)]
    extra = dict.fromkeys(per_head, np.linspace(0.1, 0.7, shape[4], dtype=np.float32))
    config = None if blocks is None else MosaicGpuConfig(forward=blocks)

    @jax.jit
    def run(arrays, cu, descales, extra):
        return attend(
            *arrays,
            *cu,
            return_lse=True,
            implementation="mosaic_gpu",
            config=config,
            **options,
            **descales,
            **extra,
        )

    with use_device(one_sm), interpret_mosaic_gpu():
        got = jax.tree.map(np.asarray, run(arrays, cu, descales, extra))
    compare(got, expected(wide, cu, options, extra), cu[0][-1])


def test_rows_that_end_at_any_token():
    """Steps end at multiples of 16 tokens, past the last, where there may be NaN."""
    shape = ([5, 60], [5, 60], 72, 72, 1, 1, 64)
    arrays, cu, descales, _ = quantized(*shape)
    rows = [jnp.stack([x, x.at[9:].set(jnp.nan)]) for x in arrays]
    bounds = np.stack([cu[0], [0, 4, 9]])
    both = {name: np.stack([x, x]) for name, x in descales.items()}
    run = jax.jit(functools.partial(attend, implementation="mosaic_gpu"))
    with use_device(one_sm), interpret_mosaic_gpu():
        out = np.asarray(run(*rows, jnp.asarray(bounds), **both), np.float32)
    for i, end in enumerate(bounds[:, -1]):
        want = attend(*(x[i] for x in rows), jnp.asarray(bounds[i]), **descales)
        want = np.asarray(want, np.float32)
        assert relative_error(out[i, :end], want[:end]) < ROUNDED_WEIGHTS
        assert (out[i, end:] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_portable_form_equals_the_reference(causal):
    shape = ([3, 50, 0, 20], [3, 60, 0, 20], 80, 90, 4, 2, 24)
    arrays, cu, descales, wide = quantized(*shape)
    got = attend(*arrays, *cu, causal=causal, return_lse=True, **descales)
    compare(got, expected(wide, cu, {"causal": causal}, {}), cu[0][-1])


def test_rows_have_scales_of_their_own():
    arrays, cu, descales, _ = quantized([8, 9], [8, 9], 17, 17, 2, 1, 16)
    other = jax.tree.map(lambda x: 2 * x, descales)
    rows = [jnp.stack([x, x]) for x in arrays]
    both = {name: np.stack([x, other[name]]) for name, x in descales.items()}
    got = attend(*rows, np.stack([cu[0], cu[0]]), causal=True, **both)
    for i, each in enumerate((descales, other)):
        np.testing.assert_array_equal(
            got[i], attend(*arrays, cu[0], causal=True, **each)
        )


def test_a_scale_of_one_is_none_and_broadcasts():
    arrays, cu, _, _ = quantized([8, 9], [8, 9], 17, 17, 2, 1, 16)
    want = attend(*arrays, cu[0])
    got = attend(*arrays, cu[0], q_descale=0.5, k_descale=np.float32([2.0]))
    np.testing.assert_array_equal(got, want)


def test_weights_far_below_the_largest_keep_their_bits():
    """E4M3 has few numbers below 1: weights are multiplied by a power of two."""
    q, k = np.zeros((2, 2, 1, 128), np.float32)
    k[0, 0, 0], q[:, 0, 0] = 8, 1
    v = np.zeros((2, 1, 128), np.float32)
    v[1] = 1
    q, k, v = (jnp.asarray(x, E4M3) for x in (q, k, v))
    run = jax.jit(functools.partial(attend, scale=1.0))
    with use_device(one_sm), interpret_mosaic_gpu():
        out = np.asarray(run(q, k, v), np.float32)
    want = np.exp(-8) / (1 + np.exp(-8))  # 2 ** -11.5
    assert np.abs(out / np.float32(want) - 1).max() < 2**-4


def test_quantized_heads_use_the_whole_range():
    x = np.random.default_rng(0).normal(size=(10, 4, 8)).astype(np.float32)
    x[4:6] = 0
    cu = np.array([0, 4, 6, 9, 9])
    data, descale = quantize_heads(jnp.asarray(x), cu, num_kv_heads=2)
    assert data.dtype == E4M3 and descale.shape == (4, 2)
    largest = np.abs(np.asarray(data, np.float32)).reshape(10, 2, 16).max(2)
    assert (largest[:4].max(0) == 448).all() and (largest[6:9].max(0) == 448).all()
    np.testing.assert_array_equal(descale[1::2], 1.0)
    of_rows, scales = quantize_heads(jnp.stack([x, x]))
    assert of_rows.shape == (2, 10, 4, 8) and scales.shape == (2, 1, 4)


def test_what_is_no_call_in_8_bits_is_said():
    arrays, cu, descales, _ = quantized([8], [8], 8, 8, 4, 2, 16)
    wide = [x.astype(jnp.bfloat16) for x in arrays]
    with pytest.raises(TypeError, match="q_descale is for q, k and v of type float8"):
        attend(*wide, cu[0], q_descale=descales["q_descale"])
    with pytest.raises(TypeError, match="must have one type of"):
        attend(*arrays[:2], wide[2], cu[0])
    message = r"k_descale must broadcast .* head, \[1, 2\], got shape \(4,\)"
    with pytest.raises(ValueError, match=message):
        attend(*arrays, cu[0], k_descale=np.ones(4, np.float32))
    with pytest.raises(ValueError, match="N=4 must be a multiple of num_kv_heads=3"):
        quantize_heads(wide[0], cu[0], num_kv_heads=3)

    def loss(x):
        data, descale = quantize_heads(x, cu[0], num_kv_heads=2)
        out = attend(data, *arrays[1:], cu[0], q_descale=descale)
        return jnp.sum(out.astype(jnp.float32))

    with pytest.raises(NotImplementedError, match=r"no gradients .* pass bfloat16"):
        jax.grad(loss)(jnp.ones((8, 4, 16)))


def test_what_the_kernel_cannot_do_names_a_way_out():
    arrays, cu, _, _ = quantized([8], [8], 8, 8, 1, 1, 64)
    config = MosaicGpuConfig(forward=ForwardBlocks(consumers=1, block_k=64))
    kernel = functools.partial(attend, implementation="mosaic_gpu")
    message = "8-bit operands take .* consumers=2 or 3, got consumers=1; use bfloat16"
    with use_device(H200), pytest.raises(Unsupported, match=message):
        kernel(*arrays, cu[0], config=config)


def test_values_are_transposed_once_by_a_kernel():
    q, k = (jax.ShapeDtypeStruct((4096, n, 128), E4M3) for n in (16, 4))
    with use_device(H200):
        whole = functools.partial(attend, cu_seqlens_q=np.array([0, 4096]))
        lowered = lower_for_cuda(whole, q, k, k, kernels=2)
        assert "stablehlo.pad" not in lowered and "stablehlo.transpose" not in lowered
