"""The settings of supervision."""

import dataclasses
import math

from jaxscale.checks import check_integers, check_positive
from jaxscale.supervision.protocol import split_address


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds without a sign of life after which a process counts as hung, by phase.

    Example:
        >>> Deadlines(save=0)
        Traceback (most recent call last):
        ...
        ValueError: save 0 must be positive and finite
    """

    start: float = 120.0
    """Start: until all processes have connected."""
    compile: float = 900.0
    """Then until the end of the first step: read data, restore, compile."""
    step: float = 30.0
    """A training step, at least; more if steps usually take longer."""
    step_factor: float = 10.0
    """A step may take this many times the median of the recent steps."""
    save: float = 300.0
    """Saving a checkpoint, and the end of a run, which waits for it."""
    evaluate: float = 900.0
    """An evaluation; the first one compiles."""
    host: float = 10.0
    """A host's executor, which sends a heartbeat every second."""
    reconnect: float = 15.0
    """Time for executors to reconnect to a restarted driver."""
    hosts: float = 600.0
    """Waiting for enough hosts to start the processes."""
    diagnose: float = 120.0
    """The self-check of a suspect host."""

    def __post_init__(self) -> None:
        check_positive(self, *(field.name for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperviseConfig:
    """How a job is started, monitored and restarted.

    Example:
        >>> SuperviseConfig(processes=3, hosts=2)
        Traceback (most recent call last):
        ...
        ValueError: processes 3 is not divisible by hosts 2; start as many on each host
    """

    processes: int = 1
    """Processes of the job, numbered host by host."""
    hosts: int = 1
    """Hosts that the processes are spread over. With 1, this machine, the executor is
    started too; otherwise start `jaxscale executor` on each host, and on any spare
    ones."""
    address: str = "127.0.0.1:0"
    """Address that the driver listens on; port 0 picks a free port. Other hosts need an
    address that they can reach, and the job's secret in JAXSCALE_SECRET."""
    coordinator_port: int = 0
    """Port of JAX's coordinator; 0 picks a free port at each start."""
    deadlines: Deadlines = Deadlines()
    """Time limits after which a process counts as hung."""
    idle_cycles: int = 3
    """Consecutive restarts without a new step after which the driver gives up."""
    backoff: float = 5.0
    """Seconds to wait before restarting after a start without a new step; doubled after
    each further one, at most a minute."""
    replay: bool = True
    """Recompute a step from the last checkpoint when its loss or gradients are first
    not finite: a hardware fault then goes away; one of the data or the model recurs,
    and is skipped."""
    spike: float = 0.0
    """A loss above this many times the median of the recent steps is a loss spike: the
    step is recomputed from the last checkpoint, and if the spike recurs, its batch and
    the following ones are skipped. 0 ignores spikes."""
    skip_batches: int = 100
    """Batches to skip at a loss spike that recurs."""
    exclude_slow: bool = False
    """Replace a host with slow ranks by a spare one, if there is one: the job saves a
    checkpoint and restarts without the slow host."""
    metrics_address: str = ""
    """``host:port`` of a Prometheus endpoint, ``GET /metrics``, with the metrics of the
    job, such as 127.0.0.1:9464; empty for none."""
    diagnose: str = ""
    """Self-check command to run on a suspect host; if it fails, the host is not used
    any more. By default it checks disk and memory and, where JAX uses GPUs, runs
    `jaxscale diagnose`."""

    def __post_init__(self) -> None:
        check_integers(self, 1, "processes", "hosts", "idle_cycles", "skip_batches")
        check_integers(self, 0, "coordinator_port")
        check_positive(self, "backoff")
        if self.spike != 0 and not 1 < self.spike < math.inf:
            raise ValueError(
                f"spike {self.spike}, expected more than 1 times the usual loss, or 0 "
                "to leave spikes alone"
            )
        host, _ = split_address(self.address)
        if self.metrics_address:
            split_address(self.metrics_address)
        if self.coordinator_port > 65535:
            raise ValueError(
                f"coordinator_port {self.coordinator_port}, expected 0 to 65535"
            )
        if self.processes % self.hosts:
            raise ValueError(
                f"processes {self.processes} is not divisible by hosts {self.hosts}; "
                "start as many on each host"
            )
        if self.hosts > 1 and host in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(
                f"address {self.address!r} is not reached from the other of hosts "
                f"{self.hosts}; give one of this machine in their network"
            )
