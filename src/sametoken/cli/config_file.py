"""``--config FILE``: options of a command from a file of YAML; the command line overrides them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml  # type: ignore[import-untyped]

from sametoken.errors import ConfigError, in_words, shown
from sametoken.types.option_values import suggestion


def _read_into_defaults(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the command's options."""
    if path is not None:
        ctx.default_map = dict(_defaults(path, ctx.command.params))
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_read_into_defaults,
        is_eager=True,
        help="file of YAML with options by name, as in max-model-len: 4096; the command line wins",
    ),
]


def _defaults(path: Path, params: list[Any]) -> Iterator[tuple[str, Any]]:
    """Values by parameter, as the command line would give them.

    Raises:
        ConfigError: the file cannot be read, or a key in it is no option of the command.
    """
    by_name = {_normal(name): (one, True) for one in params for name in (one.name, *one.opts)}
    by_name |= {_normal(name): (one, False) for one in params for name in one.secondary_opts}
    for key, value in _mapping(path).items():
        name = _normal(str(key))
        if name not in by_name or name == "config":
            raise ConfigError(
                f"{path} has the unknown option {shown(key)}", suggestion(name, by_name)
            )
        param, as_given = by_name[name]
        if value is not None:
            yield param.name, _as_given(value, param, as_given)


def _as_given(value: Any, param: Any, positive: bool) -> Any:
    """A value in the form in which the command line gives it."""
    if isinstance(value, bool):
        return value == positive
    if getattr(param, "multiple", False):
        return list(map(_word, value if isinstance(value, list) else [value]))
    return _word(value)


def _word(value: Any) -> Any:
    """A value as one word."""
    return json.dumps(value) if isinstance(value, dict) else value


def _normal(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _mapping(path: Path) -> Mapping[Any, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({in_words(error)})", "give a file of YAML"
        ) from error
    except yaml.YAMLError as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{path} is no YAML ({text})", "write one option a line") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is no mapping", "write one option a line, as in port: 8000")
    return value
