"""``jaxscale executor``: the supervisor's agent on each host of a multi-node job."""

import dataclasses
from collections.abc import Sequence

from jaxscale.checks import check_positive
from jaxscale.cli.errors import usage_errors
from jaxscale.cli.options import parse
from jaxscale.supervision.executor import main as run


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorCommand:
    """The options of ``jaxscale executor``."""

    driver: str
    """Address of the driver, host:port: its `--supervise.address`."""
    name: str = ""
    """Name of this host, unique in the job; by default its host name."""
    grace: float = 300.0
    """Seconds to wait for a lost driver before the processes save a checkpoint and
    exit."""

    def __post_init__(self) -> None:
        check_positive(self, "grace")


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: the settings cannot work, or no driver answers.
    """
    command = parse(
        ExecutorCommand,
        arguments,
        prog="jaxscale executor",
        description="Start and watch the processes of a job on this host, for a driver "
        "(jaxscale train --supervise). JAXSCALE_SECRET holds the secret of the job.",
    )
    with usage_errors():
        return run(command.driver, name=command.name, grace=command.grace)
