"""Host memory that other processes of this user and machine map, as long as this one keeps it.

It has no name outside of ``/proc``, so nothing of it is left behind by a process that dies.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

_NAME = "sametoken-weights"
_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")
#: Of tensors within it, so that items of any dtype are aligned.
_ALIGNMENT = 64


class HostMemory:
    """Memory that was allocated, and is zero.

    Args:
        num_bytes: its size.

    Attributes:
        path: by which others map it.
        bytes: [num_bytes] uint8.

    Raises:
        OSError: there is not so much memory.
    """

    def __init__(self, num_bytes: int) -> None:
        opened = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, opened)
        os.posix_fallocate(opened, 0, max(num_bytes, 1))
        self.path = f"/proc/{os.getpid()}/fd/{opened}"
        self.bytes = torch.from_file(self.path, True, max(num_bytes, 1), dtype=torch.uint8)


def places(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where tensors of these many bytes begin in one memory, and how large that is."""
    found, end = [], 0
    for size in sizes:
        found.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return found, end


def mapped(path: str, num_bytes: int) -> Tensor:
    """Memory of another process, [num_bytes] uint8; writes are this process's own.

    Raises:
        RuntimeError: it is gone, smaller, or no such memory.
    """
    if not _PATH.fullmatch(path):
        raise RuntimeError("it has no path of memory")
    try:
        found = os.readlink(path)
    except OSError as error:
        raise RuntimeError(f"its process is gone, or of another user: {error.strerror}") from error
    if not found.startswith(f"/memfd:{_NAME}"):
        raise RuntimeError("its path is no memory")
    return torch.from_file(path, False, num_bytes, dtype=torch.uint8)
