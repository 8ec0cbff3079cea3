"""A progress bar on the terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(
    name: str, wanted: bool | None, total: int
) -> Iterator[Callable[[int], None]]:
    """A progress bar, or nothing.

    Args:
        name: What progresses.
        wanted: None shows it where stderr is a terminal.
        total: Number of steps.

    Returns:
        A function that takes how many more are done.
    """
    if wanted is None:
        wanted = sys.stderr.isatty()
    if not wanted:
        yield lambda count: None
        return
    try:
        from rich import console, progress
    except ImportError as error:
        raise ImportError(
            "the progress bar needs rich: pip install 'jaxscale[serve]', or pass "
            "progress=False"
        ) from error
    with progress.Progress(
        progress.TextColumn(name),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=console.Console(stderr=True),
    ) as bar:
        task = bar.add_task(name, total=total)
        yield lambda count: bar.advance(task, count)
