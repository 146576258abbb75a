"""Memory that is given back to the system while its addresses stay."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

from sametoken.errors import UnsupportedError


def drop_pages(address: int, num_bytes: int) -> int:
    """Give back the whole pages of private memory; they read as zeros, or as their file, from now.

    Args:
        address: of the first byte.
        num_bytes: whose content is lost where pages are given back.

    Returns:
        The bytes that were given back.

    Raises:
        UnsupportedError: this system keeps the content of such pages.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(f"pages cannot be dropped on {sys.platform}", "use Linux")
    page = mmap.PAGESIZE
    first = -(-address // page) * page
    length = (address + num_bytes) // page * page - first
    if length <= 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size = ctypes.c_void_p(first), ctypes.c_size_t(length)
    if libc.madvise(pointer, size, mmap.MADV_DONTNEED):
        raise UnsupportedError(
            f"the system keeps these pages ({os.strerror(ctypes.get_errno())})", "stop the engine"
        )
    return length
