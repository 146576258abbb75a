"""The packed weights inside a module of frozen dataclasses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from sametoken.ops.model.gemm.reference import MatrixWeight


def packed_in(part: Any, name: str = "") -> Iterator[tuple[str, MatrixWeight]]:
    """Every packed weight with its dotted name, in order."""
    if isinstance(part, MatrixWeight):
        yield name, part
    elif isinstance(part, tuple):
        for index, one in enumerate(part):
            yield from packed_in(one, f"{name}.{index}")
    elif is_dataclass(part):
        for field in fields(part):
            yield from packed_in(getattr(part, field.name), f"{name}.{field.name}".strip("."))
