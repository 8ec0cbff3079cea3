"""The driver's state as a file, so that a driver that was killed goes on."""

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
"""How a job has ended that is not to be continued."""


@dataclasses.dataclass
class State:
    """What a driver that is started again has to know."""

    secret: str
    """That of the job."""
    port: int = 0
    """Where the driver listens."""
    cycle: int = 0
    """Starts of the job so far."""
    running: bool = False
    """Whether its processes were started and not ended."""
    best: int = 0
    """The newest step that was done in any cycle."""
    idle: int = 0
    """Cycles in a row that reached no new step."""
    executor: int = 0
    """Process of the executor that the driver has started itself."""
    excluded: dict[str, str] = dataclasses.field(default_factory=dict)
    """Hosts that are not used any more, and why."""
    wrong: dict[str, int] = dataclasses.field(default_factory=dict)
    """How often a host was suspected of wrong values."""
    replayed: list[int] = dataclasses.field(default_factory=list)
    """Steps that were not finite and computed again."""
    spikes: dict[str, float] = dataclasses.field(default_factory=dict)
    """Steps whose loss was too high and that were computed again, and what is too high
    for each."""
    skips: dict[str, int] = dataclasses.field(default_factory=dict)
    """Steps whose loss was too high again, and how many batches are left out there."""
    resume_before: int = 0
    """Until all ranks have restored, a start uses no checkpoint of this step or later;
    0 for the newest."""
    command: list[str] = dataclasses.field(default_factory=list)
    """What the ranks of the last cycle run."""
    under_way: bool = False
    """Whether a cycle of this command has come to a state to go on from."""
    began: int = 0
    """The step from which the last cycle went on."""
    ended: str = ""
    """How the job ended; empty while it goes on."""

    def get_under_way(self, began: int | None) -> None:
        """A cycle of this command goes on from step `began`, if that was heard of."""
        self.under_way = True
        if began is not None:  # the user may have gone back
            self.best = min(self.best, began)

    def count(self, reached: int, began: int | None, *, is_unsaved: bool) -> None:
        """Count a cycle that has ended by a fault, if it was in vain.

        Args:
            reached: The newest step before it.
            began: The step that it went on from, if that was heard of.
            is_unsaved: Whether it could not write a checkpoint: what it has computed
                is lost then, and computed again, whatever steps it reached.
        """
        if is_unsaved:
            is_news = began is not None and began > self.began
            self.idle = 1 if is_news else self.idle + 1
        else:
            self.idle = 0 if self.best > reached else self.idle + 1
        self.began = self.began if began is None else began

    def write(self, directory: Path) -> None:
        """Write the file, whole or not at all, readable by its owner alone."""
        draft = directory / f".{STATE_FILE}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(self), file, indent=2)
        draft.replace(directory / STATE_FILE)


def read(directory: Path, secret: str = "") -> State:
    """The state in `directory`, or a new one; after the end of a job it begins anew.

    Args:
        directory: That of the supervisor, in the output directory of the run.
        secret: That of the job; empty makes one up.

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
    """Append an event to those of the driver, in the form of those of the ranks.

    Args:
        directory: That of the supervisor.
        cycle: Starts of the job so far.
        name: The event.
        step: The step that it belongs to.
        since: When it began, in seconds since 1970.
        kind: Whom it concerns.
        args: More of it.

    Raises:
        OSError: it cannot be written.
    """
    event = {"t0": since, "t1": time.time(), "cycle": cycle}
    event |= {"step": step, "kind": kind, "name": name, "args": args}
    with (directory / "events-driver.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other drivers away from `directory`, until this process ends.

    Raises:
        ValueError: there is one, or the directory cannot be made.
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
    """Where ranks keep compiled programs: the user's own cache, or beside the run.

    Args:
        directory: That of the driver.
        environ: The variables of this process.

    Raises:
        ValueError: others may write to it, or it cannot be made.
    """
    own = environ.get("JAX_COMPILATION_CACHE_DIR")
    return str(private_folder(directory / "compiled")) if own is None else own
