"""Supervision of a job from outside its processes; imports neither jax nor numpy.

A driver for the job and an executor for each host watch the ranks, end what is stuck or
broken, and start the job again from its newest checkpoint.
"""

from jaxscale.public import listing
from jaxscale.supervision.config import Deadlines, SuperviseConfig
from jaxscale.supervision.driver import GaveUp
from jaxscale.supervision.events import EventLog, current, leave, read_events
from jaxscale.supervision.job import supervise


__all__ = [
    "Deadlines",
    "EventLog",
    "GaveUp",
    "SuperviseConfig",
    "current",
    "leave",
    "read_events",
    "supervise",
]

__dir__ = listing(__all__)
