"""A run as scalars and texts for TensorBoard."""

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.checks import pip_install
from jaxscale.observability.goodput import goodput
from jaxscale.observability.run import Run
from jaxscale.supervision import phases


def write_tensorboard(run: Run, directory: str | os.PathLike[str]) -> None:
    """Write scalars from the events of a run, besides the metrics that `fit` writes.

    ``step/seconds`` is the time of a step; ``computing`` and ``waiting``, for profiled
    steps, are the minimum, median and maximum over all ranks, with the rank that
    computes longest; ``starved`` is how long the device of a rank was idle; ``goodput``
    has the fraction of each part at the newest step; ``memory`` the largest fraction of
    a device's memory in use. Faults are texts.

    Args:
        run: The result of `read_run`.
        directory: An empty or new directory.

    Raises:
        ValueError: the directory already has such a run, which would be drawn twice.
        ImportError: tensorboardX is not installed.
    """
    if list(Path(directory).glob("events.out.tfevents.*")):
        raise ValueError(
            f"{directory} holds events of TensorBoard already; choose a new directory"
        )
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"write_tensorboard needs tensorboardX: {pip_install('train')}"
        ) from error
    with SummaryWriter(str(directory)) as writer:
        _write_steps(run, writer)
        _write_measurements(run, writer)
        newest = max(
            (step for rank in run.ranks for step in rank.steps.step), default=0
        )
        for part, share in goodput(run).shares.items():
            writer.add_scalar(f"goodput/{part}", share, int(newest), walltime=run.end)
        for event in run.driver:
            if event.kind == "fault" or event.name == "slow":
                said = event.args.get("reason") or f"slow ranks {event.args['ranks']}"
                writer.add_text(event.name, str(said), event.step, walltime=event.t1)


def _write_steps(run: Run, writer: Any) -> None:
    """The time between the ends of steps, of the lowest rank, without pauses."""
    steps = run.ranks[0].steps
    events = run.ranks[0].events
    pauses = np.array(sorted(e.t0 for e in events if e.name in phases.SPANS.values()))
    before = np.searchsorted(pauses, steps.done)  # [N] pauses before the end of a step
    for i in range(1, len(steps)):
        seconds = steps.done[i] - steps.done[i - 1]
        follows = steps.step[i] == steps.step[i - 1] + 1
        if follows and np.isfinite(seconds) and before[i] == before[i - 1]:
            at = float(steps.done[i])
            writer.add_scalar("step/seconds", seconds, int(steps.step[i]), walltime=at)


def _write_measurements(run: Run, writer: Any) -> None:
    """Measurements of ranks at the same steps, as curves of minimum and maximum."""
    found: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    times: dict[int, float] = {}
    for rank in run.ranks:
        for event in rank.events:
            values: dict[str, float] = {
                k: v for k, v in event.args.items() if isinstance(v, int | float)
            }
            if event.name == phases.PROFILE:
                names = {"computing", "waiting"} & values.keys()
            elif event.name == phases.PACE:
                names = {"starved"} & values.keys()
            elif event.name == phases.MEMORY and values.get("bytes_limit"):
                values["memory"] = values.get("bytes_in_use", 0) / values["bytes_limit"]
                names = {"memory"}
            else:
                continue
            times[event.step] = event.t1
            for name in names:
                found[name, event.step][rank.number] = values[name]
    for (name, step), of_rank in sorted(found.items()):
        seconds = list(of_rank.values())
        figures = {"least": min(seconds), "median": float(np.median(seconds))}
        figures["most"] = max(seconds)
        if name == "computing":
            figures["slowest_rank"] = max(of_rank, key=lambda n: of_rank[n])
        for figure, value in figures.items():
            tag = f"{name}/{figure}"
            writer.add_scalar(tag, value, step, walltime=times[step])
