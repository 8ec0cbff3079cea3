"""The driver's state as a file, so that a killed driver can continue."""

import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxscale.checks import private_folder


STATE_FILE = "state.json"
DONE = "done"
"""The ends of a job that is not to be continued."""


@dataclasses.dataclass
class State:
    """The state that a restarted driver needs."""

    secret: str
    """Secret of the job."""
    port: int = 0
    """Listen address of the driver."""
    cycle: int = 0
    """Starts of the job so far."""
    running: bool = False
    """Whether its processes were started and have not ended."""
    best: int = 0
    """The newest step done in any cycle."""
    idle: int = 0
    """Consecutive cycles without a new step."""
    executor: int = 0
    """Process id of the executor that the driver has started itself."""
    excluded: dict[str, str] = dataclasses.field(default_factory=dict)
    """Hosts that are not used any more, and why."""
    wrong: dict[str, int] = dataclasses.field(default_factory=dict)
    """How often a host was suspected of wrong values."""
    replayed: list[int] = dataclasses.field(default_factory=list)
    """Steps that were not finite and are recomputed."""
    spikes: dict[str, float] = dataclasses.field(default_factory=dict)
    """Steps that are recomputed after a loss spike, and the spike threshold of each."""
    skips: dict[str, int] = dataclasses.field(default_factory=dict)
    """Steps whose loss spike recurred, and the number of batches to skip there."""
    resume_before: int = 0
    """Until all ranks have restored, a start excludes checkpoints of this step or
    later; 0 excludes none."""
    command: list[str] = dataclasses.field(default_factory=list)
    """Command of the ranks of the last cycle."""
    under_way: bool = False
    """Whether a cycle of this command has reached a state to resume from."""
    began: int = 0
    """The step from which the last cycle resumed."""
    ended: str = ""
    """How the job ended; empty while it runs."""

    def get_under_way(self, began: int | None) -> None:
        """A cycle of this command resumes from step `began`, if that was reported."""
        self.under_way = True
        if began is not None:  # the user may have gone back
            self.best = min(self.best, began)

    def count(self, reached: int, began: int | None, *, is_unsaved: bool) -> None:
        """Count a cycle that has ended by a fault, if it made no progress.

        Args:
            reached: The newest step before it.
            began: The step that it resumed from, if that was reported.
            is_unsaved: Whether it could not write a checkpoint: its steps are then lost
                and recomputed.
        """
        if is_unsaved:
            is_news = began is not None and began > self.began
            self.idle = 1 if is_news else self.idle + 1
        else:
            self.idle = 0 if self.best > reached else self.idle + 1
        self.began = self.began if began is None else began

    def write(self, directory: Path) -> None:
        """Write the file atomically, readable by its owner only."""
        draft = directory / f".{STATE_FILE}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(self), file, indent=2)
        draft.replace(directory / STATE_FILE)


def read(directory: Path, secret: str = "") -> State:
    """The state in `directory`, or a new one, also after the end of a job.

    Args:
        directory: The supervisor's directory, in the output directory of the run.
        secret: Secret of the job; empty generates one.

    Raises:
        ValueError: the file is damaged, or another version of jaxscale wrote it.
    """
    file = directory / STATE_FILE
    state = State(secret=secret or secrets.token_hex())
    if not file.exists():
        return state
    try:
        saved: dict[str, Any] = json.loads(file.read_text())
        state = State(**saved)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged or of another version of jaxscale ({error}); remove "
            "it: the run goes on from its newest checkpoint"
        ) from error
    state.secret = secret or state.secret
    if state.ended == DONE:
        state.under_way, state.resume_before = False, 0
    if state.ended:
        state.ended, state.idle, state.running, state.excluded = "", 0, False, {}
        state.port, state.wrong = 0, {}
    return state


def record(
    directory: Path,
    cycle: int,
    name: str,
    step: int,
    *,
    since: float,
    kind: str = "host",
    **args: Any,
) -> None:
    """Append an event of the driver, in the format of the ranks' events.

    Raises:
        OSError: it cannot be written.
    """
    event = {"t0": since, "t1": time.time(), "cycle": cycle}
    event |= {"step": step, "kind": kind, "name": name, "args": args}
    with (directory / "events-driver.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock `directory` against other drivers, until this process ends.

    Raises:
        ValueError: another driver has the lock, or the directory cannot be made.
    """
    import fcntl  # which not all platforms have

    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("a+")
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be made: {error.strerror}; choose another output_dir"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise ValueError(
                f"another driver, process {file.read().strip()}, works in {directory}; "
                "end it first"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def programs(directory: Path, environ: Mapping[str, str] = os.environ) -> str:
    """The compilation cache of the ranks: the user's own, or one in the run's
    directory.

    Args:
        directory: The driver's directory.
        environ: The environment variables of this process.

    Raises:
        ValueError: others may write to it, or it cannot be made.
    """
    own = environ.get("JAX_COMPILATION_CACHE_DIR")
    return str(private_folder(directory / "compiled")) if own is None else own
