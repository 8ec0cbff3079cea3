"""The run-time checks of shapes and types that the tests put on the packages."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ForwardRef, TypeAliasType, get_args

import jaxtyping
from beartype import BeartypeConf, beartype


# An int is a fine float, as PEP 484 says; beartype refuses it unless told.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
_check_types = beartype(
    conf=BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError)
)

# Their annotations say what they yield, which beartype takes in fewer forms.
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_jaxtyped = jaxtyping.jaxtyped


def _needs_jaxtyping(annotation: Any) -> bool:
    """Whether an annotation speaks of shapes, or is a string that might."""
    if isinstance(annotation, str | ForwardRef):
        return True
    if isinstance(annotation, TypeAliasType):
        return _needs_jaxtyping(annotation.__value__)
    if isinstance(annotation, list | tuple):  # arguments of a Callable
        return any(map(_needs_jaxtyping, annotation))
    module = getattr(annotation, "__module__", None) or ""
    of_metaclass = type(annotation).__module__
    return (
        module.startswith("jaxtyping")
        or of_metaclass.startswith("jaxtyping")
        or any(map(_needs_jaxtyping, get_args(annotation)))
    )


def _types_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that checks types until `jaxtyping_disable` is set."""
    checked = _check_types(function)
    if checked is function:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        off = jaxtyping.config.jaxtyping_disable
        return (function if off else checked)(*args, **kwargs)

    return call


def _jaxtyped_once(*, typechecker: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator of the hook, where its checks are worth their cost.

    It leaves functions inside of functions alone, which would get their checks, made
    in a millisecond, at every call of the function around them. Functions without
    shapes get the checks of types alone: those of jaxtyping bind the arguments to the
    signature and check them twice, which took a tenth of the time of all tests.
    """
    decorate = _jaxtyped(typechecker=typechecker)

    def decorate_once(what: Any) -> Any:
        if "<locals>" in what.__qualname__:
            return what
        if inspect.isfunction(what) and not what.__code__.co_flags & _SUSPENDS:
            annotations = what.__annotations__.values()
            if not any(map(_needs_jaxtyping, annotations)):
                return _types_alone(what)
        return decorate(what)

    return decorate_once


def check_packages(*names: str) -> None:
    """Check what is imported from the packages from now on."""
    jaxtyping.jaxtyped = _jaxtyped_once  # looked up in each module that is imported
    jaxtyping.install_import_hook(names, "tests.typechecker.check")
