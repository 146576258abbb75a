"""What stands before every endpoint: keys, rates, and the size of requests. Plain ASGI."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sametoken.server.errors import ApiError

#: Paths that need no key: the server's own pages. All others are for the model.
OPEN_PATHS = frozenset(
    {"/", "/health", "/ready", "/version", "/metrics", "/docs", "/redoc", "/openapi.json"}
)
_BEARER = "bearer "
#: Clients whose rates are remembered.
_MAX_CLIENTS = 10_000


def is_guarded(scope: Scope) -> bool:
    """Whether a request is for the model."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path not in OPEN_PATHS and scope["method"] != "OPTIONS"


class Authentication:
    """Lets only holders of a key use the model.

    Args:
        app: what stands behind.
        api_keys: accepted bearer keys; none lets everybody in.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] == "http" and self._digests and is_guarded(scope):
            shown = _digest(_bearer(scope))
            # All are compared, so that the time tells nothing.
            matches = [hmac.compare_digest(shown, digest) for digest in self._digests]
            if not any(matches):
                error = ApiError(
                    401,
                    "the API key is missing or wrong. Send Authorization: Bearer KEY",
                    code="invalid_api_key",
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class RateLimit:
    """Bounds requests per minute: for each key, or for each address where there are no keys.

    A bucket per client holds one minute's requests and refills evenly.

    Args:
        app: what stands behind.
        per_minute: requests per minute, at least 1.
        by_key: whether clients are told apart by their keys.
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
        self._now = now
        # Requests left and when that was so, by client; the longest unseen one first.
        self._buckets: OrderedDict[object, tuple[float, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] == "http" and is_guarded(scope):
            wait_s = self._take(self._client(scope))
            if wait_s > 0:
                error = ApiError(
                    429,
                    f"more than {self._per_minute} requests per minute. "
                    f"Try again after {wait_s:.0f} s",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _take(self, client: object) -> float:
        """Take one request from the client's bucket; seconds to wait if it is empty."""
        now = self._now()
        left, since = self._buckets.pop(client, (float(self._per_minute), now))
        per_second = self._per_minute / 60
        left = min(self._per_minute, left + (now - since) * per_second)
        allowed = left >= 1
        self._buckets[client] = (left - allowed, now)
        if len(self._buckets) > _MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) / per_second

    def _client(self, scope: Scope) -> object:
        if self._by_key:
            return _digest(_bearer(scope))
        address = scope.get("client")
        return address[0] if address else None


class BodyLimit:
    """Reads each body whole, and refuses one that is too large.

    Args:
        app: what stands behind.
        max_bytes: the largest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await self._read(scope, receive)
        if body is None:
            error = ApiError(
                413,
                f"the request is larger than {self._max_bytes} bytes. Send a smaller one",
                code="request_too_large",
            )
            await error.response()(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, receive_again, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if it is too large. A client that goes while sending sends nothing."""
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            return None
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_bytes:
                return None
        return bytes(body)


def _bearer(scope: Scope) -> str:
    given = Headers(scope=scope).get("authorization", "")
    return given[len(_BEARER) :].strip() if given.lower().startswith(_BEARER) else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
