"""The gradients of attention with a relative-position bias by the Hopper kernel."""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.varlen_attention import (
    BackwardBlocks,
    MosaicGpuConfig,
    RelativeBias,
    RelativeBuckets,
    varlen_attention,
    varlen_attention_reference,
)
from tests.compiled import compile_for_h200
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.pallas_kernels.varlen_attention import stand_ins  # noqa: F401
from tests.pallas_kernels.varlen_attention.test_mosaic_gpu_gpu import poison
from tests.registers import on_one
from tests.tiers import exhaustive, first
from tests.tolerances import RELATIVE, relative_error


V3 = RelativeBuckets(span=256, max_distance=512)
SMALL = RelativeBuckets(span=12, max_distance=40)
LINEAR = RelativeBuckets(span=30)
BOTH = "query_terms", "key_terms"
# Rows of P entries, where several keys of a query share the last one or none does.
CASES: dict[str, tuple[RelativeBuckets, tuple[str, ...], list[int], dict]] = {
    "v3": (V3, BOTH, [70, 9, 0, 65], {}),
    "shared entries": (SMALL, BOTH, [145], {}),
    "softcap": (SMALL, BOTH, [70, 1, 63], {"softcap": 1.5}),
    "window, query terms": (
        *(SMALL, BOTH[:1], [140]),
        {"window": (70, 20), "sinks": True},
    ),
    "causal, key terms": (LINEAR, BOTH[1:], [130], {"causal": True}),
    "few tokens": (SMALL, BOTH, [5, 3], {"tokens": 20}),
    "grouped": (SMALL, BOTH, [80, 20], {"kv_heads": 1, "tokens": 110}),
    "fp16": (LINEAR, BOTH, [90], {"dtype": jnp.float16, "tokens": 100}),
    "narrow heads": (SMALL, BOTH, [33], {"head_dim": 40, "tokens": 64}),
    "alibi, by XLA": (SMALL, BOTH, [40], {"alibi_slopes": True, "tokens": 64}),
}
TOKENS, HEADS = 150, 2
ONE_SM = dataclasses.replace(H200, num_sms=1)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call and the gradients that come to its results."""

    arrays: dict[str, jax.Array]
    buckets: RelativeBuckets
    cu_seqlens: np.ndarray
    dout: jax.Array
    dlse: jax.Array
    options: dict[str, Any]

    def attend(self, arrays, cu_seqlens, config=None):
        return varlen_attention(
            **with_bias(arrays, self.buckets),
            cu_seqlens_q=cu_seqlens,
            implementation="mosaic_gpu",
            return_lse=True,
            config=config,
            **self.options,
        )

    def define(self, arrays):
        options = dict(self.options)
        left, right = options.pop("window", (None, None))
        return varlen_attention_reference(
            **with_bias(arrays, self.buckets),
            cu_seqlens_q=jnp.asarray(self.cu_seqlens),
            cu_seqlens_k=jnp.asarray(self.cu_seqlens),
            window=(left, 0 if options.pop("causal", False) else right),
            scale=self.arrays["q"].shape[-1] ** -0.5,
            **options,
        )

    def expected(self):
        """Gradients in fp32, zeros past the last sequence."""
        arrays = {n: x.astype(jnp.float32) for n, x in self.arrays.items()}
        _, pullback = jax.vjp(self.define, arrays)
        dlse = jnp.where(self.inside[:, None], self.dlse, 0.0)
        dout = jnp.where(self.inside[:, None, None], self.dout, 0.0)
        (grads,) = pullback((dout.astype(jnp.float32), dlse))
        return grads

    @property
    def inside(self):
        return np.arange(self.dout.shape[0]) < self.cu_seqlens[-1]

    def poisoned(self):
        """The same with NaN in all that lies past the last sequence."""

        def spoil(x):
            rows = self.inside.reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(rows, x, jnp.asarray(jnp.nan, x.dtype))

        per_head = "sinks", "alibi_slopes"
        arrays = {n: x if n in per_head else spoil(x) for n, x in self.arrays.items()}
        return dataclasses.replace(
            self, arrays=arrays, dout=spoil(self.dout), dlse=spoil(self.dlse)
        )


def with_bias(arrays, buckets):
    arrays = dict(arrays)
    terms = {n: arrays.pop(n, None) for n in BOTH}
    return arrays | {"relative_bias": RelativeBias(**terms, buckets=buckets)}


def make(name, tokens=None, lengths=None, heads=HEADS):
    buckets, terms, few, options = CASES[name]
    options = dict(options)
    tokens = options.pop("tokens", TOKENS) if tokens is None else tokens
    options.pop("tokens", None)
    kv_heads, dtype, dim = (
        options.pop(n, default)
        for n, default in (
            ("kv_heads", heads),
            ("dtype", jnp.bfloat16),
            ("head_dim", 64),
        )
    )
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(dtype)

    shapes = {"q": (heads, dim), "k": (kv_heads, dim), "v": (kv_heads, dim)}
    shapes |= dict.fromkeys(terms, (heads, buckets.num_entries))
    arrays = {n: random(tokens, *shape) for n, shape in shapes.items()}
    for n in ("sinks", "alibi_slopes"):
        if options.pop(n, False):
            arrays[n] = jnp.linspace(0.01, 0.1, heads)
    cu = np.cumsum([0, *(lengths or few)]).astype(np.int32)
    dlse = jnp.asarray(rng.normal(size=(tokens, heads)).astype(np.float32))
    return Call(arrays, buckets, cu, random(tokens, heads, dim), dlse, options)


def gradients(call, arrays, cu_seqlens, dout, dlse, config=None):
    attend = functools.partial(call.attend, cu_seqlens=cu_seqlens, config=config)
    _, pullback = jax.vjp(attend, arrays)
    return pullback((dout, dlse))[0]


def assert_close(actual, call):
    wanted = call.expected()
    assert actual.keys() == wanted.keys()
    for name, grad in actual.items():
        assert grad.dtype == call.arrays[name].dtype
        tolerance = RELATIVE[jnp.dtype(call.dout.dtype)]
        assert relative_error(grad, wanted[name]) < tolerance, name
        if grad.shape[0] == len(call.inside):
            assert not np.any(np.asarray(grad, np.float32)[~call.inside]), name


@pytest.mark.parametrize(
    "name", first(CASES, "few tokens", "v3", "window, query terms", "softcap")
)
def test_interpreted(name):
    call = make(name)
    bad = call.poisoned()
    with use_device(ONE_SM), interpret_mosaic_gpu() as run:
        actual = gradients(bad, bad.arrays, bad.cu_seqlens, bad.dout, bad.dlse)
        assert run.kernels == 1 + (name != "alibi, by XLA")
    assert_close(actual, call)


def test_nothing_races():
    call = make("softcap", heads=1)
    with use_device(ONE_SM), interpret_mosaic_gpu(detect_races=True):
        actual = gradients(call, call.arrays, call.cu_seqlens, call.dout, call.dlse)
    assert_close(actual, call)


def test_a_batch_of_rows():
    first, second = make("grouped"), make("grouped", lengths=[0, 67])
    bounds = np.stack([first.cu_seqlens, second.cu_seqlens])
    alike = functools.partial(gradients, first)
    several = jax.vmap(alike, in_axes=(None, 0, None, None))
    with use_device(ONE_SM), interpret_mosaic_gpu():
        actual = several(first.arrays, bounds, first.dout, first.dlse)
    for i, call in enumerate((first, second)):
        assert_close({n: x[i] for n, x in actual.items()}, call)


def test_blocks_of_two_warpgroups_are_refused():
    call = make("few tokens")
    config = MosaicGpuConfig(backward=BackwardBlocks(block_q=128))
    run = functools.partial(gradients, call, config=config)
    with use_device(H200), pytest.raises(Unsupported, match="consumers=2, expected 1"):
        jax.eval_shape(run, call.arrays, call.cu_seqlens, call.dout, call.dlse)


@pytest.mark.parametrize(
    ("change", "kernels"),
    [
        ({"max_seqs": 1024}, 1),
        *exhaustive(
            ({}, 2),
            ({"head_dim": 128, "terms": BOTH[:1]}, 1),
            ({"alibi": True}, 1),
        ),
    ],
    ids=["sequences", "served", "head dim", "alibi"],
)
def test_what_the_kernel_does_not_take_is_left_to_xla(change, kernels):
    run, arguments = deberta(**change)
    with use_device(H200):
        lower_for_cuda(run, *arguments, kernels=kernels)


def deberta(
    head_dim=64, alibi=False, max_seqs=16, kv_heads=12, dtype="bfloat16", terms=BOTH,
    **options,
):  # fmt: skip
    """A function with its gradients, and the shapes of its arguments."""
    tokens, heads = 4939, 12
    q, kv, entries = (
        jax.ShapeDtypeStruct((tokens, *shape), jnp.dtype(dtype))
        for shape in (
            (heads, head_dim),
            (kv_heads, head_dim),
            (heads, V3.num_entries),
        )
    )
    arrays = {"q": q, "k": kv, "v": kv} | dict.fromkeys(terms, entries)
    if alibi:
        arrays["alibi_slopes"] = jax.ShapeDtypeStruct((heads,), jnp.float32)
    bounds = jax.ShapeDtypeStruct((max_seqs + 1,), jnp.int32)

    def run(arrays, bounds, dout):
        def attend(arrays):
            return varlen_attention(
                **with_bias(arrays, V3),
                cu_seqlens_q=bounds,
                implementation="mosaic_gpu",
                **options,
            )

        out, pullback = jax.vjp(attend, arrays)
        return out, pullback(dout)

    return run, (arrays, bounds, q)


class _OnH200:
    """A jitted function that is lowered for an H200."""

    def __init__(self, run):
        self.run = jax.jit(run)

    def lower(self, *arguments):
        with use_device(H200):
            return self.run.lower(*arguments)


def program(devices, options):
    run, arguments = deberta(**options)
    return _OnH200(run), on_one(devices, arguments)


@pytest.mark.skipif(sys.platform != "linux", reason="the plugin is for Linux")
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16", "kv_heads": 4, "softcap": 30.0, "window": (100, 20)},
        *exhaustive({}),
    ],
    ids=["all options", "deberta"],
)
def test_nothing_is_spilled_and_no_terms_are_copied(options):
    found = compile_for_h200(program, options)
    kernels = ["varlen_attention", "varlen_attention_backward"]
    assert [(k.name, k.spilled) for k in found.kernels] == [(n, 0) for n in kernels]
    # Results that a gradient needs are smaller, terms are larger.
    assert found.written(2**23) == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "lengths", [None, [3, 567, 0, 120, 1, 300]], ids=["few", "many"]
)
def test_on_a_gpu(name, lengths):
    call = make(name, lengths=lengths, heads=2 if lengths is None else 6,
                tokens=None if lengths is None else 1000)  # fmt: skip
    bad = call.poisoned()
    run = jax.jit(functools.partial(gradients, call))
    arguments = bad.arrays, bad.cu_seqlens, bad.dout, bad.dlse
    poison(*call.arrays.values())
    actual = run(*arguments)
    assert_close(actual, call)
    poison(*call.arrays.values())
    for n, again in run(*arguments).items():
        np.testing.assert_array_equal(actual[n], again, n)
