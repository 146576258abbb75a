"""What clients of foreign servers share: how many connections they open, how much they read."""

from __future__ import annotations

import httpx

from sametoken.errors import RequestError

#: No limits: what runs at once is the caller's choice, and httpx's default of 100 would cut it.
NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
#: Maximum bytes of an answer that is read whole, so that an endless one cannot exhaust memory.
MAX_BODY_BYTES = 64 * 2**20


async def get(client: httpx.AsyncClient, path: str) -> bytes:
    """The body of a successful answer to GET.

    Raises:
        httpx.HTTPError: there is no answer, or it is an error.
        RequestError: as ``read_body``.
    """
    async with client.stream("GET", path) as response:
        response.raise_for_status()
        return await read_body(response)


async def read_body(response: httpx.Response) -> bytes:
    """Read an answer whole.

    Raises:
        RequestError: it is too long.
    """
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(
                f"HTTP {response.status_code}: the body has more than {MAX_BODY_BYTES} bytes"
            )
    return bytes(body)
