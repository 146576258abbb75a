"""Error responses with the statuses of OpenAI's API, in its format or in Anthropic's."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from sametoken.engine.user_inputs import TOO_LONG
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
#: This path, and those below it, answer errors in Anthropic's format.
MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
#: By this text agents know that a shorter conversation may fit.
_TOO_LONG = "prompt is too long: "
#: Fields whose refusal Anthropic's clients know by a code, and then go on without the field.
_MESSAGES_CODES: Mapping[str | None, str] = {"thread": "thread_unsupported_request"}
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
#: Headers of a refusal of the key. With the second Claude Code does not try it again, ten times.
_UNAUTHENTICATED: Mapping[str, str] = {"WWW-Authenticate": "Bearer", "x-should-retry": "false"}
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
        headers = dict(_UNAUTHENTICATED) if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(whole_seconds(self.retry_after_s))
        return headers

    @property
    def body(self) -> dict[str, Any]:
        """The body in OpenAI's format."""
        kind = _TYPES.get(self.status, INVALID)
        error = {"message": self._message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def messages_body(self) -> dict[str, Any]:
        """The body in Anthropic's format."""
        message = _TOO_LONG + self._message if self.code == TOO_LONG else self._message
        kind = _MESSAGES_TYPES.get(self.status, INVALID)
        error: dict[str, Any] = {"type": kind, "message": message}
        if self.param in _MESSAGES_CODES:
            code = _MESSAGES_CODES[self.param]
            error["details"] = {"error_code": code, "unsupported": [self.param]}
        return {"type": "error", "error": error}

    def response(self, path: str = "", headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The complete response.

        Args:
            path: of the request, within the application, which chooses the format.
            headers: instead of the error's own.
        """
        body = self.messages_body if is_of_messages(path) else self.body
        sent = self.headers if headers is None else dict(headers)
        return JSONResponse(body, status_code=self.status, headers=sent)

    @property
    def _message(self) -> str:
        # A lone surrogate, quoted from the request, cannot be encoded.
        return str(self).encode("utf-8", "backslashreplace").decode("utf-8")


def is_of_messages(path: str) -> bool:
    """Whether a path within the application answers in Anthropic's format."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


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


def path_of(scope: Scope) -> str:
    """The path of a request within the application, which a proxy may have put below another."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def install_handlers(app: FastAPI) -> None:
    """Register handlers that give all errors of the application the same format."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response(path_of(request.scope))

    async def on_invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        fault = error.errors()[0]
        answer = invalid_field([str(part) for part in fault["loc"][1:]], fault)
        return answer.response(path_of(request.scope))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        answer = ApiError(error.status_code, f"{error.detail}. See /docs for what there is")
        return answer.response(path_of(request.scope), error.headers or {})

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
