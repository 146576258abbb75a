"""What clients of foreign servers share."""

from __future__ import annotations

import httpx

#: No limits: what runs at once is the caller's choice, and httpx's default of 100 would cut it.
NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
