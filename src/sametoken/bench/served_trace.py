"""Tokens and windows of a request to a server, as far as it tells them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from sametoken.bench.openai_stream import ServedRequest


def traced_body(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """The body of a request whose tokens are wanted one by one."""
    logprobs = {"logprobs": True, "top_logprobs": 0} if is_chat else {"logprobs": 0}
    wanted: dict[str, Any] = {"return_token_ids": True, **logprobs}
    if body.get("include_speculation_stats"):
        wanted["include_speculation_stats"] = "detailed"
    return {**body, **wanted}


def served_trace(record: ServedRequest) -> dict[str, Any] | None:
    """The request in the form of ``Trace.as_json``; None if its tokens are not known.

    Where the server reports its windows, these are they. Otherwise every event of a request
    that ran alone is taken for one window: its last token is the target's own, and how many
    drafts were offered is not known (None).
    """
    token_ids = [token_id for event in record.token_ids for token_id in event]
    if record.error is not None or not token_ids or len(token_ids) != len(record.token_texts):
        return None
    if record.windows:
        windows = [asdict(window) for window in record.windows if window.first < len(token_ids)]
    else:
        lengths = [len(event) for event in record.token_ids if event]
        firsts = accumulate(lengths[:-1], initial=0)
        windows = [
            {"first": first, "num_drafts": None, "num_accepted": length - 1}
            for first, length in zip(firsts, lengths, strict=True)
        ]
    return {
        "request": f"request {record.index}",
        "token_ids": token_ids,
        "texts": record.token_texts,
        "windows": windows,
    }
