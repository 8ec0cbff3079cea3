"""On every GPU that Triton's kernels take, each shape is launched or refused."""

import dataclasses
import functools
import importlib
import math
import random
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.layer_norm import layer_norm
from pallas_kernels.mosaic import use_device
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.triton_call import check_triton
from pallas_kernels.varlen_attention import (
    RelativeBias,
    RelativeBuckets,
    varlen_attention,
)
from tests import manifest
from tests.pallas_kernels.triton_compiled import CHIPS, compile_for
from tests.pallas_kernels.triton_interpreter import installed
from tests.tiers import exhaustive, first


pytest.importorskip("triton")
OPS = {
    "varlen_attention": "varlen_attention.api",
    "paged_attention": "paged_attention.api",
    "quantized_matmul": "quantized_matmul.api",
    "layer_norm": "layer_norm.api",
    "tile_sparse_matmul": "tile_sparse_matmul.passes",
}
"""The ops, and the module of each that calls `dispatch`."""

SIZES = {
    *("queries", "keys", "heads", "kv_heads", "tokens", "features", "depth", "room"),
    *("rows", "width", "num_pages", "splits", "stride", "scale", "left", "right"),
}
"""Constants that change neither shared memory nor registers by much."""


@pytest.fixture
def launches(monkeypatch):
    """The kernels that are launched where those of Triton are asked for."""

    def triton_first(name, implementations, implementation, *args, **more):
        asked = "triton" if implementation == "mosaic_gpu" else implementation
        return dispatch.dispatch(name, implementations, asked, *args, **more)

    for module in OPS.values():
        module = importlib.import_module(f"pallas_kernels.{module}")
        monkeypatch.setattr(module, "dispatch", triton_first)
    return installed(monkeypatch)


def traced(device, fn, arguments):
    """Whether it is served; if not, the error says what to use in its place."""
    try:
        with use_device(device):
            jax.eval_shape(functools.partial(fn), *arguments)
    except Unsupported as error:
        assert "use " in str(error) and "implementation=" in str(error), error
        return False
    return True


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("capability", CHIPS)
def test_specs(capability, op, launches):
    """Refused are relative biases and, before Ada, fp8 alone."""
    cases = list(manifest.OPS[op]())
    step = max(1, len(cases) // 6)
    for case in cases[::step]:
        served = traced(CHIPS[capability], case.fn, case.arguments)
        fp8 = any("float8" in str(x.dtype) for x in jax.tree.leaves(case.arguments))
        refused = case.name.startswith("relative") or (fp8 and capability < 89)
        assert served == (not refused), case.name
    assert launches


@pytest.mark.parametrize("op", exhaustive(*OPS))
@pytest.mark.parametrize("capability", CHIPS)
def test_launches_fit(capability, op, launches):
    """Each kernel of all specs is compiled, once for the sizes of its tiles."""
    device = CHIPS[capability]
    for case in manifest.OPS[op]():
        traced(device, case.fn, case.arguments)
    distinct = {}
    for launch in launches:
        tiles = [(n, x) for n, x in launch.constants if n not in SIZES]
        key = dataclasses.replace(launch, constants=tuple(tiles))
        distinct.setdefault(key, launch)
    for launch in distinct.values():
        found, _, _ = compile_for(
            capability,
            launch.kernel,
            launch.dtypes,
            dict(launch.constants),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
        assert found.metadata.shared <= device.smem_bytes, launch


def drawn(seed):
    """A random call of each op."""
    draw = random.Random(seed)
    kind = jnp.dtype(draw.choice(["bfloat16", "float16", "float32"]))
    eight = jnp.dtype(draw.choice(["int8", "float8_e4m3fn"]))
    size, other = (draw.choice([8, 40, 64, 96, 128, 200, 256, 264]) for _ in range(2))
    tokens, kv_heads = draw.choice([1, 7, 300, 5000]), draw.choice([1, 2, 8])
    heads = kv_heads * draw.choice([1, 4, 16])
    array = functools.partial(manifest.array, dtype=kind)
    cu = jnp.array([0, tokens // 2, tokens])
    options = {"implementation": "triton"}
    masks = {
        "causal": draw.random() < 0.5,
        "window": draw.choice([(None, None), (3, None), (2, 5)]),
        "softcap": draw.choice([None, 5.0]),
    }
    attend = functools.partial(varlen_attention, cu_seqlens_q=cu, **masks, **options)
    q, k = array(tokens, heads, size), array(tokens, kv_heads, size)
    v = array(tokens, kv_heads, draw.choice([size, other]))
    yield manifest.with_gradients(attend), (q, k, v)

    page, width, batch = draw.choice([5, 16, 64]), draw.choice([1, 9, 70]), 3
    paged = functools.partial(paged_attention, **options)
    new = draw.choice([1, 4])
    ints = functools.partial(manifest.array, dtype=jnp.int32)
    pages = array(2, batch * width, 2, kv_heads, page, size)
    arrays = (
        array(batch, new, heads, size),
        array(batch, new, 2, kv_heads, size),
        pages,
        ints(),
        ints(batch, width),
        ints(batch),
    )
    yield paged, arrays

    columns = draw.choice([1, 30, 4096, 16384, 20000])
    yield (
        functools.partial(layer_norm, eps=1e-5, **options),
        (array(tokens, columns), array(columns)),
    )
    w = manifest.array(columns, size, dtype=eight)
    scale = manifest.array(columns, dtype=jnp.float32)
    yield (
        functools.partial(quantized_matmul, **options),
        (array(tokens, size), w, scale),
    )


@pytest.mark.parametrize("seed", first(range(24), 0, 1, 2, 3))
@pytest.mark.parametrize("capability", first(CHIPS, 80, 120))
def test_random_shapes(capability, seed, monkeypatch):
    installed(monkeypatch)
    for fn, arguments in drawn(seed):
        traced(CHIPS[capability], fn, arguments)


@pytest.mark.parametrize(
    ("implementation", "relative"),
    [("triton", False), ("xla", False), ("xla", True), ("mosaic_gpu", True)],
)
def test_no_form_of_packed_attention_stores_scores(
    implementation, relative, monkeypatch
):
    """Nothing in a program with gradients is as large as the scores of one head."""
    installed(monkeypatch)
    tokens = 8192
    buckets = RelativeBuckets(span=16, max_distance=64)
    q, terms = manifest.array(tokens, 2, 64), manifest.array(tokens, 2, 32)

    def attend(q, terms):
        bias = RelativeBias(query_terms=terms, key_terms=terms, buckets=buckets)
        return varlen_attention(
            *(q, q, q, jnp.array([0, tokens // 2, tokens])),
            relative_bias=bias if relative else None,
            implementation=implementation,
        )

    with use_device(CHIPS[90]):
        text = str(jax.make_jaxpr(manifest.with_gradients(attend))(q, terms))
    shapes = {
        tuple(map(int, s.split(","))) for s in re.findall(r"\w\[([\d,]+)\]", text)
    }
    sizes = sorted(map(math.prod, shapes))
    assert tokens * 2 * 64 <= sizes[-1] < tokens**2 / 8, sizes[-1]


def test_gpus_that_are_too_small_are_refused(monkeypatch):
    """Those of which nothing is known are taken to have 48 KiB a block."""
    installed(monkeypatch)
    unknown = dataclasses.replace(CHIPS[120], smem_bytes=49_152)
    with pytest.raises(Unsupported, match="49152 bytes of shared memory a block"):
        check_triton(unknown, "layer_norm")
