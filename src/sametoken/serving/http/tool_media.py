"""Images and documents in what a tool returned: the model is told that it cannot read them.

The model called the tool, and agents send the result again with every later request: refused, it
would end their session.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from sametoken.serving.http.connections import LogRateLimit

#: Types of parts in OpenAI's APIs and in Anthropic's.
_MEDIA = ("document", "file", "image", "image_url", "input_file", "input_image")
_logger = logging.getLogger(__name__)
_logger.addFilter(LogRateLimit())


def without_media(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a tool's result, with a text in the place of each image and document.

    A line in the log tells of them.
    """
    return [_told(part) if part.get("type") in _MEDIA else part for part in parts]


def _told(part: dict[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    _logger.warning("a tool returned a part of type %s, and the model reads only text", kind)
    text = f"[a part of type {kind} is left out: you can read only text]"
    return {"type": "text", "text": text}
