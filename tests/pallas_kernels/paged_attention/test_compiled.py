"""Paged attention compiled for H200s: spills, and a pool that stays where it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.specs import SPECS
from tests.compiled import compile_for_h200
from tests.tiers import exhaustive


P = jax.sharding.PartitionSpec
LAYERS, STEPS = 4, 3
kernel = functools.partial(paged_attention, implementation="mosaic_gpu")


def shapes(spec, num_pages):
    """Arguments of a step by name."""
    array, dtype = jax.ShapeDtypeStruct, jnp.bfloat16
    rows, new, size = spec.batch, spec.queries, spec.head_dim
    pool = LAYERS, num_pages or 2 * rows * spec.width, 2, spec.num_kv_heads
    scales = {"kv_scales": array(pool, jnp.float32)} if spec.dtype != "bfloat16" else {}
    return scales | {
        "q": array((rows, new, spec.num_heads, size), dtype),
        "kv": array((rows, new, 2, spec.num_kv_heads, size), dtype),
        "pages": array((*pool, spec.page, size), spec.dtype),
        "layer": array((), jnp.int32),
        "table": array((rows, spec.width), jnp.int32),
        "lengths": array((rows,), jnp.int32),
    }


def one_step(arrays):
    return kernel(**arrays)


def all_layers(arrays, *, unrolled):
    """Some steps, each through all layers, whose results are the next queries."""

    def layer(lengths, carry, number):
        changed = dict(zip(("q", "pages"), carry, strict=True))
        changed |= {"layer": number, "lengths": lengths}
        return kernel(**arrays | changed), None

    def step(carry, lengths):
        numbers = jnp.arange(LAYERS, dtype=jnp.int32)
        one = functools.partial(layer, lengths)
        if not unrolled:
            return lax.scan(one, carry, numbers)[0], None
        for number in numbers:
            carry, _ = one(carry, number)
        return carry, None

    lengths = arrays["lengths"] + jnp.arange(STEPS, dtype=jnp.int32)[:, None]
    carry, _ = lax.scan(step, (arrays["q"], arrays["pages"]), lengths)
    return carry


FORMS = {
    "plain": one_step,
    "scanned": functools.partial(all_layers, unrolled=False),
    "unrolled": functools.partial(all_layers, unrolled=True),
}


def program(devices, name, form, num_pages=None):
    """A jitted function of donated pages, on all devices, which share the heads."""
    spec = next(spec for spec in SPECS if spec.name == name)
    mesh = Mesh(np.array(devices), ("tensor",))
    specs = {
        "q": P(None, None, "tensor"),
        "kv": P(None, None, None, "tensor"),
        "pages": P(None, None, None, "tensor"),
        "kv_scales": P(None, None, None, "tensor"),
    }
    found = shapes(spec, num_pages)
    specs = {name: specs.get(name, P()) for name in found}
    run = FORMS[form]
    if len(devices) > 1:
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(specs["q"], specs["pages"]),
            check_vma=False,
        )

    def placed(name):
        where = NamedSharding(mesh, specs[name])
        if len(devices) == 1:
            where = SingleDeviceSharding(devices[0])
        x = found[name]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    def donating(pages, rest):
        return run(rest | {"pages": pages})

    rest = {name: placed(name) for name in found if name != "pages"}
    return jax.jit(donating, donate_argnums=0), (placed("pages"), rest)


def pool_bytes(name, count):
    _, (pages, _) = program(jax.devices()[:count], name, "plain")
    return pages.size * pages.dtype.itemsize // count


@pytest.mark.parametrize(
    "name",
    [
        "llama3_8b_fp8_b32_c4096",
        *exhaustive(
            "llama3_8b_drafts3_b32_c4096",
            "llama3_8b_b32_c4096",
            "gpt2_b32_c264",
            "gptj_6b_b8_c1024",
            "llama3_8b_window4096_b8_c32768",
        ),
    ],
)
def test_a_step_spills_nothing_and_copies_nothing(name):
    found = compile_for_h200(program, name, "plain")
    (kernel,) = found.kernels
    assert (kernel.name, kernel.spilled) == ("paged_attention", 0)
    assert found.aliased >= pool_bytes(name, 1)
    assert found.count("copy") == 0


@pytest.mark.parametrize(
    ("form", "count"), [("scanned", 1), *exhaustive(("scanned", 4), ("unrolled", 1))]
)
def test_the_pool_stays_where_it_is(form, count):
    """Under loops over layers and steps, and where devices share the heads."""
    name = "llama3_8b_b32_c264"
    found = compile_for_h200(program, name, form, count=count)
    assert found.aliased >= pool_bytes(name, count)
    queries = 32 * 32 * 128 // count
    assert max(found.sizes("copy"), default=0) <= queries
    assert found.count("all-reduce") == found.count("all-gather") == 0
    more = compile_for_h200(program, name, form, 5000, count=count)
    assert more.aliased > 5 * found.aliased
    assert more.temporaries == found.temporaries
