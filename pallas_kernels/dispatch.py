"""The only fallback loop: every public op passes its implementations to `dispatch`.

There are two kinds of failure. `Unsupported` means "not this implementation, try the
next one"; `ValueError` and `TypeError` mean that the caller made a mistake, and leave
the loop at once.
"""

import contextlib
import contextvars
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


logger = logging.getLogger("pallas_kernels")

_logged: set[tuple[str, str, str]] = set()
_choices: contextvars.ContextVar[list[tuple[str, str]] | None] = contextvars.ContextVar(
    "choices", default=None
)


class Unsupported(NotImplementedError):
    """An implementation cannot serve these arguments on this device.

    The message says what was requested, what is supported, and what to do.
    """


def dispatch(
    op_name: str,
    implementations: Mapping[str, Callable[..., Any]],
    implementation: str | Sequence[str] | None,
    /,
    *args: Any,
    declines: Mapping[str, Callable[[], str | None]] | None = None,
    **kwargs: Any,
) -> Any:
    """Runs the first implementation that supports the arguments.

    The choice is logged at INFO, on the logger "pallas_kernels", with the reasons why
    the implementations before it were not taken: once per op, implementation and
    reason, where reasons that differ only in numbers count as one.

    Args:
        op_name: name of the op, for messages.
        implementations: name to callable, the preferred one first.
        implementation: None tries all in their order; a name runs that one, and its
            `Unsupported` reaches the caller; a sequence of names tries those in order.
        *args: positional arguments of the implementation.
        declines: for some names a function that says why ``implementation=None`` skips
            them although they may support the arguments, or None: see
            `pallas_kernels.tuned_configs.declines`.
        **kwargs: keyword arguments of the implementation.

    Returns:
        The result of the chosen implementation.

    Raises:
        ValueError: a name is unknown, the sequence is empty, or `implementation` is
            neither a name nor a sequence.
        Unsupported: the one implementation named cannot serve the arguments.
        ExceptionGroup: all of several implementations raised `Unsupported`; the group
            holds each reason.

    Example:
        >>> def fast(x):
        ...     raise Unsupported("fast needs a Hopper GPU; use implementation='xla'")
        >>> def portable(x):
        ...     return 2 * x
        >>> dispatch("double", {"fast": fast, "xla": portable}, None, 21)
        42
    """
    if isinstance(implementation, str):
        _check_known(op_name, implementations, [implementation])
        result = implementations[implementation](*args, **kwargs)
        _log_once(op_name, implementation, "")
        return result
    if implementation is not None and not isinstance(implementation, Sequence):
        raise ValueError(
            f"implementation {implementation!r} of {op_name}: expected None or one (or"
            f" a sequence) of {list(implementations)}"
        )
    names = list(implementations) if implementation is None else list(implementation)
    if not names:
        raise ValueError(
            f"implementation {implementation!r}: expected at least one name for"
            f" {op_name}; pass None to choose among {list(implementations)}"
        )
    _check_known(op_name, implementations, names)
    declines = declines if implementation is None and declines else {}
    errors = []
    for name in names:
        try:
            if name in declines and (reason := declines[name]()):
                raise Unsupported(
                    f"{op_name}: {reason}; implementation={name!r} runs it"
                )
            result = implementations[name](*args, **kwargs)
        except Unsupported as error:
            error.add_note(f"implementation: {name!r}")
            errors.append(error)
            continue
        _log_once(op_name, name, _reasons(names, errors))
        return result
    reasons = _reasons(names, errors)
    raise ExceptionGroup(
        f"no implementation of {op_name} supports the arguments ({reasons})", errors
    )


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, str]]]:
    """The choices that `dispatch` makes inside: names of ops and implementations.

    Example:
        >>> with recorded() as choices:
        ...     dispatch("double", {"xla": lambda x: 2 * x}, None, 21)
        42
        >>> choices
        [('double', 'xla')]
    """
    choices: list[tuple[str, str]] = []
    token = _choices.set(choices)
    try:
        yield choices
    finally:
        _choices.reset(token)


def as_hashable(
    implementation: str | Sequence[str] | None,
) -> str | tuple[str, ...] | None:
    """The implementations that a caller names, as an argument that JAX can hash.

    Example:
        >>> as_hashable("xla"), as_hashable(["mosaic_gpu", "xla"])
        ('xla', ('mosaic_gpu', 'xla'))
    """
    if isinstance(implementation, Sequence) and not isinstance(implementation, str):
        return tuple(implementation)
    return implementation


def no_config(op_name: str, config: Any, name: str = "XLA") -> None:
    """Declines a call with a config, for an implementation that takes none.

    Raises:
        Unsupported: `config` is not None.
    """
    if config is not None:
        raise Unsupported(
            f"{op_name}: {name} takes no config, got {config!r}; pass None or use"
            " implementation='mosaic_gpu'"
        )


def no_derivative[T](
    arrays: T, message: str, error: type[Exception] = NotImplementedError
) -> T:
    """The arrays, with an error on any attempt to differentiate by them.

    Args:
        arrays: operands of an op that has no derivative, a pytree.
        message: why, and what to do.
        error: what a derivative raises, with the message.

    Example:
        >>> double = lambda x: 2 * no_derivative(x, "double has no derivative")
        >>> double(1.5)
        3.0
    """
    return _no_derivative(message, error, arrays)  # pyright: ignore[reportReturnType]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _no_derivative(message: str, error: type[Exception], arrays: Any) -> Any:
    del message, error
    return arrays


@_no_derivative.defjvp
def _refuse_derivative(message: str, error: type[Exception], *_: Any) -> Any:
    raise error(message)


_FLOATING = ("bfloat16", "float16", "float32", "float64")


def check_floating(**dtypes: Any) -> None:
    """Refuses types that an op would truncate, or whose gradients would be zero.

    Raises:
        ValueError: a type is none of bfloat16, float16, float32 and float64.

    Example:
        >>> check_floating(x=jnp.float32, scale=jnp.bfloat16)
    """
    for name, dtype in dtypes.items():
        if jnp.dtype(dtype).name not in _FLOATING:
            raise ValueError(
                f"{name} has type {jnp.dtype(dtype)}, expected one of {_FLOATING}; cast"
                " it"
            )


def _check_known(
    op_name: str, implementations: Mapping[str, Any], names: Sequence[str]
) -> None:
    for name in names:
        if name not in implementations:
            raise ValueError(
                f"implementation {name!r} of {op_name} does not exist; expected None"
                f" or one (or a sequence) of {list(implementations)}"
            )


def _reasons(names: Sequence[str], errors: Sequence[Unsupported]) -> str:
    """List why each of the first names was not taken."""
    return "; ".join(
        f"{name}: {error}" for name, error in zip(names, errors, strict=False)
    )


def _log_once(op_name: str, name: str, reasons: str) -> None:
    if (choices := _choices.get()) is not None:
        choices.append((op_name, name))
    # Numbers differ with each shape of a model.
    choice = op_name, name, re.sub(r"\d+", "0", reasons)
    if choice not in _logged:
        _logged.add(choice)
        why = f" ({reasons})" if reasons else ""
        logger.info("%s runs implementation %r%s", op_name, name, why)
