"""Exchanges between ranks whose GPUs write into each other's memory (``ops.peers``), in Triton.

As all ranks launch the same programs in the same order, program i of one meets program i of the
others. Counts are on the device, so a launch may be captured in a graph.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.flat_memory import flat_memory
from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.peers import BLOCK_BYTES, FLAG_BYTES, PeerBuffers

#: Looks at a flag, 50 ms or more, between two at whether the engine has stopped. That lies in host
#: memory, where 4,096 warps read one after another, and a flag that arrives is not seen for 1 ms.
_LOOKS = tl.constexpr(1 << 18)
_FLAG_BYTES, _BLOCK_BYTES = tl.constexpr(FLAG_BYTES), tl.constexpr(BLOCK_BYTES)
#: Elements of a block, of at most four bytes each.
_BLOCK = tl.constexpr(BLOCK_BYTES // 4)
#: Bytes that a rank need not send, beyond which another wait for all ranks is worth it: 1.3 million
#: are, by 3.5 us.
_WORTH_WAITING = 1 << 20
#: A gather's length is that of whole vectors if it is a multiple of this.
_VECTOR = 16


def partial_sum(
    own: Tensor, peers: PeerBuffers, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """This rank's [T, N] fp32 -> [T, N], the same on all; see ``Kernels.partial_sum``."""
    assert own.dtype == torch.float32
    assert own.is_contiguous()
    assert bias is None or bias.shape == own.shape[1:]
    out, width, block = torch.empty_like(own, dtype=dtype), own.shape[1], _BLOCK.value
    if _gains_by_parts(own.numel(), peers.size):
        _launch(_sum_in_parts_kernel, own, bias, out, peers, width, peers.size * block)
    else:
        _launch(_exchange_kernel, own, bias, out, peers, width, block, SUM=True)
    return out


def gather(own: Tensor, peers: PeerBuffers) -> Tensor:
    """[...] of every rank, bit for bit, to [size, ...] in rank order."""
    out = own.new_empty((peers.size, *own.shape))
    words = flat_memory(own.contiguous())
    if len(words) % 4 == 0 and words.storage_offset() % 4 == 0:
        words = words.view(torch.int32)
    width = 1 if len(words) % _VECTOR else _VECTOR
    gathered = flat_memory(out, words.dtype)
    _launch(_exchange_kernel, words, None, gathered, peers, width, _BLOCK.value, SUM=False)
    return out


def _gains_by_parts(length: int, size: int) -> bool:
    """Whether each rank adds a part, and sends its sum rounded.

    A rank then sends ``1 / size`` of the fp32 to each other one, and half as much of the sum.
    """
    return 4 * length * (size - 1) * (1 - 1.5 / size) > _WORTH_WAITING


