"""What a run has done, from the files that it writes; on any machine, without jax."""

from jaxscale.observability.goodput import PARTS, Goodput, goodput
from jaxscale.observability.run import Event, Rank, Run, StepGrid, Steps, read_run


__all__ = [
    "PARTS",
    "Event",
    "Goodput",
    "Rank",
    "Run",
    "StepGrid",
    "Steps",
    "goodput",
    "read_run",
]
