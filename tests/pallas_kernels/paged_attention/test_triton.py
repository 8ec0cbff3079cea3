"""The Triton kernels on a CPU: values by its interpreter, compiled for GPUs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import use_device
from pallas_kernels.paged_attention import (
    PagedAttentionConfig,
    paged_attention,
    triton,
)
from pallas_kernels.paged_attention.inputs import Inputs, Scores
from tests.pallas_kernels.paged_attention.cases import Case, bits, check
from tests.pallas_kernels.triton_compiled import CAPABILITIES, DEVICES, compile_for
from tests.pallas_kernels.triton_interpreter import interpreted
from tests.tiers import first


pytest.importorskip("triton")
BASE = Case(dtype=jnp.float16)  # the interpreter's numpy has no bfloat16


@pytest.fixture
def on_cpu(monkeypatch):
    interpreted(monkeypatch, triton)
    monkeypatch.setattr(triton, "SPLIT", 32)
    monkeypatch.setattr(triton, "_BLOCK", 16)


@pytest.mark.parametrize(
    "changes",
    first(
        [
            {"queries": 3, "num_new": (3, 0, 1), "window": 9, "softcap": 2.0},
            {"heads": (6, 2), "head_dim": 24, "page": 5, "lengths": (64, 31, 0, 33)},
            {},
            {"page": 64, "window": 1},
            {"width": 5, "queries": 4, "lengths": (19, 20, 3)},
            {"num_new": (0, 0, 0), "window": 20},
            {"layers": 1, "layer": 0, "scale": -0.4},
        ],
        {"queries": 3, "num_new": (3, 0, 1), "window": 9, "softcap": 2.0},
        {"heads": (6, 2), "head_dim": 24, "page": 5, "lengths": (64, 31, 0, 33)},
    ),
)
def test_values(changes, on_cpu):
    """With NaN wherever no query may look, memory that is not written among it."""
    check(dataclasses.replace(BASE, **changes), implementation="triton")


def test_a_sequence_does_not_depend_on_the_others(on_cpu):
    arrays = dataclasses.replace(BASE, lengths=(70, 5, 40)).arrays()
    both, _ = paged_attention(**arrays, implementation="triton")
    for name in ("q", "kv", "table", "lengths"):
        arrays[name] = arrays[name][:1]
    alone, _ = paged_attention(**arrays, implementation="triton")
    np.testing.assert_array_equal(bits(both[:1]), bits(alone))


_SPLIT = ["bfloat16", None, *["int32"] * 4, *["float32"] * 4]
DTYPES = {
    "attend_split": _SPLIT,
    "join_splits": [*["float32"] * 3, "int32", "int32", "bfloat16"],
}


@pytest.mark.parametrize("head_dim", first([128, 64, 256], 128))
@pytest.mark.parametrize("pages", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile(capability, pages, head_dim):
    """They fit shared memory and registers."""
    from pallas_kernels.paged_attention import triton_kernels

    device = DEVICES[capability]
    narrow = pages != "bfloat16"
    of = jax.ShapeDtypeStruct
    x = Inputs(
        of((32, 1, 32, head_dim), jnp.bfloat16),
        of((32, 1, 2, 8, head_dim), jnp.bfloat16),
        of((32, 2048, 2, 8, 64, head_dim), jnp.dtype(pages)),
        of((), jnp.int32),
        of((32, 64), jnp.int32),
        of((32,), jnp.int32),
        of((32,), jnp.int32),
        of((32, 2048, 2, 8), jnp.float32) if narrow else None,
    )
    if narrow and device.compute_capability < (8, 9):
        with pytest.raises(Unsupported, match=r"from compute capability 8\.9 on"):
            triton._check(x, device)
        return
    triton._check(x, device)
    common, more = triton.constants(x, Scores(head_dim**-0.5))
    for name, dtypes in DTYPES.items():
        found, _, stack = compile_for(
            capability,
            getattr(triton_kernels, name),
            [dtype or pages for dtype in dtypes],
            common | (more if name == "attend_split" else {}),
            num_warps=4,
            num_stages=3 if head_dim <= 128 else 2,
        )
        assert found.metadata.shared <= device.smem_bytes
        assert stack == 0
        assert ("mma" in found.asm["ptx"]) == (name == "attend_split")


def test_what_it_cannot_do_is_said(monkeypatch):
    monkeypatch.setattr(triton, "check_triton", lambda device, _: device)

    def refused(device, **changes):
        arrays = dataclasses.replace(BASE, **changes).arrays()
        with use_device(device), pytest.raises(Unsupported) as error:
            paged_attention(**arrays, implementation="triton")
        return str(error.value)

    a100 = DEVICES[80]
    assert "types float32 and float32" in refused(a100, dtype=jnp.float32)
    assert "head dim 264, " in refused(a100, head_dim=264)
    assert "68 queries" in refused(a100, heads=(34, 1), queries=2)
    arrays = BASE.arrays() | {"config": PagedAttentionConfig()}
    with use_device(a100), pytest.raises(Unsupported, match="Triton takes no config"):
        paged_attention(**arrays, implementation="triton")
    mapped = jax.vmap(lambda q: paged_attention(**(arrays | {"q": q, "config": None})))
    stacked = jnp.stack([arrays["q"]] * 2)
    with use_device(a100), pytest.raises(NotImplementedError, match="no other axis"):
        mapped(stacked)
