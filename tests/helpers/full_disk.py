"""A disk that fills up while a text is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def filling_disk() -> Iterator[None]:
    """Of every text half is written, and the rest has no room."""

    def write_half(path: Path, text: str, **options) -> None:
        path.write_bytes(text.encode()[: len(text) // 2])
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", write_half)
        yield
