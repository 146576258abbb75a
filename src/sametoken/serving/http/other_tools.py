"""Tools that are no functions of the client: agents send them unasked, and they are left out."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator

from sametoken.errors import shown
from sametoken.serving.http.connections import LogRateLimit

_logger = logging.getLogger(__name__)
_logger.addFilter(LogRateLimit())


class OtherTool(BaseModel):
    """A tool that is left out."""

    model_config = ConfigDict(strict=True)

    type: str


def by_type(other: str, /, **models: str) -> Discriminator:
    """Chooses the model of an object by its type: ``other`` for one that is not named.

    One without a type should be of the first of the models.
    """
    first = next(iter(models.values()))

    def name(given: Any) -> str:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return models.get(kind, other) if isinstance(kind, str) else first

    return Discriminator(name)


def tell_of_others(tools: Iterable[BaseModel]) -> None:
    """Log the types of the tools that are left out, if there are any."""
    kinds = {tool.type for tool in tools if isinstance(tool, OtherTool)}
    if kinds:
        _logger.warning(
            "a request has tools that are no functions, and the model does not see them: %s",
            shown(", ".join(sorted(kinds))),
        )
