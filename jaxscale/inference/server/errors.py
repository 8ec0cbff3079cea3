"""Errors in OpenAI's format."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from jaxscale.inference.output import Output
from jaxscale.inference.request import Draining, EngineDead, InvalidRequest, Overloaded


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_FAILURES = {"timeout": 504, "aborted": 503}
_MOST_CHARACTERS = 1000


class ApiError(HTTPException):
    """A request that fails, with the error for its client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Say what went wrong.

        Args:
            status: HTTP status.
            message: What was wrong, and what to do about it.
            param: Field of the body that is to blame.
            code: Short name of the mistake, for programs.
            headers: More headers of the answer.
        """
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        """The answer, as JSON."""
        status, message = self.status_code, self.detail
        usual = "server_error" if status >= 500 else "invalid_request_error"
        if len(message) > _MOST_CHARACTERS:
            message = f"{message[:_MOST_CHARACTERS]}..."
        error = {
            "message": message,
            "type": _TYPES.get(status, usual),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """The answer."""
        headers = dict(self.headers or {})
        if self.status_code == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status_code, headers)


def api_error(error: BaseException) -> ApiError:
    """The response to an error of the engine or of a request.

    Example:
        >>> api_error(InvalidRequest("top_p 2 must be at most 1")).status_code
        400
        >>> api_error(Overloaded("too many wait", 3)).headers
        {'retry-after': '3'}
    """
    match error:
        case ApiError():
            return error
        case Overloaded():
            headers = {"retry-after": str(max(1, error.retry_after))}
            return ApiError(429, str(error), code="overloaded", headers=headers)
        case Draining():
            headers = {"retry-after": "1"}
            return ApiError(503, str(error), code="draining", headers=headers)
        case EngineDead():
            return ApiError(503, str(error), code="engine_dead")
        case InvalidRequest():
            return ApiError(400, str(error))
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
    # What else happens is a defect, of which the log tells more than the client hears.
    return ApiError(500, "the server failed; its log says more")


def check_outcome(output: Output) -> None:
    """Raise where a sequence has ended without its completion.

    Raises:
        ApiError: it failed, was given up, or its time is over.
    """
    if output.finish in (None, "stop", "length"):
        return
    if output.blames_request:
        raise ApiError(400, output.error or "the request cannot be served")
    message = output.error or f"the request was ended: {output.finish}"
    raise ApiError(_FAILURES.get(str(output.finish), 500), message, code=output.finish)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The response to a body that does not fit the schema of the request."""
    if any(error["type"] == "json_invalid" for error in errors):
        reason = errors[0].get("ctx", {}).get("error", errors[0]["msg"])
        return ApiError(400, f"the body is not JSON: {reason}", code="json_invalid")
    places = [[part for part in e["loc"] if part != "body"] for e in errors]
    if not places or not places[0]:
        said = errors[0]["msg"].removeprefix("Value error, ")
        hint = "; send an object with content-type application/json"
        if errors[0]["type"] == "value_error":
            hint = ""
        return ApiError(400, f"the body: {said}{hint}")
    param = str(places[0][0])
    # The members of a union complain one by one, all about the same field.
    said = [e["msg"] for e, p in zip(errors, places, strict=True) if str(p[0]) == param]
    if errors[0]["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"{'.'.join(map(str, places[0]))} is no parameter of this call; leave it "
            "out",
            param=param,
            code="unknown_parameter",
        )
    message = f"{param}: {', or: '.join(dict.fromkeys(said))}"
    return ApiError(400, message, param=param)
