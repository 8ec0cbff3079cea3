"""A progress bar for terminals and Jupyter.

In a terminal rich draws it. In Jupyter rich would draw a widget, which does not show in
a saved notebook. There the line is replaced as a whole, which needs no other package,
and the last one stays in the notebook.
"""

import contextlib
import html
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxscale.checks import pip_install


_SECONDS = 0.1


def in_jupyter() -> bool:
    """True in a notebook, also on Colab; False in the terminal of IPython."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


class Bar:
    """A progress bar.

    Example:
        >>> bar = Bar("count", 2)
        >>> bar.update(2, "all of them")
        >>> bar.close()
        count ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 2/2 all of them 0:00:00
    """

    def __init__(
        self, name: str, total: int, *, done: int = 0, stderr: bool = False
    ) -> None:
        """Show the bar.

        Args:
            name: Label of the bar.
            total: Number of steps.
            done: Steps already done.
            stderr: In a terminal, write to standard error.

        Raises:
            ImportError: rich is not installed.
        """
        kind = _Notebook if in_jupyter() else _Terminal
        self._bar = kind(name, total, done, stderr)

    def update(self, done: int, shown: str = "") -> None:
        """Move the bar.

        Args:
            done: Number of steps done so far.
            shown: Text after the bar.
        """
        self._bar.update(done, shown)

    def close(self) -> None:
        """Leave the bar on the screen."""
        self._bar.close()


class _Terminal:
    """A line at the bottom of the terminal."""

    def __init__(self, name: str, total: int, done: int, stderr: bool) -> None:
        from rich import console, progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[shown]}"),
            progress.TimeRemainingColumn(),
            console=console.Console(stderr=True) if stderr else None,
        )
        self._task = self._bar.add_task(name, total=total, completed=done, shown="")
        self._bar.start()

    def update(self, done: int, shown: str) -> None:
        self._bar.update(self._task, completed=done, shown=shown)

    def close(self) -> None:
        self._bar.stop()


class _Notebook:
    """The output of a cell, replaced at most ten times a second."""

    def __init__(self, name: str, total: int, done: int, stderr: bool) -> None:
        from IPython.display import display

        self._name, self._total, self._first = name, total, done
        self._done, self._shown = done, ""
        self._start = self._drawn = time.monotonic()
        self._handle: Any = display(self, display_id=True)

    def update(self, done: int, shown: str) -> None:
        self._done, self._shown = done, shown
        if time.monotonic() - self._drawn >= _SECONDS:
            self._draw()

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._handle.update(self)

    @property
    def _text(self) -> str:
        return "  ".join(
            filter(None, [f"{self._done}/{self._total}", self._shown, self._time])
        )

    @property
    def _time(self) -> str:
        """The remaining seconds, or the total at the end."""
        taken = time.monotonic() - self._start
        if self._done >= self._total:
            return f"{taken:.0f} s"
        steps = self._done - self._first
        return (
            f"{taken / steps * (self._total - self._done):.0f} s left" if steps else ""
        )

    def __repr__(self) -> str:
        return f"{self._name} {self._text}"

    def _repr_html_(self) -> str:
        return (
            f"<div>{html.escape(self._name)} "
            f"<progress value='{self._done}' max='{self._total}'></progress> "
            f"{html.escape(self._text)}</div>"
        )


def shows_bar(wanted: bool | None) -> bool:
    """Whether `progress_bar` shows one."""
    return sys.stderr.isatty() or in_jupyter() if wanted is None else wanted


@contextlib.contextmanager
def progress_bar(
    name: str, wanted: bool | None, total: int
) -> Iterator[Callable[[int], None]]:
    """A progress bar, or nothing.

    Args:
        name: Label of the bar.
        wanted: None shows it in a notebook, and if stderr is a terminal.
        total: Number of steps.

    Returns:
        A function that takes the number of further steps done.
    """
    if not shows_bar(wanted):
        yield lambda count: None
        return
    try:
        bar = Bar(name, total, stderr=True)
    except ImportError as error:
        raise ImportError(
            f"the progress bar needs rich: {pip_install('serve')}, or pass "
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
