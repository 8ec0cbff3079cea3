"""A supervised job, from Python."""

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxscale.supervision.config import SuperviseConfig
from jaxscale.supervision.driver import Driver


def supervise(
    command: Sequence[str] | str,
    directory: str | os.PathLike[str],
    config: SuperviseConfig | None = None,
    *,
    report: Callable[[str], None] | None = None,
) -> int:
    """Run a command as the ranks of a job, and restart them after faults.

    The command is started `processes` times, with the variables that
    `jaxscale.sharding.initialize` reads. Each start must resume from what the previous
    one has saved, as ``jaxscale train ... --resume auto`` does, or a script that calls
    `fit`.

    Args:
        command: The command, as a list of words or a string.
        directory: Output directory of the run; the driver keeps its files in its folder
            ``supervisor``.
        config: The settings; None is one process.
        report: Called with lines about the job; None prints them.

    Returns:
        0 if all ranks have succeeded, 1 if a signal has stopped them.

    Raises:
        ValueError: there is no command, another driver works in the directory, or its
            state cannot be read.
        GaveUp: the job keeps failing.

    Example:
        >>> import sys, tempfile
        >>> supervise(
        ...     [sys.executable, "-c", "print(40 + 2)"],
        ...     tempfile.mkdtemp(),
        ...     report=lambda line: print(line.partition(" ranks on ")[0]),
        ... )
        cycle 1: 1
        all ranks are done: 42
        0
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    if not words:
        raise ValueError("command is empty; give what each rank runs")

    def to_terminal(line: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone
            print(f"jaxscale supervise: {line}", file=sys.stderr, flush=True)

    config = SuperviseConfig() if config is None else config
    driver = Driver(words, Path(directory), config, report=report or to_terminal)
    return asyncio.run(driver.run())
