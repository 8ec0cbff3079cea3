"""What a command says while it works: lines on standard error, never among results."""

import contextlib
import logging
import sys
from collections.abc import Iterator


def notice(text: str) -> None:
    """Say a line on standard error, at once."""
    print(f"jaxscale: {text}", file=sys.stderr, flush=True)


class _Handler(logging.Handler):
    """Says what the library logs, on the standard error of the moment.

    A progress bar puts another in its place, which writes above the bar.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Say the message of a record."""
        notice(record.getMessage())


@contextlib.contextmanager
def library_notices() -> Iterator[None]:
    """Show what `jaxscale` logs, from INFO on, as notices of the command."""
    logger, handler = logging.getLogger("jaxscale"), _Handler()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # else what others log to would say it again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
