"""The settings of supervision."""

import dataclasses
import math

from jaxscale.checks import check_integers, check_positive
from jaxscale.supervision.protocol import split_address


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds that a process may take without a word, by what it does.

    Example:
        >>> Deadlines(save=0)
        Traceback (most recent call last):
        ...
        ValueError: save 0 must be positive and finite
    """

    start: float = 120.0
    """From its start until all processes have met."""
    compile: float = 900.0
    """After that until the first step is done: read data, restore, compile."""
    step: float = 30.0
    """A step, at least; more if it usually takes long."""
    step_factor: float = 10.0
    """A step may take this many times the median of the last ones."""
    save: float = 300.0
    """A checkpoint, and the end of a run, which waits for it."""
    evaluate: float = 900.0
    """An evaluation, the first of which compiles."""
    host: float = 10.0
    """An executor says every second that it is alive."""
    reconnect: float = 15.0
    """Executors come back to a driver that was started again."""
    hosts: float = 600.0
    """Until enough hosts are there to start the processes."""
    diagnose: float = 120.0
    """The self-check of a suspect."""

    def __post_init__(self) -> None:
        check_positive(self, *(field.name for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperviseConfig:
    """How a job is started, watched and started again.

    Example:
        >>> SuperviseConfig(processes=3, hosts=2)
        Traceback (most recent call last):
        ...
        ValueError: processes 3 is not divisible by hosts 2; start as many on each host
    """

    processes: int = 1
    """Processes of the job, numbered host by host."""
    hosts: int = 1
    """Hosts that the processes are spread over. With one, which is this machine, the
    executor is started too; otherwise start `jaxscale executor` on each, and on spare
    ones as you like."""
    address: str = "127.0.0.1:0"
    """Where the driver listens; port 0 is a free one. Other hosts need an address that
    they reach, and the job's secret in JAXSCALE_SECRET."""
    coordinator_port: int = 0
    """Port at which the processes meet; 0 is a free one, each time another."""
    deadlines: Deadlines = Deadlines()
    """What is too long."""
    idle_cycles: int = 3
    """Starts in a row that reach no new step, after which the driver gives up."""
    backoff: float = 5.0
    """Seconds before the start after one that reached no new step; twice as many after
    each further one, a minute at most."""
    replay: bool = True
    """Whether a step whose loss or gradients are not finite for the first time is
    computed again from the checkpoint before: a fault of a machine goes away, one of
    the data or the model comes back, and is then skipped."""
    spike: float = 0.0
    """A loss of more than this many times the median of the last steps is a spike: the
    step is computed again from the checkpoint before, and if that does not help, its
    batch and those after it are left out. 0 leaves spikes alone."""
    skip_batches: int = 100
    """Batches that are left out at a spike that comes back."""
    exclude_slow: bool = False
    """Whether a host whose ranks are slow is left out, if a spare one can take its
    place: the ranks save and leave, and start again without it."""
    metrics_address: str = ""
    """``host:port`` at which ``GET /metrics`` gives the figures of the job in the form
    of Prometheus, such as 127.0.0.1:9464; without it none are given."""
    diagnose: str = ""
    """Command that runs on a suspect host, and fails if it must not be used any more;
    by default a self-check of disk and memory and, where JAX uses GPUs, `jaxscale
    diagnose`."""

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
