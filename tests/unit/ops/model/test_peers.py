"""Exchanges between ranks that write into each other's memory: processes, kernels interpreted."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest
import torch
import triton.language as tl

from helpers.compiled import compile_launches
from sametoken.io.forks import call_in_forks
from sametoken.ops.model import partial_sum as reference
from sametoken.ops.model import peers_triton
from sametoken.ops.peers import FLAG_BYTES, PeerBuffers, buffer_bytes

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="forks use no GPU; tests/gpu/test_peers_gpu.py does"
)

TURNS = 16
SHAPES = [(1, 16), (3, 97), (5, 3000), (1, 1), (0, 7), (9, 2100)]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch) -> None:
    """A rank that waits sees at once that the engine has stopped; as on a GPU it takes seconds."""
    monkeypatch.setattr(peers_triton, "_LOOKS", tl.constexpr(1 << 8))


def shared_buffers(size: int, channels: int) -> torch.Tensor:
    """Flags are down; what no rank has written is NaN."""
    buffers = torch.full((size, buffer_bytes(size, channels)), 0x7F, dtype=torch.uint8)
    buffers[:, : size * channels * FLAG_BYTES] = 0
    return buffers.share_memory_()


def not_stopped() -> torch.Tensor:
    """Of all ranks here, so that none waits for one that has failed."""
    return torch.zeros(1, dtype=torch.int32).share_memory_()


def peers_of(rank: int, buffers: torch.Tensor, channels: int, stopped: torch.Tensor) -> PeerBuffers:
    counts = torch.zeros(channels, dtype=torch.int32)
    return PeerBuffers(rank, tuple(one.data_ptr() for one in buffers), counts, stopped)


def linger(monkeypatch, rank: int) -> None:
    """A rank that is slow, now to come and now to read."""
    read, rng = peers_triton._of_rank, random.Random(rank)

    def read_later(*args):
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.02)
        return read(*args)

    monkeypatch.setattr(peers_triton, "_of_rank", read_later)


def meet(rank: int, peers: list[PeerBuffers], met: torch.Tensor, monkeypatch) -> None:
    """Exchange in turns with the other ranks."""
    linger(monkeypatch, rank)
    try:
        exchange_in_turns(peers[rank])
        met[rank] = True
    finally:
        peers[rank].stopped[0] = not met[rank]


def exchange_in_turns(peers: PeerBuffers) -> None:
    for turn in range(TURNS):
        generator = torch.Generator().manual_seed(turn)
        rows, width = SHAPES[turn % len(SHAPES)]
        parts = torch.randn(peers.size, rows, width, generator=generator)
        # Of very different magnitudes, so that another order of addition shows.
        parts *= 10.0 ** torch.arange(peers.size)[:, None, None]
        bias = parts[0, 0].half() if turn % 2 and rows else None
        total = peers_triton.partial_sum(parts[peers.rank], peers, torch.float16, bias)
        assert torch.equal(total, reference.partial_sum(parts, torch.float16, bias))
        some = parts[..., ::2].to((torch.half, torch.int64, torch.uint8)[turn % 3])
        assert torch.equal(peers_triton.gather(some[peers.rank], peers), some)


@pytest.mark.parametrize(("size", "channels"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("so_far", [0, 2**31 - 6])
def test_all_ranks_have_the_sum_in_rank_order_and_bits_as_they_are(
    size, channels, in_parts, so_far, monkeypatch
):
    """Also where counts of exchanges pass the largest number, as they do in a day."""
    if in_parts:
        monkeypatch.setattr(peers_triton, "_WORTH_WAITING", 0)
    met = torch.zeros(size, dtype=torch.bool).share_memory_()
    buffers, stopped = shared_buffers(size, channels), not_stopped()
    flags = buffers[:, : size * channels * FLAG_BYTES].view(torch.int32)
    flags[:, :: FLAG_BYTES // 4] = so_far
    peers = [peers_of(rank, buffers, channels, stopped) for rank in range(size)]
    for one in peers:
        one.counts.fill_(so_far)
    calls = [partial(meet, rank, peers, met, monkeypatch) for rank in range(size)]
    call_in_forks(calls, most_forks=size, most_seconds=60)
    assert met.all()


def test_a_rank_that_is_an_exchange_ahead_is_not_waited_for():
    """It has seen our flag, and raised its next one before we looked."""
    buffers, done = shared_buffers(2, 1), torch.zeros(1).share_memory_()
    # Of channel 0, rank 1's in the buffer of rank 0.
    buffers[0, FLAG_BYTES : FLAG_BYTES + 4] = torch.tensor([2], dtype=torch.int32).view(torch.uint8)

    def exchange():
        peers_triton.gather(torch.ones(8), peers_of(0, buffers, 1, not_stopped()))
        done[0] = 1

    call_in_forks([exchange], most_forks=1, most_seconds=5)
    assert done


def test_nobody_waits_once_the_engine_has_stopped():
    buffers = shared_buffers(2, 1)
    peers = peers_of(0, buffers, 1, not_stopped() + 1)
    assert peers_triton.gather(torch.ones(8), peers)[0].eq(1).all()


def test_the_kernel_compiles_for_a_gpu(tmp_path):
    code = """
from sametoken.ops.model import peers_triton
from sametoken.ops.peers import PeerBuffers

counts = torch.empty(512, dtype=torch.int32, device="meta")
for size, shapes in ((2, ((1, 4096), (4096, 4096))), (8, ((3, 97),))):
    peers = PeerBuffers(1, tuple(range(2**40, 2**40 + size * 4096, 4096)), counts, counts[:1])
    for rows, width in shapes:
        own = torch.empty(rows, width, device="meta")
        for bias in (None, own[0].bfloat16()):
            peers_triton.partial_sum(own, peers, torch.bfloat16, bias)
        for one in (own, own.to(torch.uint8)):
            peers_triton.gather(one, peers)
"""
    compile_launches(code, tmp_path)
