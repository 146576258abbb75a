"""Error responses with the format and statuses of OpenAI's API."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from sametoken.errors import (
    MAX_CAUSE,
    MAX_SHOWN,
    DrainingError,
    EngineDeadError,
    EngineRestartingError,
    OverloadedError,
    RequestError,
    SametokenError,
    StructuredOutputError,
    UnsupportedError,
    WeightUpdateError,
    clipped,
)

INVALID = "invalid_request_error"
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
#: Temporary errors, which another server or a later retry would not have; the first match counts.
#: Causes stay in the log: they may name files of this machine.
_UNAVAILABLE: Mapping[type[SametokenError], tuple[str, str]] = {
    DrainingError: ("draining", "the server takes no new requests. Send them to another one"),
    EngineRestartingError: (
        "engine_restarting",
        "the engine is being started again. Try again in a few seconds",
    ),
    EngineDeadError: ("engine_dead", "the engine has stopped. Send the request again"),
}
#: Seconds after which a server that is busy or starts may serve again.
RETRY_AFTER_S = 5
#: Characters of an error's message and param.
_MAX_MESSAGE, _MAX_PARAM = 2 * MAX_CAUSE, 100
_logger = logging.getLogger("sametoken.server")


def whole_seconds(wait_s: float) -> int:
    """A time to wait as ``Retry-After`` has it: rounded up, at least 1."""
    return max(1, math.ceil(wait_s))


class ApiError(Exception):
    """An error response.

    Args:
        status: HTTP status.
        message: cause and remedy.
        param: the faulty field of the request, if any.
        code: machine-readable name.
        retry_after_s: seconds after which the client may retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(clipped(message, _MAX_MESSAGE))
        self.status = status
        self.param = None if param is None else clipped(param, _MAX_PARAM)
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(whole_seconds(self.retry_after_s))
        return headers

    @property
    def body(self) -> dict[str, Any]:
        """The body in OpenAI's format."""
        # A lone surrogate, quoted from the request, cannot be encoded.
        message = str(self).encode("utf-8", "backslashreplace").decode("utf-8")
        kind = _TYPES.get(self.status, INVALID)
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The complete response."""
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400: a request that the client must change."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """The response to an error; unexpected errors are logged, without details for the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        return ApiError(429, str(error), code="overloaded", retry_after_s=error.retry_after_s)
    if isinstance(error, UnsupportedError):
        return invalid(str(error), code="unsupported")
    if isinstance(error, WeightUpdateError):
        return invalid(str(error), code="weights_refused")
    if isinstance(error, RequestError):
        return invalid(str(error), error.param, error.code)
    if isinstance(error, StructuredOutputError):
        return invalid(str(error))
    for kind, (code, message) in _UNAVAILABLE.items():
        if isinstance(error, kind):
            return ApiError(503, message, code=code, retry_after_s=RETRY_AFTER_S)
    if isinstance(error, SametokenError):
        return ApiError(500, str(error), code=type(error).__name__)
    _logger.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, "the server failed. Its log says why", code="internal_error")


def install_handlers(app: FastAPI) -> None:
    """Register handlers that give all errors of the application the same format."""

    async def on_error(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def on_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        fault = error.errors()[0]
        return invalid_field([str(part) for part in fault["loc"][1:]], fault).response()

    async def on_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        answer = ApiError(error.status_code, f"{error.detail}. See /docs for what there is")
        return JSONResponse(answer.body, status_code=answer.status, headers=error.headers)

    for kind in (ApiError, SametokenError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


def invalid_field(where: Sequence[str], fault: Mapping[str, Any]) -> ApiError:
    """The response to an error that pydantic found.

    Args:
        where: the field, and the path to the fault within it; empty if the body is no object.
        fault: one of ``ValidationError.errors()``.
    """
    if not where:
        return invalid("the body is no JSON object. Send one as application/json")
    cause = fault.get("ctx", {}).get("error")
    message = str(cause) if isinstance(cause, Exception) else fault["msg"]
    place = clipped(".".join(where), MAX_SHOWN)
    return invalid(f"{place}: {clipped(message, MAX_SHOWN)}", param=where[0])
