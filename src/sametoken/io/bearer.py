"""The header that shows a server a client's key."""

from __future__ import annotations

import re

from sametoken.errors import ConfigError


def bearer(api_key: str | None) -> dict[str, str]:
    """The headers that show a server the key, if there is one.

    Raises:
        ConfigError: no header can hold it.
    """
    if not api_key:
        return {}
    if not re.fullmatch("[!-~]+", api_key):
        raise ConfigError(
            "the API key has a space or a character beyond ASCII, which no server accepts",
            "give the key that the server was started with",
        )
    return {"Authorization": f"Bearer {api_key}"}
