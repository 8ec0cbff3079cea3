"""Checks of settings: what is outside its range or is no choice raises in one wording.

NaN is in no range.
"""

import math
import numbers
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeAliasType, get_args


def check_choice(
    name: str, value: Any, choices: Collection[Any] | TypeAliasType
) -> None:
    """Raise where a setting is none of its choices.

    Args:
        name: Name of the setting.
        value: Value of the setting.
        choices: The values allowed: a collection, or the name of a ``Literal`` type.

    Raises:
        ValueError: the value is something else.

    Example:
        >>> check_choice("norm", "batchnorm", ("rmsnorm", "layernorm"))
        Traceback (most recent call last):
        ...
        ValueError: norm 'batchnorm' is unknown; use one of ('rmsnorm', 'layernorm')
    """
    known: Any = choices
    if isinstance(choices, TypeAliasType):
        known = get_args(choices.__value__)
    if value not in known:
        raise ValueError(f"{name} {value!r} is unknown; use one of {known}")


def check_type(name: str, value: Any, kind: type[Any], remedy: str) -> None:
    """Raise where an argument is of another type.

    Args:
        name: Name of the argument.
        value: Its value.
        kind: The type that it should have.
        remedy: What to do instead.

    Raises:
        ValueError: the value is something else.

    Example:
        >>> check_type("config", "gpt2", dict, "make one")
        Traceback (most recent call last):
        ...
        ValueError: config is 'gpt2', expected dict; make one
    """
    if not isinstance(value, kind):
        told = (
            repr(value)
            if isinstance(value, str | int | float | None)
            else (f"a {type(value).__name__}")
        )
        raise ValueError(f"{name} is {told}, expected {kind.__name__}; {remedy}")


def check_positive(config: Any, *names: str) -> None:
    """Raise where fields of a configuration are not positive and finite."""
    for name in names:
        value = _number(config, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{name} {value} must be positive and finite")


def check_least(config: Any, least: float, *names: str) -> None:
    """Raise where fields of a configuration are below `least`."""
    for name in names:
        value = _number(config, name)
        if not value >= least:
            raise ValueError(f"{name} {value}, expected at least {least}")


def check_range(config: Any, least: float, most: float, *names: str) -> None:
    """Raise where fields of a configuration are below `least` or above `most`."""
    for name in names:
        value = _number(config, name)
        if not least <= value <= most:
            raise ValueError(f"{name} {value}, expected {least} to {most}")


def _number(config: Any, name: str) -> Any:
    value = getattr(config, name)
    if isinstance(value, str) or not isinstance(value, numbers.Number):
        raise ValueError(f"{name} {value!r}, expected a number")
    return value


def check_integers(config: Any, least: int, *names: str) -> None:
    """Raise where fields of a configuration are no integers of at least `least`."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, numbers.Integral) or value < least:
            raise ValueError(f"{name} {value!r} must be an integer of at least {least}")


def private_folder(folder: Path) -> Path:
    """Make a folder of compiled programs, to which only this user may write.

    Args:
        folder: The folder; a new one can only be read by this user, too.

    Raises:
        ValueError: it cannot be made, or others own it or may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ValueError(f"cannot keep programs in {folder}: {error}") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError(
            f"others may write to {folder}, and to load a program can run any code: "
            "delete it, or name a folder that only you may write to"
        )
    return folder


def pip_install(extra: str) -> str:
    """The command that installs an extra: from a clone, for PyPI has no release yet."""
    return f"pip install '.[{extra}]' in a clone of jaxscale"
