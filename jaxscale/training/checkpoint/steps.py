"""The checkpoints of a directory, and which of them all processes can read."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


ITEMS = ("state", "data", "config")
"""The directories that each checkpoint has."""
RECORD = "digests"
"""The directory with the digests; checkpoints of older versions lack it."""
_METADATA = "_CHECKPOINT_METADATA"
"""The file in which Orbax names the items of a checkpoint."""


class DamagedCheckpoint(ValueError):
    """A checkpoint differs from what was saved; the message names it."""


class CheckpointDiffers(ValueError):
    """A checkpoint has other settings or weights; the message names them."""


class CheckpointNotWritten(OSError):
    """A checkpoint could not be written; earlier ones are unchanged."""


def complete_steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps that have a complete checkpoint, oldest first."""
    path = Path(directory)
    return sorted(
        step
        for step in numbered(path)
        if all((path / str(step) / item).is_dir() for item in ITEMS)
    )


def was_recorded(checkpoint: Path) -> bool:
    """Whether a checkpoint was saved with digests, by its metadata.

    An older version lists its other items. A checkpoint that lists none has lost a file
    that every version has, and counts as one that has lost its digests.
    """
    try:
        content = json.loads((checkpoint / _METADATA).read_text())
        return set(content["item_handlers"]) != set(ITEMS)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True


def settings_of(checkpoint: Path) -> dict[str, Any] | None:
    """The settings that a checkpoint was made with, unverified; None if damaged.

    A single process may read them; Orbax and `Checkpointer.config` would wait for the
    others.
    """
    try:
        content = json.loads((checkpoint / "config" / "metadata").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def set_aside_after(directory: str | os.PathLike[str], step: int) -> None:
    """Rename the checkpoints of later steps than `step`, ``12`` to ``12.aside``.

    A run that resumes from `step` then writes its own.
    """
    path = Path(directory)
    set_aside(path, {other for other in numbered(path) if other > step})


def set_aside(directory: Path, steps: set[int]) -> None:
    """Rename the checkpoints of these steps; all processes must call this."""
    if jax.process_index() == 0:
        for step in steps:
            aside = directory / f"{step}.aside"
            shutil.rmtree(aside, ignore_errors=True)
            (directory / str(step)).rename(aside)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoints set aside")


def numbered(directory: Path) -> list[int]:
    """The entries whose name is a step, complete or not."""
    names = [path.name for path in directory.glob("*")]
    return [int(name) for name in names if name.isdecimal() and name == str(int(name))]


def make_writable(directory: Path) -> None:
    """Make the directory of the checkpoints, if need be.

    Raises:
        CheckpointNotWritten: the directory cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission, or a read-only disk")
    except OSError as error:
        raise CheckpointNotWritten(
            f"checkpoints cannot be written to {directory}: {error.strerror}; choose "
            "another output_dir"
        ) from error


def of_first(number: int) -> int:
    """Broadcast the number of process 0."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def on_all[R](read: Callable[[], R]) -> tuple[R | None, str | None]:
    """The result of `read`, or the error of the first process that finds damage.

    Raises:
        RuntimeError: another process failed for another reason than damage.
    """
    result, error, text = None, None, ""
    try:
        result = read()
    except Exception as caught:
        error, text = caught, f"{type(caught).__name__}: {caught}"
    failed = [(process, text) for process, text in enumerate(texts(text)) if text]
    if not failed:
        return result, None
    damage = f"{DamagedCheckpoint.__name__}: "
    for process, text in failed:
        if not text.startswith(damage):
            raise error or RuntimeError(f"process {process} cannot go on: {text}")
    process, text = failed[0]
    seen_by = f" [process {process}]" if jax.process_count() > 1 else ""
    return None, text.removeprefix(damage) + seen_by


def texts(text: str) -> list[str]:
    """The text of each process, in their order."""
    if jax.process_count() == 1:
        return [text]
    mine = np.zeros(1024, np.uint8)
    content = text.encode()[: len(mine)]
    mine[: len(content)] = np.frombuffer(content, np.uint8)
    everyones = np.asarray(multihost_utils.process_allgather(mine))
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in everyones]
