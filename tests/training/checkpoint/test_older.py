"""A checkpoint that jaxscale wrote before it had pipelines goes on in every layout.

Those with pipelines are exhaustive: any run goes from one to another (`test_loop`).

``tests/fixtures/make_checkpoint.py`` made it, with the losses of the entire run.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from jaxscale.sharding import MeshConfig
from tests.fixtures.make_checkpoint import CONFIG, run
from tests.tiers import exhaustive


FIXTURE = Path(__file__).parents[2] / "fixtures" / "checkpoint"

pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.mark.parametrize(
    "options",
    [
        {"scan_layers": True},
        *exhaustive(
            {"mesh": MeshConfig(pipe=4), "microbatches": 4, "scan_layers": True},
            {"mesh": MeshConfig(pipe=2, tensor=2), "chunks": 2, "microbatches": 2},
        ),
    ],
    ids=["as_before", "uneven_stages", "interleaved"],
)
def test_its_losses_go_on(options, tmp_path):
    shutil.copytree(FIXTURE / "3", tmp_path / "checkpoints" / "3")
    losses = json.loads((FIXTURE / "losses.json").read_text())
    rules = "megascale_3d" if "mesh" in options else "fsdp_tp"
    config = dataclasses.replace(
        CONFIG, output_dir=str(tmp_path), rules=rules, **options
    )
    found = run(config)
    assert list(found) == [4, 5, 6]
    want = {step: losses[str(step)] for step in found}
    assert found == pytest.approx(want, rel=1e-5)
    assert abs(losses["4"] - losses["3"]) > 1e-3  # a loss tells the state of its step
