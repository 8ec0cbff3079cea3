"""Request bodies, read and checked without delaying other requests."""

import math
import re
from typing import Any

import pydantic
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from jaxscale.inference.request import InvalidRequest
from jaxscale.inference.server.calls import LONG, prepared
from jaxscale.inference.server.errors import ApiError, validation_error
from jaxscale.inference.server.schema.body import Body
from jaxscale.inference.server.stream import ClientGone, attended


_JSON = re.compile(r"application/([\w.+-]+\+)?json", re.IGNORECASE)


async def received[B: Body](http: Request, form: type[B]) -> B:
    """The body of a request; a long one is parsed and checked on another thread.

    Raises:
        ApiError: it is something else.
        ClientGone: the client has disconnected before all of it was received.
        Overloaded: too many long bodies of this client wait.
    """
    media = http.headers.get("content-type", "").partition(";")[0].strip()
    if not _JSON.fullmatch(media):
        raise ApiError(
            400, "the body: send an object with content-type application/json"
        )
    try:
        raw = await http.body()
    except ClientDisconnect:
        raise ClientGone from None
    caller = http.state.caller
    if caller.body_bytes <= LONG:
        return parsed(raw, form)
    return await attended(http.receive, prepared(caller, parsed, raw, form))


def parsed[B: Body](raw: bytes, form: type[B]) -> B:
    """The parsed body.

    Raises:
        ApiError: it is no JSON, or something else.
        InvalidRequest: a string or a number in it is none that an answer can hold.
    """
    try:
        # Faster than json, which would hold up all threads for three times as long.
        given = from_json(raw)
    except ValueError as error:
        if "surrogate" in str(error) or "hex escape" in str(error):
            raise InvalidRequest(
                f"the body: a string holds half of a surrogate pair: {error}"
            ) from None
        raise ApiError(
            400, f"the body is not JSON: {error}", code="json_invalid"
        ) from None
    for name, value in given.items() if isinstance(given, dict) else ():
        if not _finite(value):
            raise InvalidRequest(f"the body: {name} holds a number that is not finite")
    try:
        return form.model_validate(given)
    except pydantic.ValidationError as error:
        raise validation_error(
            error.errors(include_url=False, include_input=False)
        ) from None


def _finite(value: Any) -> bool:
    """Whether a value holds no number that JSON cannot write, such as 1e999."""
    match value:
        case float():
            return math.isfinite(value)
        case dict():
            return _finite([*value.values()])
        case list():
            # For millions of token ids, types alone decide.
            plain = {float, dict, list}.isdisjoint(map(type, value))
            return plain or all(map(_finite, value))
    return True
