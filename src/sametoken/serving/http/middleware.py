"""ASGI middleware before every endpoint: API keys, rate limits, and the size of requests."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.errors import RETRY_AFTER_S, ApiError, path_of, whole_seconds
from sametoken.serving.http.pages import ASSETS

#: Paths of the server's own pages, which need no key. All others are for the model.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json"})
_BEARER = "bearer "
#: Clients whose rates are remembered.
_MAX_CLIENTS = 10_000
#: Limit of requests without a valid key, for each address.
_WRONG_KEYS_PER_MINUTE = 60
#: Uncounted bytes of each body, so that small requests pass while large ones use up the limit.
_FREE_BYTES = 64 * 1024


def is_guarded(scope: Scope) -> bool:
    """Whether a request is for the model."""
    path = path_of(scope)
    is_open = path in OPEN_PATHS or path.startswith(f"{ASSETS}/")
    return not is_open and scope["method"] != "OPTIONS"


class Buckets:
    """A token bucket per client: its capacity is one minute's rate.

    Args:
        per_minute: events per minute, at least 1.
        now: seconds of a monotonic clock.
    """

    def __init__(self, per_minute: int, now: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._now = now
        # Fill level and its time, by client; the least recently seen client first.
        self._buckets: OrderedDict[object, tuple[float, float]] = OrderedDict()

    def take(self, client: object) -> float:
        """Count one event of the client; returns the seconds to wait, 0 if it is allowed."""
        now = self._now()
        left, since = self._buckets.pop(client, (float(self._per_minute), now))
        per_second = self._per_minute / 60
        left = min(self._per_minute, left + (now - since) * per_second)
        allowed = left >= 1
        self._buckets[client] = (left - allowed, now)
        if len(self._buckets) > _MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) / per_second


class Authentication:
    """Requires an API key for the model.

    Wrong keys are rate-limited by address; a valid key is always accepted.

    Args:
        app: the next application.
        api_keys: accepted keys, as bearer tokens or in ``x-api-key``; without any, no key is
            required.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in api_keys]
        self._wrong = Buckets(_WRONG_KEYS_PER_MINUTE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] == "http" and self._digests and is_guarded(scope):
            shown = _digest(_key(scope))
            # Compares all keys, so that the time does not depend on the match.
            matches = [hmac.compare_digest(shown, digest) for digest in self._digests]
            if not any(matches):
                await _send_error(self._refusal(scope), scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError:
        wait_s = self._wrong.take(_address(scope))
        if wait_s > 0:
            cause = (
                f"more than {_WRONG_KEYS_PER_MINUTE} requests per minute without a valid API key"
            )
            return _too_many(cause, wait_s)
        return ApiError(
            401,
            "the API key is missing or wrong. Send Authorization: Bearer KEY, or x-api-key: KEY",
            code="invalid_api_key",
        )


class HeadAsGet:
    """Answers HEAD as GET, without the body: FastAPI's routes refuse it.

    Args:
        app: the next application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


class RateLimit:
    """Limits requests per minute, for each key or, without keys, for each address.

    Args:
        app: the next application.
        per_minute: requests per minute, at least 1.
        by_key: whether keys identify clients.
        now: seconds of a monotonic clock.
    """

    def __init__(
        self,
        app: ASGIApp,
        per_minute: int,
        *,
        by_key: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._per_minute = per_minute
        self._by_key = by_key
        self._buckets = Buckets(per_minute, now)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] == "http" and is_guarded(scope):
            client = _digest(_key(scope)) if self._by_key else _address(scope)
            wait_s = self._buckets.take(client)
            if wait_s > 0:
                error = _too_many(f"more than {self._per_minute} requests per minute", wait_s)
                await _send_error(error, scope, receive, send)
                return
        await self._app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """Limits of request bodies.

    Attributes:
        max_bytes: bytes of the largest body.
        max_total_bytes: bytes of all bodies held at once, each beyond its first 64 KiB.
        timeout_s: seconds that a body may take to arrive.
    """

    max_bytes: int
    max_total_bytes: int
    timeout_s: float

    @classmethod
    def of(cls, config: ServerConfig) -> BodyBounds:
        """The limits of the server's options."""
        return cls(config.max_request_bytes, config.max_bodies_bytes, config.body_timeout)


class BodyLimit:
    """Reads the bodies of POST requests for the model completely, within limits; no other body.

    A body is held until its request has been answered.

    Args:
        app: the next application.
        bounds: the limits.
    """

    def __init__(self, app: ASGIApp, bounds: BodyBounds) -> None:
        self._app = app
        self._bounds = bounds
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body()
        try:
            if scope["method"] == "POST" and is_guarded(scope):
                await self._read(body, scope, receive)
        except ClientDisconnect:
            self._release(body)
            return
        except ApiError as error:
            # Released before the client reads the response.
            self._release(body)
            await _send_error(error, scope, receive, send)
            return
        whole: list[Message] = [
            {"type": "http.request", "body": body.getvalue(), "more_body": False}
        ]

        async def receive_again() -> Message:
            return whole.pop() if whole else await receive()

        try:
            await self._app(scope, receive_again, send)
        finally:
            self._release(body)

    async def _read(self, body: _Body, scope: Scope, receive: Receive) -> None:
        """Read a body.

        Raises:
            ApiError: it is too large or too slow, or the server holds too many bodies.
            ClientDisconnect: the client has disconnected.
        """
        announced = Headers(scope=scope).get("content-length", "0")
        self._check(int(announced) if announced.isdecimal() else 0, self._held)
        try:
            async with asyncio.timeout(self._bounds.timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    self._add(body, message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self._bounds.timeout_s:g} s. Send it faster",
                code="request_timeout",
            ) from None

    def _add(self, body: _Body, part: bytes) -> None:
        size = body.tell() + len(part)
        others = self._held - body.counted
        self._check(size, others)
        body.write(part)
        body.counted = _counted(size)
        self._held = others + body.counted

    def _release(self, body: _Body) -> None:
        self._held -= body.counted
        body.close()

    def _check(self, size: int, others: int) -> None:
        if size > self._bounds.max_bytes:
            raise ApiError(
                413,
                f"the request is larger than {self._bounds.max_bytes} bytes. Send a smaller one",
                code="request_too_large",
            )
        if others + _counted(size) > self._bounds.max_total_bytes:
            raise ApiError(
                503,
                "the server holds too many large requests. Send it again later",
                code="overloaded",
                retry_after_s=RETRY_AFTER_S,
            )


class _Body(io.BytesIO):
    """A body's bytes so far; ``getvalue`` copies nothing.

    Attributes:
        counted: its bytes that count for ``max_total_bytes``.
    """

    counted = 0


def _counted(size: int) -> int:
    return max(0, size - _FREE_BYTES)


def _too_many(cause: str, wait_s: float) -> ApiError:
    return ApiError(
        429,
        f"{cause}. Try again after {whole_seconds(wait_s)} s",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )


def _address(scope: Scope) -> object:
    client = scope.get("client")
    return client[0] if client else None


async def _send_error(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await error.response(path_of(scope))(scope, receive, send)


def _key(scope: Scope) -> str:
    """The key of a request; as a bearer token it comes first, since clients may send both."""
    headers = Headers(scope=scope)
    given = headers.get("authorization", "")
    if given.lower().startswith(_BEARER):
        return given[len(_BEARER) :].strip()
    return headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
