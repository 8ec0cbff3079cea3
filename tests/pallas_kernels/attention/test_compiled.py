"""Attention of whole rows compiled for an H200: one kernel, no tables, no scores."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import attention
from tests.compiled import compile_for_h200
from tests.registers import on_one
from tests.tiers import first


CASES = {
    "llama3_8b": ((2, 4096, 32, 128), (4096, 8), {"causal": True}),
    "llama_1b": ((4, 4096, 16, 128), (4096, 8), {"causal": True}),
    "llama3_1b": ((4, 2048, 32, 64), (2048, 8), {"causal": True}),
    "gemma2_9b": (
        (2, 4096, 16, 256),
        (4096, 8),
        {"causal": True, "window": (4095, None), "softcap": 50.0},
    ),
    "modernbert": ((16, 1000, 12, 64), (1000, 12), {"window": (64, 64)}),
    "a chunk": ((2, 300, 32, 128), (4096, 8), {"causal": True, "softcap": 30.0}),
    "alibi": ((2, 2048, 32, 128), (2048, 32), {"causal": True, "alibi_slopes": 1}),
    "alibi d64": ((2, 2048, 32, 64), (2048, 32), {"causal": True, "alibi_slopes": 1}),
    "sinks": (
        (2, 2048, 64, 64),
        (2048, 8),
        {"causal": True, "window": (127, None), "sinks": 1},
    ),
}

SPILLED = {
    "gemma2_9b": (180, 0),
    "modernbert": (0, 8),
    "a chunk": (0, 8),
    "alibi d64": (0, 88),
}
"""Bytes, by pass: masks and caps take registers that the plain kernels have not."""


def program(devices, name, gradient):
    (b, t, n, h), (s, k), options = CASES[name]
    per_head = [x for x in ("sinks", "alibi_slopes") if x in options]
    options = {x: options[x] for x in options if x not in per_head}

    def attend(q, k, v, numbers):
        given: dict[str, Any] = dict.fromkeys(per_head, numbers)
        return attention(q, k, v, **options, **given)

    def both(q, k, v, numbers, dout):
        out, pullback = jax.vjp(functools.partial(attend, numbers=numbers), q, k, v)
        return out, *pullback(dout)

    q, kv = (
        jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((b, t, n, h), (b, s, k, h))
    )
    args = q, kv, kv, jax.ShapeDtypeStruct((n,), jnp.float32)
    if gradient:
        return jax.jit(both), on_one(devices, (*args, q))
    return jax.jit(attend), on_one(devices, args)


@pytest.mark.parametrize(
    ("name", "gradient"),
    first(
        [(name, True) for name in CASES] + [("llama3_8b", False)],
        ("llama3_8b", True),
        ("alibi", True),
    ),
)
def test_a_pass_is_one_kernel_without_tables(name, gradient):
    found = compile_for_h200(program, name, gradient)
    kernels = ["varlen_attention", "varlen_attention_backward"][: 1 + gradient]
    assert sorted(kernel.name for kernel in found.kernels) == kernels
    spilled = {kernel.name: kernel.spilled for kernel in found.kernels}
    for kernel, most in zip(kernels, SPILLED.get(name, (0, 0)), strict=False):
        assert spilled[kernel] <= most
    assert found.count("custom-call") == len(kernels)
    # The zero of a counter is copied. Nothing else runs beside the forward kernel.
    assert found.sizes("copy") in ([], [1])
    assert gradient or found.count("fusion") == 0
    # A table has a line for each tile. Counters, which begin at zero, have no lines.
    assert re.findall(r"= s32\[\d+,.* (?:fusion|copy|custom-call)\(", found.hlo) == []
    (b, t, n, _), (s, _), _ = CASES[name]
    assert all(w.size < 4 * b * n * t * s for w in found.written(2**20))
