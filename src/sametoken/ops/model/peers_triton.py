"""Exchanges between ranks whose GPUs write into each other's memory (``ops.peers``), in Triton.

As all ranks launch the same programs in the same order, program i of one meets program i of the
others. Counts are on the device, so a launch may be captured in a graph.
"""

# mypy: disallow-untyped-decorators=false, disallow-incomplete-defs=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.pdl import gdc_launch_and_wait, pdl_options
from sametoken.ops.peers import BLOCK_BYTES, FLAG_BYTES, Peers

#: Looks at a flag between two at whether the engine has stopped, which lies in host memory.
_LOOKS = tl.constexpr(4096)
_FLAG_BYTES, _BLOCK_BYTES = tl.constexpr(FLAG_BYTES), tl.constexpr(BLOCK_BYTES)


def partial_sum(
    own: Tensor, peers: Peers, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """This rank's [T, N] fp32 -> [T, N], the same on all; see ``Kernels.partial_sum``."""
    assert own.dtype == torch.float32
    assert own.is_contiguous()
    rows, width = own.shape
    assert bias is None or bias.shape == (width,)
    out = torch.empty(rows, width, dtype=dtype, device=own.device)
    if rows:
        block = _block(own)
        _partial_sum_kernel[(_programs(own, peers, block),)](
            own, bias, out, peers.buffers, peers.counts, peers.stopped, rows, WIDTH=width,
            RANK=peers.rank, SIZE=peers.size, CHANNELS=peers.channels, BLOCK=block, num_warps=4,
            **pdl_options(own),
        )  # fmt: skip
    return out


def gather(own: Tensor, peers: Peers) -> Tensor:
    """[...] of every rank, bit for bit, to [size, ...] in rank order."""
    out = own.new_empty((peers.size, *own.shape))
    if own.numel():
        words = _words(own.contiguous(), torch.uint8)
        if len(words) % 4 == 0 and words.data_ptr() % 4 == 0:
            words = words.view(torch.int32)
        block, into = _block(words), _words(out, words.dtype)
        _gather_kernel[(_programs(words, peers, block),)](
            words, into, peers.buffers, peers.counts, peers.stopped, len(words),
            RANK=peers.rank, SIZE=peers.size, CHANNELS=peers.channels, BLOCK=block, num_warps=4,
            **pdl_options(own),
        )  # fmt: skip
    return out


def _words(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of a contiguous tensor; of one element any stride is."""
    return x.as_strided((x.numel(),), (1,)).view(dtype)


def _block(x: Tensor) -> int:
    """Elements of a block: smaller ones of small messages, so that more programs share those."""
    return BLOCK_BYTES // 4 if x.numel() > 2**18 else BLOCK_BYTES // 8


def _programs(x: Tensor, peers: Peers, block: int) -> int:
    return min(cdiv(x.numel(), block), peers.channels)


@triton.jit(do_not_specialize=["rows"])
def _partial_sum_kernel(
    own,  # [rows, WIDTH]
    bias,  # [WIDTH] or None
    out,  # [rows, WIDTH]
    buffers,
    counts,
    stopped,
    rows,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    channel = tl.program_id(0)
    count = tl.load(counts + channel)
    lanes = tl.arange(0, BLOCK)
    for first in range(channel * BLOCK, rows * WIDTH, tl.num_programs(0) * BLOCK):
        count += 1
        at = first + lanes
        inside = at < rows * WIDTH
        mine = tl.load(own + at, inside, other=0.0)
        _exchange(mine, inside, buffers, stopped, channel, count, RANK, SIZE, CHANNELS, BLOCK)
        total = _of_rank(mine, inside, buffers, channel, count, 0, RANK, SIZE, CHANNELS, BLOCK)
        for rank in tl.static_range(1, SIZE):
            total += _of_rank(
                mine, inside, buffers, channel, count, rank, RANK, SIZE, CHANNELS, BLOCK
            )
        if bias is not None:
            total += tl.load(bias + at % WIDTH, inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), inside)
    tl.store(counts + channel, count)


@triton.jit(do_not_specialize=["length"])
def _gather_kernel(
    own,  # [length]
    out,  # [SIZE, length]
    buffers,
    counts,
    stopped,
    length,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_launch_and_wait(PDL)
    channel = tl.program_id(0)
    count = tl.load(counts + channel)
    lanes = tl.arange(0, BLOCK)
    for first in range(channel * BLOCK, length, tl.num_programs(0) * BLOCK):
        count += 1
        at = first + lanes
        inside = at < length
        mine = tl.load(own + at, inside, other=0)
        _exchange(mine, inside, buffers, stopped, channel, count, RANK, SIZE, CHANNELS, BLOCK)
        for rank in tl.static_range(SIZE):
            part = _of_rank(
                mine, inside, buffers, channel, count, rank, RANK, SIZE, CHANNELS, BLOCK
            )
            tl.store(out + rank * length.to(tl.int64) + at, part, inside)
    tl.store(counts + channel, count)


@triton.jit
def _exchange(
    mine,
    inside,
    buffers,
    stopped,
    channel,
    count,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block into the buffers of the others, and wait until theirs have come."""
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            block = _block_of(buffers[rank], channel, count, RANK, SIZE, CHANNELS, mine.dtype)
            tl.store(block + tl.arange(0, BLOCK), mine, inside)
    # All threads have stored: a flag that one of them raises, as a release, tells of all.
    tl.debug_barrier()
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            tl.atomic_xchg(
                _flag(buffers[rank], channel, RANK, SIZE), count, sem="release", scope="sys"
            )
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            _wait(_flag(buffers[RANK], channel, rank, SIZE), stopped, count)
    tl.debug_barrier()


@triton.jit
def _wait(flag, stopped, count):
    """Until a flag is at ``count`` or beyond: who has seen ours may have raised the next one."""
    found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    looks = 0
    while found - count < 0:
        looks += 1
        found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        if looks % _LOOKS == 0:
            found = tl.where(tl.load(stopped, volatile=True) != 0, count, found)


@triton.jit
def _of_rank(
    mine,
    inside,
    buffers,
    channel,
    count,
    rank: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The block of a rank, past L1, which does not see what others write."""
    if rank == RANK:
        return mine
    else:
        block = _block_of(buffers[RANK], channel, count, rank, SIZE, CHANNELS, mine.dtype)
        return tl.load(block + tl.arange(0, BLOCK), inside, other=0, cache_modifier=".cg")


@triton.jit
def _flag(buffer, channel, rank: tl.constexpr, SIZE: tl.constexpr):
    """Raised by a rank, in a buffer."""
    at = buffer + (channel * SIZE + rank) * _FLAG_BYTES
    return at.to(tl.pointer_type(tl.int32))


@triton.jit
def _block_of(
    buffer,
    channel,
    count,
    rank: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Written by a rank, in a buffer."""
    block = ((count & 1) * SIZE + rank) * CHANNELS + channel
    at = buffer + SIZE * CHANNELS * _FLAG_BYTES + block.to(tl.int64) * _BLOCK_BYTES
    return tl.multiple_of(at.to(tl.pointer_type(dtype)), 16)
