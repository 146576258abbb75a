"""Names of engines that are shown side by side: short, and no two alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sametoken.types.speculative_config import cascade_label

_K = "num_speculative_tokens"


@dataclass(frozen=True, slots=True)
class EngineNames:
    """What the models and drafters of some engines are called.

    Attributes:
        models: by path.
        drafters: by speculative config as JSON, without k.
    """

    models: Mapping[str, str]
    drafters: Mapping[str, str]

    @classmethod
    def of(cls, engines: Iterable[Mapping[str, Any]]) -> EngineNames:
        """The names for engines of these options.

        Raises:
            KeyError: a drafter has neither a method nor a model.
        """
        engines = list(engines)
        given = [spec for one in engines if (spec := one.get("speculative_config"))]
        specs = {_key(spec): spec for spec in given}
        paths = short_names({str(spec["model"]) for spec in given if spec.get("model")})
        labels = numbered([_label(spec, paths) for spec in specs.values()])
        models = {one["model"] for one in engines if one.get("model")}
        return cls(short_names(models), dict(zip(specs, labels, strict=True)))

    def drafter(self, spec: Mapping[str, Any]) -> str:
        """The name of one of the engines' drafters, without k."""
        return self.drafters[_key(spec)]


def short_names(paths: Set[str]) -> dict[str, str]:
    """The last part of each path, after as many as tell it from the others."""
    parts = {path: Path(path).parts for path in paths}

    def short(path: str) -> str:
        own = parts[path]
        others = [other for name, other in parts.items() if name != path]
        sizes = (n for n in range(1, len(own) + 1) if all(o[-n:] != own[-n:] for o in others))
        return str(Path(*own[-next(sizes, len(own)) :]))

    return {path: short(path) for path in paths}


def numbered(names: Sequence[str]) -> list[str]:
    """The names, those that repeat with a number."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})"
        for i, name in enumerate(names)
    ]


def _label(spec: Mapping[str, Any], paths: Mapping[str, str]) -> str:
    """The method and the model; either may be missing, the method where the checkpoint tells it."""
    model = paths.get(str(spec.get("model")), "")
    method = spec.get("method") or "" if model else spec["method"]
    return cascade_label(spec.get("cascade"), f"{method} {model}".strip())


def _key(spec: Mapping[str, Any]) -> str:
    return json.dumps({name: spec[name] for name in sorted(spec) if name != _K})
