"""Mistakes in the arguments, told apart from defects of the program."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class UsageError(Exception):
    """What the user asked for cannot be done; the message says what to change."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Report the errors by which the library rejects settings as mistakes of usage.

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
