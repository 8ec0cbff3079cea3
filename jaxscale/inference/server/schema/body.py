"""The common base of all request bodies.

A field that is unknown is an error, as it is in OpenAI's API: a misspelled one would
otherwise be ignored without a word. Null means that a field is left out.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic_core import CoreSchema


class _FailFast:
    """As pydantic's, which no union of types takes, for it has no hash."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: pydantic.GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        if schema["type"] == "list":
            schema["fail_fast"] = True
        return schema


T = TypeVar("T")
Items = Annotated[list[T], _FailFast()]
"""A list of which the first mistake is told: a body may hold millions."""


class Part(pydantic.BaseModel):
    """Part of a body."""

    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Parameters of the API that are ignored here; the response lists those that were
    sent."""

    TAKEN: ClassVar[frozenset[str]] = frozenset()
    """Parameters that are ignored without being listed: they are for accounts, storage
    and caches of others."""

    _ignored: list[str] = pydantic.PrivateAttr(default_factory=list)

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def without_ignored(cls, body: Any, handler: Callable[[Any], Any]) -> Any:
        """Leave out what is null, or known to mean nothing here."""
        if not isinstance(body, dict):
            return handler(body)
        known = set(cls.model_fields)
        known |= {field.alias for field in cls.model_fields.values() if field.alias}
        given = {k: v for k, v in body.items() if v is not None or k in known}
        ignored = [key for key in given if key in cls.IGNORED]
        made = handler({k: v for k, v in given.items() if k not in ignored})
        made._ignored = ignored
        return made

    @property
    def ignored(self) -> list[str]:
        """Names of the given parameters that are ignored."""
        return list(self._ignored)


class Body(Part):
    """The body of a request."""

    TAKEN: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str | None = None
    """Name of the model, if it is given that which is served."""
    user: str | None = None
