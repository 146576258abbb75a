"""Lack of memory, which Python and torch say in several ways, as one typed error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sametoken.errors import SametokenError

#: Of a CPU's allocator and of a GPU's driver, which torch raises as a plain ``RuntimeError``.
_SAID = re.compile(r"DefaultCPUAllocator: [^.\n]+|CUDA (error: )?out of memory")


@contextmanager
def out_of_memory_as(kind: type[SametokenError], cause: str, remedy: str) -> Iterator[None]:
    """A context in which lack of memory, of the host or a device, is a typed error.

    Args:
        kind: the error's type.
        cause: what has no room; what was said follows in brackets.
        remedy: what the user can do about it.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = _SAID.search(str(error))
        if not said and not isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        words = said[0] if said else str(error) or type(error).__name__
        raise kind(f"{cause} ({words})", remedy) from error
