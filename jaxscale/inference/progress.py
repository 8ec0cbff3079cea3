"""A progress bar, for those who watch."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from jaxscale.observability.bar import Bar, in_jupyter


@contextlib.contextmanager
def progress_bar(
    name: str, wanted: bool | None, total: int
) -> Iterator[Callable[[int], None]]:
    """A progress bar, or nothing.

    Args:
        name: What progresses.
        wanted: None shows it in a notebook, and where stderr is a terminal.
        total: Number of steps.

    Returns:
        A function that takes how many more are done.
    """
    if wanted is None:
        wanted = sys.stderr.isatty() or in_jupyter()
    if not wanted:
        yield lambda count: None
        return
    try:
        bar = Bar(name, total, stderr=True)
    except ImportError as error:
        raise ImportError(
            "the progress bar needs rich: pip install 'jaxscale[serve]', or pass "
            "progress=False"
        ) from error
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        bar.update(done)

    try:
        yield advance
    finally:
        bar.close()
