"""What `dir` shows of a package: its public names, and not what it imports."""

from collections.abc import Callable, Sequence


def listing(names: Sequence[str]) -> Callable[[], list[str]]:
    """The ``__dir__`` of a package.

    Args:
        names: Its ``__all__``.

    Example:
        >>> listing(["train", "Task"])()
        ['Task', 'train']
    """
    return lambda: sorted(names)
