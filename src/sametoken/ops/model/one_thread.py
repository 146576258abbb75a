"""Calls of a library whose order of additions would follow the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch's operations run on the caller's thread alone.

    MKL parts an fp32 product among threads, and computes narrow parts by other kernels. oneDNN
    parts the sums of a bf16 product on CPUs without bf16 instructions.
    """
    of_caller = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(of_caller)