def _launch(
    kernel: Any, own: Tensor, bias: Tensor | None, out: Tensor, peers: PeerBuffers, width: int,
    elements: int, **constants: bool,
) -> None:  # fmt: skip
    """Launch a kernel over rows of ``width``, whose programs take ``elements`` at a time."""
    if length := own.numel():
        kernel[(min(cdiv(length, elements), peers.channels),)](
            own, bias, out, peers.buffers, peers.counts, peers.stopped, length // width,
            WIDTH=width, RANK=peers.rank, CHANNELS=peers.channels, num_warps=8,
            **constants, **pdl_options(own),
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _exchange_kernel(
    own,  # [rows, WIDTH]
    bias,  # [WIDTH] or None
    out,  # of a sum [rows, WIDTH], else [ranks, rows, WIDTH]
    buffers,
    counts,
    stopped,
    rows,
    WIDTH: tl.constexpr,
    SUM: tl.constexpr,
    RANK: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    channel = tl.program_id(0)
    count = tl.load(counts + channel)
    lanes = tl.arange(0, _BLOCK)
    for first in range(channel * _BLOCK, rows * WIDTH, tl.num_programs(0) * _BLOCK):
        count += 1
        at = first + lanes
        inside = at < rows * WIDTH
        mine = tl.load(own + at, inside, other=0)
        _exchange(mine, inside, buffers, stopped, channel, count, RANK, CHANNELS)
        if SUM:
            total = _total(mine, inside, at, bias, buffers, channel, count, WIDTH, RANK, CHANNELS)
            tl.store(out + at, total.to(out.dtype.element_ty), inside)
        else:
            for rank in tl.static_range(len(buffers)):
                part = _of_rank(mine, inside, buffers, channel, count, rank, RANK, CHANNELS)
                tl.store(out + rank * (rows.to(tl.int64) * WIDTH) + at, part, inside)
    tl.store(counts + channel, count)


@triton.jit(do_not_specialize=["rows"])
def _sum_in_parts_kernel(
    own,  # [rows, WIDTH] fp32
    bias,  # [WIDTH] or None
    out,  # [rows, WIDTH]
    buffers,
    counts,
    stopped,
    rows,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each rank adds the part of adjacent blocks that has its number, and sends the sum rounded."""
    gdc_launch_and_wait(PDL)
    SIZE: tl.constexpr = len(buffers)
    channel = tl.program_id(0)
    count = tl.load(counts + channel)
    lanes = tl.arange(0, _BLOCK)
    step = tl.num_programs(0) * SIZE * _BLOCK
    for first in range(channel * SIZE * _BLOCK, rows * WIDTH, step):
        count += 1
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                at = first + rank * _BLOCK + lanes
                inside = at < rows * WIDTH
                part = tl.load(own + at, inside, other=0.0)
                block = _block_of(buffers, rank, channel, count, RANK, CHANNELS, part.dtype)
                tl.store(block, part, inside)
        _meet(buffers, stopped, channel, count, RANK)
        at = first + RANK * _BLOCK + lanes
        inside = at < rows * WIDTH
        mine = tl.load(own + at, inside, other=0.0)
        total = _total(mine, inside, at, bias, buffers, channel, count, WIDTH, RANK, CHANNELS)
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + at, rounded, inside)
        count += 1
        _exchange(rounded, inside, buffers, stopped, channel, count, RANK, CHANNELS)
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                at = first + rank * _BLOCK + lanes
                inside = at < rows * WIDTH
                part = _of_rank(rounded, inside, buffers, channel, count, rank, RANK, CHANNELS)
                tl.store(out + at, part, inside)
    tl.store(counts + channel, count)


@triton.jit
def _total(
    mine,
    inside,
    at,
    bias,
    buffers,
    channel,
    count,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The sum of all ranks' blocks, in rank order, and of the bias."""
    total = _of_rank(mine, inside, buffers, channel, count, 0, RANK, CHANNELS)
    for rank in tl.static_range(1, len(buffers)):
        total += _of_rank(mine, inside, buffers, channel, count, rank, RANK, CHANNELS)
    if bias is not None:
        total += tl.load(bias + at % WIDTH, inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _exchange(
    mine, inside, buffers, stopped, channel, count, RANK: tl.constexpr, CHANNELS: tl.constexpr
):
    """Write a block into the buffers of the others, and wait until theirs have come."""
    for rank in tl.static_range(len(buffers)):
        if rank != RANK:
            block = _block_of(buffers, rank, channel, count, RANK, CHANNELS, mine.dtype)
            tl.store(block, mine, inside)
    _meet(buffers, stopped, channel, count, RANK)


@triton.jit
def _meet(buffers, stopped, channel, count, RANK: tl.constexpr):
    """Tell the others that their blocks are written, and wait until ours are."""
    # All threads have stored: a flag that one of them raises, as a release, tells of all.
    tl.debug_barrier()
    for rank in tl.static_range(len(buffers)):
        if rank != RANK:
            flag = _flag(buffers, rank, channel, RANK)
            tl.atomic_xchg(flag, count, sem="release", scope="sys")
    for rank in tl.static_range(len(buffers)):
        if rank != RANK:
            _wait(_flag(buffers, RANK, channel, rank), stopped, count)
    tl.debug_barrier()


@triton.jit
def _wait(flag, stopped, count):
    """Until a flag is at ``count`` or beyond: who has seen ours may have raised the next one."""
    # Plain loads look: atomic ones of many programs keep flags of others from arriving, for
    # milliseconds. One of these at the end is the acquire.
    found = tl.load(flag, volatile=True)
    looks = 0
    while found - count < 0:
        looks += 1
        found = tl.load(flag, volatile=True)
        if looks % _LOOKS == 0:
            found = tl.where(tl.load(stopped, volatile=True) != 0, count, found)
    tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit
def _of_rank(
    mine,
    inside,
    buffers,
    channel,
    count,
    rank: tl.constexpr,
    RANK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The block of a rank, past L1, which does not see what others write."""
    if rank == RANK:
        return mine
    else:
        block = _block_of(buffers, RANK, channel, count, rank, CHANNELS, mine.dtype)
        return tl.load(block, inside, other=0, cache_modifier=".cg")


@triton.jit
def _flag(buffers, at: tl.constexpr, channel, rank: tl.constexpr):
    """Raised by a rank, in the buffer of another one."""
    flag = buffers[at] + (channel * len(buffers) + rank) * _FLAG_BYTES
    return flag.to(tl.pointer_type(tl.int32))


@triton.jit
def _block_of(
    buffers,
    at: tl.constexpr,
    channel,
    count,
    rank: tl.constexpr,
    CHANNELS: tl.constexpr,
    dtype: tl.constexpr,
):
    """[_BLOCK] addresses that a rank writes, in the buffer of another one."""
    block = ((count & 1) * len(buffers) + rank) * CHANNELS + channel
    flags = len(buffers) * CHANNELS * _FLAG_BYTES
    first = buffers[at] + flags + block.to(tl.int64) * _BLOCK_BYTES
    first = tl.multiple_of(first.to(tl.pointer_type(dtype)), 16)
    return first + tl.arange(0, _BLOCK)
