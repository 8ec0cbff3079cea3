"""The model or run that a command works on: ``SOURCE``, or ``--from SOURCE``."""

import itertools
from collections.abc import Sequence

from jaxscale.cli.errors import UsageError


_OPTION = "--from"


def take_option(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The source that ``--from`` names, or None, and the other words.

    Raises:
        UsageError: the option has no value.

    Example:
        >>> take_option(["--steps", "5", "--from", "runs/tiny"])
        ('runs/tiny', ['--steps', '5'])
    """
    words = list(arguments)
    at = next((i for i, w in enumerate(words) if w.partition("=")[0] == _OPTION), None)
    if at is None:
        return None, words
    _, given, source = words.pop(at).partition("=")
    if not given and at < len(words):
        source = words.pop(at)
    if not source or source.startswith("-"):
        raise UsageError(
            "--from needs the directory of a model, or its name on the Hugging Face hub"
        )
    return source, words


def source_first(arguments: Sequence[str], *, others: int = 0) -> list[str]:
    """The words of a command with its source in the first place, however it is given.

    Args:
        arguments: The words after the name of the command.
        others: Words without an option that follow the source.

    Raises:
        UsageError: ``--from`` has no value, or there is a second source.

    Example:
        >>> source_first(["--prompt", "a", "--from", "runs/tiny"])
        ['runs/tiny', '--prompt', 'a']
    """
    source, words = take_option(arguments)
    if source is None:
        return words
    plain = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    if len(plain) > others:
        raise UsageError(
            f"--from {source} and {plain[0]} are two sources, expected one; leave one "
            "out"
        )
    return [source, *words]
