"""What of the Mosaic kernels would run on a B200: those without Hopper's `wgmma`."""

import contextlib
import functools
import sys
from pathlib import Path
from unittest import mock

import jax
import pytest
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core as mosaic
from jax.experimental.mosaic.gpu import utils

from jaxscale.training.planning.compiled import H200_TARGET
from pallas_kernels.mosaic import H200, use_device
from tests import manifest
from tests.compiled import compile_for_h200
from tests.lowering import lower_for_cuda
from tests.registers import on_one


AS_THEY_ARE = ("layer_norm", "fp8_operands", "segment_mean")
OF_BLACKWELL = ("--xla_gpu_enable_latency_hiding_scheduler=false",)
"""Flags that no other test has, and these kernels do not depend on."""
DOCS = Path(__file__).parents[2] / "docs" / "install.md"


@contextlib.contextmanager
def blackwell():
    """Mosaic builds for compute capability 10.0 kernels that were cut for an H200."""
    with mock.patch.object(utils, "_infer_arch", lambda: (10, 0)), use_device(H200):
        yield


class ForB200:
    """A jitted function that is lowered for a B200."""

    def __init__(self, jitted):
        self.jitted = jitted

    def lower(self, *shapes):
        with blackwell():
            return self.jitted.trace(*shapes).lower()


def on_b200(devices, op, name):
    """For `compile_for_h200`, whose H200s are left out."""
    del devices
    target = H200_TARGET.replace("{ major: 9 }", "{ major: 10 }")
    assert target != H200_TARGET
    b200 = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology="1x1x1"
    ).devices
    case = next(case for case in manifest.OPS[op]() if case.name == name)
    return ForB200(jax.jit(case.fn)), on_one(b200, case.arguments)


def modules(case):
    """What Pallas hands to Mosaic GPU, of all kernels of a case."""
    found = []

    def record(module, *arguments, **options):
        found.append(module.operation.get_asm(enable_debug_info=False))
        for operation in list(module.body):  # nothing is left that takes time
            operation.erase()

    with blackwell(), mock.patch.object(mosaic, "lower_mgpu_module", record):
        # A new function, which was not lowered yet.
        lower_for_cuda(functools.partial(case.fn), *case.arguments, mesh=case.mesh)
    return found


@pytest.mark.parametrize("op", manifest.OPS)
def test_all_others_need_hoppers_matmul(op, no_shape_hook):
    cases = list(manifest.OPS[op]())
    for case in cases if op in AS_THEY_ARE else cases[:1]:
        texts = modules(case)
        assert texts and all("mosaic_gpu.arch_major = 10" in text for text in texts)
        uses = any("wgmma" in text for text in texts)
        assert uses == (op not in AS_THEY_ARE), case.name


@pytest.mark.skipif(sys.platform != "linux", reason="the plugin is for Linux")
@pytest.mark.parametrize("op", AS_THEY_ARE)
def test_those_without_it_assemble_for_a_b200(op):
    name = next(iter(manifest.OPS[op]())).name
    # A process of its own: the assembler goes on for the GPU of its first kernel.
    found = compile_for_h200(on_b200, op, name, flags=OF_BLACKWELL)
    assert found.kernels and all(kernel.spilled == 0 for kernel in found.kernels)


def test_the_docs_say_so():
    *most, last = (f"`{op}`" for op in AS_THEY_ARE)
    names = f"{', '.join(most)} and {last}"
    assert f"Of the Mosaic kernels {names} alone" in DOCS.read_text().replace("\n", " ")
