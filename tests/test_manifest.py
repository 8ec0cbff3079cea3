"""The kernels are those of the manifest at every spec; none uses NVLink multicast."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.publish import kernel_code
from pallas_kernels import tuned_configs
from pallas_kernels.matmul import MatmulConfig
from tests import manifest
from tests.lowering import MulticastRefused
from tests.test_lowering import call, sharded, store_to


WRITTEN = manifest.read()
# Parts of the ops, for tests that run in parallel; every case is in one.
PARTS = {"varlen_attention": 8, "collective_matmul": 4}


@pytest.mark.parametrize(
    ("op", "part"),
    [(op, part) for op in manifest.OPS for part in range(PARTS.get(op, 1))],
)
def test_kernels_are_as_written_down(op, part):
    cases = list(manifest.OPS[op]())[part :: PARTS.get(op, 1)]
    if WRITTEN["code"][op] == manifest.digest(op):
        cases = cases[:1]  # the same code makes the others
    now = {case.name: manifest.kernels(case) for case in cases}
    different = sorted(now.items() - WRITTEN["kernels"][op].items())
    assert not different, (
        f"these kernels of {op} changed: {different}. If this is meant, run "
        f"`python -m tests.manifest --write {op}` and say so in the commit"
    )


@pytest.mark.parametrize("op", manifest.OPS)
def test_every_case_is_written_down(op):
    names = [case.name for case in manifest.OPS[op]()]
    assert len(set(names)) == len(names)
    assert names == list(WRITTEN["kernels"][op])
    assert WRITTEN["jax"] == jax.__version__


def multicast_signal(x_ref, y_ref, smem, barrier, semaphore):
    plgpu.semaphore_signal_multicast(semaphore, collective_axes="tp")
    pl.semaphore_wait(semaphore, 4)
    y_ref[...] = x_ref[...]


@pytest.mark.parametrize(
    "kernel",
    [store_to(lambda y: plgpu.multicast_ref(y, ("tp",))), call(multicast_signal)],
    ids=["store", "signal"],
)
def test_multicast_is_refused(kernel):
    x = manifest.array(256, 64)
    with pytest.raises(MulticastRefused):
        manifest.kernels(manifest.Case("", sharded(kernel, "tp"), (x,), {"tp": 4}))


def test_hashes_follow_the_kernel_and_not_its_place():
    def hashed(source, first_line):
        space: dict[str, Any] = {"jnp": jnp}
        exec(compile("\n" * first_line + source, "kernel.py", "exec"), space)
        kernel = plgpu.kernel(space["body"], out_type=manifest.array(64, 64))
        return manifest.kernels(manifest.Case("", kernel, (manifest.array(64, 64),)))

    source = "def body(x, y):\n  y[...] = x[...] + jnp.bfloat16({})"
    assert hashed(source.format(1), 0) == hashed(source.format(1), 7)
    assert hashed(source.format(1), 0) != hashed(source.format(2), 0)


def test_another_config_is_another_kernel():
    case = next(manifest.matmul_cases())
    config = MatmulConfig(tile_m=128, tile_n=128, stages=4)
    with tuned_configs.override("matmul", config):
        first = manifest.kernels(case)
    with tuned_configs.override("matmul", dataclasses.replace(config, stages=3)):
        assert manifest.kernels(case) != first
        assert manifest.kernels(case) == manifest.kernels(case, to_the_end=True)


def test_digests_follow_the_code_and_not_its_comments():
    code = kernel_code.syntax('def f(x):\n    """One."""\n    return x + 1\n')
    assert code == kernel_code.syntax("# Two.\n\ndef f(x):\n    return x + 1  # three")
    assert code != kernel_code.syntax("def f(x):\n    return x + 2")
    names = {path.parent.name for path in kernel_code.sources("collective_matmul")}
    assert {"collective_matmul", "matmul", "mosaic", "tuned"} <= names
    assert "varlen_attention" not in names
