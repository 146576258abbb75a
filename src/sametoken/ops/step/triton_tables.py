"""Writes of the host to tables by slot on a GPU: one copy and one kernel for all of a plan's."""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
import triton
import triton.language as tl

from sametoken.ops.step.reference import write_tables as write_in_order
from sametoken.ops.step.types import TableWrite
from sametoken.ops.triton_versions import FUSED

_NUMPY = {torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}
_BLOCK = 1024


def write_tables(writes: Sequence[TableWrite]) -> None:
    """See ``StepOps.write_tables``."""
    if not writes:
        return
    words = [
        np.array(values, _NUMPY[part.dtype], ndmin=1).view(np.int32) for part, values in writes
    ]
    lengths = [len(values) for values in words]
    addresses = [part.data_ptr() for part, _ in writes]
    if _share_memory(addresses, lengths):
        write_in_order(writes)
        return
    firsts = accumulate(lengths, initial=0)
    # A number more, so that the words behind them are aligned.
    runs = np.array(
        [
            (address + 4 * word, first + word, min(length - word, _BLOCK), 0)
            for address, first, length in zip(addresses, firsts, lengths, strict=False)
            for word in range(0, length, _BLOCK)
        ]
    )
    packed = torch.from_numpy(np.concatenate((runs.view(np.int32).ravel(), *words)))
    device = writes[0].part.device
    if device.type != "cpu":
        packed = packed.pin_memory().to(device, non_blocking=True)
    size = 2 * runs.size
    places, values = packed[:size].view(torch.int64), packed[size:]
    _write_kernel[(len(runs),)](places, values, BLOCK=_BLOCK, **FUSED)


def _share_memory(addresses: list[int], lengths: list[int]) -> bool:
    """Whether some word is written twice, so that the order counts."""
    runs = sorted(zip(addresses, lengths, strict=True))
    return any(address + 4 * size > after for (address, size), (after, _) in pairwise(runs))


@triton.jit
def _write_kernel(
    runs,  # [R, 4]: address, first word, number of words
    words,  # int32
    BLOCK: tl.constexpr,
):
    run = runs + tl.program_id(0) * 4
    to = tl.load(run).to(tl.pointer_type(tl.int32))
    word = tl.arange(0, BLOCK)
    inside = word < tl.load(run + 2)
    tl.store(to + word, tl.load(words + tl.load(run + 1) + word, inside), inside)
