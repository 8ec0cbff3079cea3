"""A real run of two processes, of which one is killed: the trace has no gap.

`python -m tests.training.faults` runs every fault.
"""

import json

import jax
import numpy as np
import pytest

from jaxscale.sharding import create, make_mesh
from jaxscale.training import JsonlWriter, fit, packed_batches
from tests.training import toy
from tests.training.faults import Job
from tests.training.faulty_rank import poisoned_loss, settings, text


STEPS = 16
SLOW = ("start", "compile", "step", "save", "host")


@pytest.mark.slow
def test_a_process_is_killed_and_the_losses_are_the_same(tmp_path):
    patient = [w for d in SLOW for w in (f"--deadlines.{d}", "600")]
    job = Job("kill:1:13", steps=STEPS, options=patient, out=tmp_path / "job")
    assert job.wait(1200) == 0, job.said
    # A busy machine may keep one of the processes from running: "slow: rank 1 ...", and
    # "no rank is slow now" when that is over.
    start, ended, again, running, done = (x for x in job.said if "slow" not in x)
    assert "cycle 1: 2 ranks on" in start and "cycle 2: 2 ranks on" in again
    assert "of step 13 by SIGKILL; suspects: rank 1: it failed first" in ended
    assert "is done," in running and "all ranks are done" in done

    # The steps after the checkpoint were computed twice.
    computed: dict[int, list[float]] = {}
    for event in job.events("events-0.jsonl"):
        if event["name"] == "done":
            computed.setdefault(event["step"], []).append(event["args"]["loss"])
    assert len(computed[11]) == len(computed[12]) == 2
    assert all(len({*losses}) == 1 for losses in computed.values())
    assert job.losses == {step: losses[-1] for step, losses in computed.items()}

    # One process, never interrupted.
    config = settings(str(tmp_path / "alone"), STEPS)
    data, _ = packed_batches(config, text(), jax.devices()[:2])
    rules, mesh = config.axis_rules, make_mesh(config.mesh, jax.devices()[:2])
    file = tmp_path / "alone" / "metrics.jsonl"
    fit(
        config,
        train_data=data,
        model=create(lambda: toy.Toy(rules=rules), mesh, rules),
        loss=poisoned_loss,
        writers=[JsonlWriter(file)],
        devices=jax.devices()[:2],
    )
    alone = [json.loads(line)["loss"] for line in file.read_text().splitlines()]
    np.testing.assert_allclose(list(job.losses.values()), alone, rtol=1e-5)
