"""Moves of pages compiled for H200s: spills, and a pool that stays where it is."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from pallas_kernels.move_pages import move_pages
from pallas_kernels.move_pages.specs import SPECS
from tests.compiled import compile_for_h200


P = jax.sharding.PartitionSpec
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the plugin that compiles is for Linux"
)


def program(devices, name, implementation="mosaic_gpu"):
    """A jitted function of donated pages, on all devices, which share the heads."""
    spec = next(spec for spec in SPECS if spec.name == name)
    heads = P(None, None, None, "tensor")

    def run(pages, source, target):
        return move_pages(pages, source, target, implementation=implementation)

    where = [SingleDeviceSharding(devices[0])] * 2
    if len(devices) > 1:
        mesh = Mesh(np.array(devices), ("tensor",))
        where = [NamedSharding(mesh, heads), NamedSharding(mesh, P())]
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(heads, P(), P()),
            out_specs=heads,
            check_vma=False,
        )
    pages = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=where[0])
    ids = jax.ShapeDtypeStruct((spec.moves,), jnp.int32, sharding=where[1])
    return jax.jit(run, donate_argnums=0), (pages, ids, ids)


def pool_bytes(name, count):
    _, (pages, *_) = program(jax.devices()[:count], name)
    return pages.size * pages.dtype.itemsize // count


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama2_7b_n16_c264", 1),
        ("llama2_7b_n16_c264", 4),
        ("llama3_8b_fp8_n32_c1024", 1),
        ("gptj_6b_n16_c264", 1),
    ],
)
def test_a_move_spills_nothing_and_copies_nothing(name, count):
    found = compile_for_h200(program, name, count=count)
    (kernel,) = found.kernels
    assert (kernel.name, kernel.spilled) == ("move_pages", 0)
    assert found.aliased >= pool_bytes(name, count)
    assert found.temporaries < 2**20
    assert max(found.sizes("copy"), default=0) < 2**16
    assert found.count("all-reduce") == found.count("all-gather") == 0


def test_the_portable_form_copies_a_page_at_a_time():
    name = "llama3_8b_n32_c1024"
    found = compile_for_h200(program, name, "xla")
    assert found.kernels == ()
    assert found.aliased >= pool_bytes(name, 1)
    page = 32 * 2 * 8 * 64 * 128 * 2
    assert found.temporaries < 2 * page
