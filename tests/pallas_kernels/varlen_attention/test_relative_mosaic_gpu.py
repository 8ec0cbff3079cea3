"""The relative-position bias in the Hopper forward kernel.

For its gradients see `test_backward_relative`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.varlen_attention import (
    MosaicGpuConfig,
    RelativeBias,
    RelativeBuckets,
    varlen_attention,
    varlen_attention_reference,
)
from pallas_kernels.varlen_attention.config import ForwardBlocks
from tests.interpreter import interpret_mosaic_gpu
from tests.pallas_kernels.varlen_attention import stand_ins  # noqa: F401
from tests.tolerances import RELATIVE, relative_error


V3 = RelativeBuckets(span=256, max_distance=512)
SMALL = RelativeBuckets(span=12, max_distance=40)
LINEAR = RelativeBuckets(span=30)

# (buckets, terms, lengths, blocks, options)
CASES = {
    "v3": (V3, ("query", "key"), [70, 9, 0, 65], ForwardBlocks(block_k=64), {}),
    "short": (
        SMALL,
        ("query", "key"),
        [70, 1, 63],
        ForwardBlocks(block_k=64, overlap=False),
        {"softcap": 1.5},
    ),
    "causal": (
        LINEAR,
        ("key",),
        [130],
        ForwardBlocks(),
        {"causal": True, "alibi_slopes": True},
    ),
    "window": (
        SMALL,
        ("query",),
        [140],
        ForwardBlocks(block_k=64),
        {"window": (70, 20), "sinks": True},
    ),
}
TOKENS, HEADS = 150, 2
# As few multiprocessors as blocks are worth interpreting.
SMALL_DEVICE = dataclasses.replace(H200, num_sms=2)


def make(name, tokens=TOKENS, heads=HEADS):
    buckets, terms, lengths, blocks, options = CASES[name]
    rng = np.random.default_rng(0)
    cu = np.cumsum([0, *lengths]).astype(np.int32)

    def random(*shape):
        x = rng.normal(size=shape).astype(np.float32)
        return jnp.asarray(x).astype(jnp.bfloat16)

    arrays = {n: random(tokens, heads, 64) for n in "qkv"}
    for n in terms:
        x = random(tokens, heads, buckets.num_entries)
        # What lies past the last sequence must not matter.
        arrays[f"{n}_terms"] = x.at[cu[-1] :].set(jnp.nan)
    options = dict(options)
    if options.pop("sinks", False):
        arrays["sinks"] = jnp.linspace(-1.0, 1.0, heads)
    if options.pop("alibi_slopes", False):
        arrays["alibi_slopes"] = jnp.linspace(0.01, 0.1, heads)
    config = MosaicGpuConfig(forward=blocks)
    return arrays, buckets, cu, config, options


def gather(arrays, buckets):
    arrays = dict(arrays)
    terms = {n: arrays.pop(n, None) for n in ("query_terms", "key_terms")}
    return arrays | {"relative_bias": RelativeBias(**terms, buckets=buckets)}


def attend(arrays, buckets, cu, config, options):
    return varlen_attention(
        **gather(arrays, buckets),
        cu_seqlens_q=cu,
        implementation="mosaic_gpu",
        config=config,
        return_lse=True,
        **options,
    )


def expected(arrays, buckets, cu, options):
    options = {"scale": 64**-0.5, **options}
    left, right = options.pop("window", (None, None))
    right = 0 if options.pop("causal", False) else right
    return varlen_attention_reference(
        **gather(arrays, buckets),
        cu_seqlens_q=jnp.asarray(cu),
        cu_seqlens_k=jnp.asarray(cu),
        window=(left, right),
        **options,
    )


def assert_close(actual, wanted, cu):
    (out, lse), (wanted_out, wanted_lse) = actual, wanted
    end = cu[-1]
    assert relative_error(out[:end], wanted_out[:end]) < RELATIVE[jnp.dtype("bfloat16")]
    # Scores and their sum are in fp32.
    np.testing.assert_allclose(lse[:end], wanted_lse[:end], atol=1e-4)
    assert not np.any(np.asarray(out[end:], np.float32))


@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    arrays, buckets, cu, config, options = make(name, heads=1 + (name == "short"))
    with use_device(SMALL_DEVICE), interpret_mosaic_gpu(detect_races=True):
        actual = attend(arrays, buckets, cu, config, options)
    assert_close(actual, expected(arrays, buckets, cu, options), cu)


def test_terms_of_another_type_are_refused():
    arrays, buckets, cu, _, options = make("short")
    arrays["key_terms"] = arrays["key_terms"].astype(jnp.float32)
    with (
        use_device(H200),
        pytest.raises(Unsupported, match="type float32, the kernel takes that of"),
    ):
        attend(arrays, buckets, cu, None, options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [TOKENS, 700])
def test_on_a_gpu(name, tokens):
    arrays, buckets, cu, config, options = make(name, tokens=tokens, heads=6)
    if tokens > TOKENS:  # distances beyond the last bucket
        cu = np.array([0, 3, 570, 570, 690], np.int32)
        arrays = {n: jnp.nan_to_num(x, nan=0.5) for n, x in arrays.items()}
    run = jax.jit(lambda a, cu: attend(a, buckets, cu, config, options))
    actual = run(arrays, cu)
    wanted = jax.jit(lambda a: expected(a, buckets, cu, options))(arrays)
    assert_close(actual, wanted, cu)
    again = run(arrays, cu)
    np.testing.assert_array_equal(actual[0], again[0])
