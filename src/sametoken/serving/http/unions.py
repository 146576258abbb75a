"""Models of JSON objects in requests, and unions in which an object's type chooses its own."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator


class Given(BaseModel):
    """An object of exactly the declared types; other fields are ignored."""

    model_config = ConfigDict(strict=True)


class Strict(Given):
    """An object of exactly the declared types, and no other fields."""

    model_config = ConfigDict(extra="forbid")


def by_type(other: str, /, **models: str) -> Discriminator:
    """Chooses the model of an object by its type: ``other`` for one that is not named.

    One without a type should be of the first of the models.
    """
    first = next(iter(models.values()))

    def name(given: Any) -> str:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return models.get(kind, other) if isinstance(kind, str) else first

    return Discriminator(name)
