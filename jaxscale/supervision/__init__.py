"""Fault tolerance: supervision of a job from outside its processes, without jax or
numpy.

A driver for the job and an executor on each host watch the ranks, kill hung or broken
ones, and restart the job from its newest checkpoint.
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
