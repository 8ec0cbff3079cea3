"""A lock on the directory of a run: one command at a time writes to it.

The lock is a file that only one process can create, also on shared disks, where kernel
locks often do not work. It names its owner, and its modification time shows that the
owner is alive.
"""

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxscale.supervision import current


logger = logging.getLogger("jaxscale.training")

LOCK_FILE = "run.lock"
"""Name of the lock file in the directory of the run."""
_BEAT_SECONDS = 30.0
_STALE_SECONDS = 300.0
_held: set[Path] = set()
_kept: dict[Path, contextlib.ExitStack] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Owner:
    """The owner of a lock."""

    host: str
    pid: int
    started: str
    """Start time of the process, since process ids are reused."""
    since: str
    supervised: bool

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    @property
    def is_dead(self) -> bool:
        """Whether the process ran on this host and has ended."""
        return self.host == _host() and _started(self.pid) != self.started


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Context in which no other process writes a run to `directory`.

    A process may hold it several times, and releases what it has kept (`keep`). A lock
    whose process has ended is taken over; on another host, if it has shown no sign of
    life for five minutes; a process restarted by a supervisor takes over the lock of
    its previous start.

    Args:
        directory: The output directory; made if needed.

    Raises:
        ValueError: another process holds it, or it cannot be made.
    """
    path = directory.resolve() / LOCK_FILE
    if path in _held:
        with _kept.pop(path, contextlib.nullcontext()):
            yield
        return
    if path.parent.is_file():
        raise ValueError(f"output_dir {directory} is a file; choose a directory")
    made = [p for p in (path.parent, *path.parent.parents) if not p.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = _take(path)
    except OSError as error:
        raise ValueError(
            f"output_dir {directory} cannot be made: {error.strerror}; choose another"
        ) from error
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, mine, ended), daemon=True)
    _held.add(path)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        _held.discard(path)
        with contextlib.suppress(OSError):
            if _read(path) == mine:
                path.unlink()
            for folder in made:  # which nothing was written to
                folder.rmdir()


def keep(directory: Path) -> None:
    """Hold the lock of `directory` from now on, as `locked`, for a script without one.

    The next `locked` of this directory gives it back at its end; without one, so does
    the end of the process.

    Args:
        directory: The output directory; made if needed.

    Raises:
        ValueError: another process holds it, or it cannot be made.
    """
    path = directory.resolve() / LOCK_FILE
    if path in _held:
        return
    stack = contextlib.ExitStack()
    stack.enter_context(locked(directory))
    _kept[path] = stack
    owner = os.getpid()

    def give_back() -> None:
        if os.getpid() == owner:  # and no fork of it
            _kept.pop(path, stack).close()

    atexit.register(give_back)


def _take(path: Path) -> _Owner:
    """Create the file, replacing a stale one."""
    me = os.getpid()
    mine = _Owner(
        host=_host(),
        pid=me,
        started=_started(me),
        since=time.strftime("%Y-%m-%d %H:%M:%S%z"),
        supervised=current().supervised,
    )
    while True:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            _remove_stale(path)
            continue
        with os.fdopen(file, "w") as out:
            json.dump(dataclasses.asdict(mine), out)
        return mine


def _remove_stale(path: Path) -> None:
    """Remove a stale lock.

    Raises:
        ValueError: another process holds it.
    """
    owner, age = _read(path), _age(path)
    if age is None:
        return  # it has just been released
    log = current()
    restarted = log.supervised and not log.at_first(True)
    ours = restarted and owner is not None and owner.supervised
    dead = owner is not None and owner.is_dead
    if not (ours or dead or age > _STALE_SECONDS):
        raise ValueError(
            f"output_dir {path.parent} is in use by {owner or 'another process'}; wait "
            "until it has ended, or choose another directory"
        )
    # By a rename, which only one of several processes can do with the file it judged.
    aside = path.with_name(f".{path.name}.{_host()}.{os.getpid()}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if _read(aside) != owner:
        aside.rename(path)
        return
    aside.unlink()
    logger.warning("%s: the lock of %s is taken over", path.parent, owner or "nobody")


def _read(path: Path) -> _Owner | None:
    """The owner; None if the file is gone or still empty."""
    try:
        content: Any = json.loads(path.read_text())
        return _Owner(**content)
    except (OSError, ValueError, TypeError):
        return None


def _age(path: Path) -> float | None:
    """Seconds since the last sign of life, by the file system's clock."""
    probe = path.with_name(f".{path.name}.{_host()}.{os.getpid()}.clock")
    try:
        probe.touch()
        now = probe.stat().st_mtime
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return None
    finally:
        probe.unlink(missing_ok=True)


def _beat(path: Path, mine: _Owner, ended: threading.Event) -> None:
    while not ended.wait(_BEAT_SECONDS):
        with contextlib.suppress(OSError):
            if _read(path) == mine:
                os.utime(path)


def _host() -> str:
    return socket.gethostname()


def _started(pid: int) -> str:
    """Start time of a process of this host; empty if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _without_proc(pid)
    return "" if fields[0] == "Z" else fields[19]


def _without_proc(pid: int) -> str:
    """Whether it is alive, without /proc."""
    if Path("/proc/self/stat").exists():
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "lives"
