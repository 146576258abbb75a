"""Names of the files of a GGUF model: one, or several as llama.cpp's gguf-split calls them.

This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

_PART = re.compile(r"(?s)(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class PartName:
    """The name ``STEM-00001-of-00003.gguf`` of a file of a split model.

    Attributes:
        stem: what the names of all its files begin with.
        number: of the file, from 1.
        count: of the files.
    """

    stem: str
    number: int
    count: int

    @classmethod
    def parse(cls, name: str) -> PartName | None:
        """The parts of a name or path; None for any other name."""
        match = _PART.fullmatch(name)
        return match and cls(match["stem"], int(match["number"]), int(match["count"]))

    def __str__(self) -> str:
        return f"{self.stem}-{self.number:05}-of-{self.count:05}.gguf"


def models_of(names: Iterable[str]) -> list[list[str]]:
    """The names of GGUF files by model; those of a split model stand together, in order."""
    found: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names):
        part = PartName.parse(name)
        found.setdefault((name, 0) if part is None else (part.stem, part.count), []).append(name)
    return list(found.values())


def has_all_parts(files: list[str]) -> bool:
    """Whether the files of a model, as ``models_of`` gives them, are all that there are."""
    part = PartName.parse(files[0])
    return part is None or files == [str(replace(part, number=i + 1)) for i in range(part.count)]
