"""Mistakes in the arguments, told apart from defects of the program."""

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator


class UsageError(Exception):
    """A mistake in the arguments; the message says what to change."""


class RunFailed(Exception):
    """A run ended without what was asked for; `code` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


DIVERGED = 3
"""Exit code of a run that diverged: its updates stopped being finite."""
NOT_WRITTEN = 4
"""Exit code of a run that could not write a checkpoint."""
WRONG_VALUES = 5
"""Exit code of a run in which a device's values differed from its replicas."""


@contextlib.contextmanager
def training_errors() -> Iterator[None]:
    """Report in one line the failures of a run that are not defects of the program."""
    from jaxscale.training import (
        CheckpointNotWritten,
        DamagedCheckpoint,
        Diverged,
        ReplicasDiffer,
    )
    from jaxscale.training.checkpoint.steps import CheckpointDiffers

    try:
        yield
    except (CheckpointDiffers, DamagedCheckpoint) as error:
        raise UsageError(str(error)) from None
    except Diverged as error:
        raise RunFailed(str(error), DIVERGED) from None
    except CheckpointNotWritten as error:
        raise RunFailed(str(error), NOT_WRITTEN) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise RunFailed(
            f"{error.strerror}{where}: older checkpoints are as they were; make room, "
            "and the same command with --resume goes on",
            NOT_WRITTEN,
        ) from None
    except ReplicasDiffer as error:
        raise RunFailed(str(error), WRONG_VALUES) from None


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn the errors with which the library rejects settings into `UsageError`.

    It wraps what is checked before work begins. An error after that is a defect or a
    failure of the machine, and keeps its traceback.

    Example:
        >>> with usage_errors():
        ...     raise ValueError("steps 0, expected at least 1")
        Traceback (most recent call last):
        ...
        jaxscale.cli.errors.UsageError: steps 0, expected at least 1
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(str(error)) from error


def suggestion(word: str, known: Iterable[str]) -> str:
    """`` (did you mean ...?)`` if one of `known` is spelled like `word`, else nothing.

    Example:
        >>> suggestion("tarin", ["quickstart", "train"])
        ' (did you mean train?)'
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
