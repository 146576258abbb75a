"""The draft head that ships with the package, and which drafter a config means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sametoken.config import WITHOUT_MODEL, SpeculativeConfig
from sametoken.errors import CheckpointError, ConfigError
from sametoken.models.embedded import EMBEDDED_FILE, EMBEDDED_NAME, resolve_model

HEAD_NAME = "smollm2-eagle3"
HEAD_METHOD = "eagle3"
HEAD_DIRECTORY = Path(__file__).parents[1] / "heads" / "smollm2_eagle3"
HEAD_FILES = ("config.json", "model.safetensors")


def resolve_drafter(
    spec: SpeculativeConfig | None, target: Path, announce: Callable[[str], None]
) -> tuple[SpeculativeConfig | None, dict[str, str]]:
    """The config with the drafter's path in place of its name, and the reason for a default.

    An ``eagle3`` config that names no head takes the one that ships, if the target is the
    file that it was trained for.

    Args:
        spec: what was asked.
        target: the target's checkpoint.
        announce: told in a sentence what is fetched or used, and from where.

    Raises:
        ConfigError: no head ships for the target, or the one that ships is of another method.
        CheckpointError: the name is neither a path nor a short name, or the installation
            lacks the head's files.
    """
    if spec is None or spec.method in WITHOUT_MODEL:
        return spec, {}
    if not spec.model:
        if target.name != EMBEDDED_FILE:
            raise ConfigError(
                f"method {spec.method!r} needs a drafter, and none ships for {target}",
                f'set "model"; the target {EMBEDDED_NAME!r} has a head that ships',
            )
        why = f"completed by {HEAD_NAME}, the head that ships for this target"
        return replace(spec, model=str(_shipped(spec.method))), {"speculative_config": why}
    if spec.model != HEAD_NAME or Path(HEAD_NAME).exists():
        return replace(spec, model=str(resolve_model(spec.model, announce))), {}
    directory = _shipped(spec.method)
    announce(f"using {HEAD_NAME} from {directory}")
    return replace(spec, model=str(directory)), {}


def _shipped(method: str) -> Path:
    """The directory of the head that ships, for the method that it is made for."""
    if method != HEAD_METHOD:
        raise ConfigError(
            f"{HEAD_NAME!r} is a head for the method {HEAD_METHOD!r}, not for {method!r}",
            f'set "method" to "{HEAD_METHOD}", or give the path of another drafter',
        )
    missing = [name for name in HEAD_FILES if not (HEAD_DIRECTORY / name).is_file()]
    if missing:
        raise CheckpointError(
            f"this installation lacks {', '.join(missing)} of {HEAD_NAME} in {HEAD_DIRECTORY}",
            'install sametoken again, or set "model" to the path of a head',
        )
    return HEAD_DIRECTORY
