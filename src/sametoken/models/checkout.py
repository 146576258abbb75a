"""The model that the repository holds and the wheel does not: a small trained hybrid."""

from __future__ import annotations

from pathlib import Path

from sametoken.errors import CheckpointError

HYBRID_NAME = "hybrid-28m"
#: ``models/`` stands beside ``src/`` in a checkout; an installed wheel has nothing there.
HYBRID_DIRECTORY = Path(__file__).parents[3] / "models" / HYBRID_NAME
HYBRID_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def has_hybrid() -> bool:
    """Whether the package runs from a checkout that holds the small hybrid."""
    return not _missing()


def hybrid_directory() -> Path:
    """The small hybrid's checkpoint; nothing is fetched.

    Raises:
        CheckpointError: the package does not run from a checkout that holds it.
    """
    if missing := _missing():
        raise CheckpointError(
            f"{HYBRID_NAME!r} comes with the repository, not with the package: "
            f"{HYBRID_DIRECTORY} lacks {', '.join(missing)}",
            f"give the path of models/{HYBRID_NAME} in a checkout of the repository, "
            "or install sametoken from there with pip install -e",
        )
    return HYBRID_DIRECTORY


def _missing() -> list[str]:
    return [name for name in HYBRID_FILES if not (HYBRID_DIRECTORY / name).is_file()]
