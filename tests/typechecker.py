"""The run-time checks of shapes and types that the tests put on the packages."""

from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype


# An int is a fine float, as PEP 484 says; beartype refuses it unless told.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))

_jaxtyped = jaxtyping.jaxtyped


def _jaxtyped_once(*, typechecker: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator of the hook, which leaves functions inside of functions alone.

    They would get their checks, which take a millisecond to make, at every call of the
    function around them.
    """
    decorate = _jaxtyped(typechecker=typechecker)
    return lambda what: what if "<locals>" in what.__qualname__ else decorate(what)


def check_packages(*names: str) -> None:
    """Check what is imported from the packages from now on."""
    jaxtyping.jaxtyped = _jaxtyped_once  # looked up in each module that is imported
    jaxtyping.install_import_hook(names, "tests.typechecker.check")
