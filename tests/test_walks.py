"""The walks of docs/architecture.md: they name every file that runs."""

import contextlib
import dataclasses
import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxscale.nn.linear import ColumnParallelLinear, project_together
from jaxscale.sharding import MeshConfig, fsdp_tp
from jaxscale.training.loop import fit, packed_batches
from pallas_kernels.mosaic import H200, use_device
from tests.lowering import lower_for_cuda
from tests.training.test_loop import CONFIG, TEXT


ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
PACKAGES = tuple(f"{ROOT / name}/" for name in ("jaxscale", "pallas_kernels"))


@contextlib.contextmanager
def files_that_run():
    """The files of the packages whose functions are called, in all threads."""
    found = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            found.add(frame.f_code.co_filename)

    threading.setprofile_all_threads(note)
    try:
        yield found
    finally:
        threading.setprofile_all_threads(None)


def assert_named(found):
    """Each file is in a walk: by its path, or its name beside another of its folder."""
    text = PAGE.read_text()
    walks = text[text.index("## Code walks") : text.index("## Where to find")]
    names = set(re.findall(r"`([\w/]+\.py)`", walks))
    paths = [str(Path(file).relative_to(ROOT)) for file in found]
    assert paths
    missing = [
        path
        for path in paths
        if not any(f"/{path}".endswith(f"/{name}") for name in names)
    ]
    assert not missing


def test_a_matmul_under_tensor_parallelism():
    def layer(key):
        return ColumnParallelLinear(
            1024,
            2048,
            kernel_axes=("embed", "mlp"),
            out_axes=("batch", None, "act_mlp"),
            rules=fsdp_tp(),
            dtype=jnp.bfloat16,
            tensor_parallel="fused",
            rngs=nnx.Rngs(key),
        )

    x = jax.ShapeDtypeStruct((2, 4096, 1024), jnp.bfloat16)
    mesh = {"data": 1, "fsdp": 1, "pipe": 1, "tensor": 4}
    with use_device(H200), files_that_run() as found:
        lower_for_cuda(project_together, [layer(0), layer(1)], x, mesh=mesh, kernels=1)
    assert_named(found)
    assert f"{ROOT}/pallas_kernels/matmul/mosaic_gpu.py" in found


@pytest.mark.exhaustive
def test_training_through_a_pipeline(tmp_path):
    mesh, devices = MeshConfig(pipe=2, fsdp=2), jax.devices()[:4]
    config = dataclasses.replace(
        CONFIG,
        mesh=mesh,
        rules="megascale_3d",
        microbatches=2,
        steps=2,
        output_dir=str(tmp_path),
    )
    with files_that_run() as found:
        train, _ = packed_batches(config, TEXT, devices)
        fit(config, train_data=train, devices=devices)
    assert_named(found)
    assert f"{ROOT}/jaxscale/sharding/pipeline.py" in found
