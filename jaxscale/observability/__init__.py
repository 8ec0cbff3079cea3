"""Monitoring of a run from the files that it writes; on any machine, without jax."""

from jaxscale.observability.goodput import PARTS, Goodput, goodput
from jaxscale.observability.layout import MeshLayout, find_layout
from jaxscale.observability.live import ReportServer
from jaxscale.observability.page import write_page
from jaxscale.observability.run import Event, Rank, Run, StepGrid, Steps, read_run
from jaxscale.observability.tensorboard import write_tensorboard
from jaxscale.observability.timeline import chrome_trace
from jaxscale.public import listing


__all__ = [
    "PARTS",
    "Event",
    "Goodput",
    "MeshLayout",
    "Rank",
    "ReportServer",
    "Run",
    "StepGrid",
    "Steps",
    "chrome_trace",
    "find_layout",
    "goodput",
    "read_run",
    "write_page",
    "write_tensorboard",
]

__dir__ = listing(__all__)
