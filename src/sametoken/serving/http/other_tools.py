"""Tools that are no functions of the client: agents send them unasked, and they are left out."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from pydantic import BaseModel

from sametoken.errors import shown
from sametoken.serving.http.connections import LogRateLimit
from sametoken.serving.http.unions import Given

_logger = logging.getLogger(__name__)
_logger.addFilter(LogRateLimit())


class OtherTool(Given):
    """A tool that is left out."""

    type: str


def tell_of_others(tools: Iterable[BaseModel]) -> None:
    """Log the types of the tools that are left out, if there are any."""
    kinds = {tool.type for tool in tools if isinstance(tool, OtherTool)}
    if kinds:
        _logger.warning(
            "a request has tools that are no functions, and the model does not see them: %s",
            shown(", ".join(sorted(kinds))),
        )
