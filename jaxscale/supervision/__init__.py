"""Supervision of a job from outside its processes; imports neither jax nor numpy.

A driver for the job and an executor for each host watch the ranks, end what is stuck or
broken, and start the job again from its newest checkpoint.
"""

from jaxscale.supervision.config import Deadlines, SuperviseConfig
from jaxscale.supervision.driver import GaveUp, supervise
from jaxscale.supervision.events import EventLog, current, leave, read_events


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
