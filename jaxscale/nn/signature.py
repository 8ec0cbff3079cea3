"""The signature that `help` and editors show of a module class."""

import inspect
from collections.abc import Iterable
from typing import Any

from flax import nnx


class _Constructor:
    """The signature of ``__init__``, of subclasses too: the metaclass of NNX hides it.

    See https://github.com/google/flax/issues/4495.
    """

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        function: Any = owner.__init__
        signature = inspect.signature(function)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def show_constructors(values: Iterable[Any]) -> None:
    """Give the module classes among `values` the signatures of their constructors."""
    for value in values:
        if inspect.isclass(value) and issubclass(value, nnx.Module):
            setattr(value, "__signature__", _Constructor())  # noqa: B010
