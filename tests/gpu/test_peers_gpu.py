"""Exchanges between ranks, each on a stream of one GPU: the kernels that meet over NVLink."""

from __future__ import annotations

import pytest
import torch

from sametoken.ops.model import partial_sum as reference
from sametoken.ops.model import peers_triton
from sametoken.ops.peers import FLAG_BYTES, PeerBuffers, buffer_bytes

CHANNELS = 128
SHAPES = [(1, 4096), (5, 97), (64, 4096), (700, 2880), (1, 1), (0, 7)]


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch):
    """Launches that would start early, and wait, take the room of another rank's on this GPU."""
    monkeypatch.setattr(peers_triton, "pdl_options", lambda tensor: {"PDL": False})


class Ranks:
    """Buffers of ranks that share a GPU; what no rank has written is NaN."""

    def __init__(self, size: int) -> None:
        self.size, self.streams = size, [torch.cuda.Stream() for _ in range(size)]
        shape = (size, buffer_bytes(size, CHANNELS))
        self.buffers = torch.full(shape, 0x7F, dtype=torch.uint8, device="cuda")
        self.buffers[:, : size * CHANNELS * FLAG_BYTES] = 0
        self.stopped = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        addresses = tuple(one.data_ptr() for one in self.buffers)
        self.peers = [
            PeerBuffers(
                rank, addresses, torch.zeros(CHANNELS, dtype=torch.int32).cuda(), self.stopped
            )
            for rank in range(size)
        ]

    def each(self, work):
        """What ``work(rank, peers)`` returns on each rank's stream, once all are done."""
        torch.cuda.synchronize()
        found = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                found.append(work(rank, self.peers[rank]))
        torch.cuda.synchronize()
        return found


def compile_first(ranks, work) -> None:
    """Launches that wait for nobody: a compiler must not keep one rank from its start."""
    ranks.stopped.fill_(1)
    before = [one.counts.clone() for one in ranks.peers]
    for rank in range(ranks.size):
        work(rank, ranks.peers[rank])
        torch.cuda.synchronize()
    for one, counts in zip(ranks.peers, before, strict=True):
        one.counts.copy_(counts)
    ranks.buffers[:, : ranks.size * CHANNELS * FLAG_BYTES] = 0
    ranks.stopped.fill_(0)


def partials(size: int, rows: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    parts = torch.randn(size, rows, width, device="cuda", generator=generator)
    return parts * 10.0 ** torch.arange(size, device="cuda")[:, None, None]


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_bits_are_those_of_the_reference(size, shape, in_parts, monkeypatch):
    monkeypatch.setattr(peers_triton, "_WORTH_WAITING", -1 if in_parts else 10**15)
    ranks, parts = Ranks(size), partials(size, *shape, seed=0)
    bias = partials(1, 1, shape[1], seed=1)[0, 0].bfloat16()

    def work(rank, peers):
        total = peers_triton.partial_sum(parts[rank], peers, torch.bfloat16, bias)
        return total, peers_triton.gather(parts[rank].half(), peers)

    compile_first(ranks, work)
    for _ in range(5):
        for total, gathered in ranks.each(work):
            assert torch.equal(total, reference.partial_sum(parts, torch.bfloat16, bias))
            assert torch.equal(gathered, parts.half())


def test_graphs_of_any_number_of_exchanges_replay():
    """Also an odd one, after which blocks of the other parity are next."""
    ranks = Ranks(2)
    inputs = [torch.empty(64, 4096, device="cuda") for _ in range(2)]
    outputs: list[list[torch.Tensor]] = [[], []]

    def work(rank, peers):
        return [
            peers_triton.partial_sum(inputs[rank][:rows], peers, torch.bfloat16)
            for rows in (64, 1, 17)
        ]

    compile_first(ranks, work)
    graphs = []
    for rank, stream in enumerate(ranks.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs[rank] = work(rank, ranks.peers[rank])
        graphs.append(graph)
    for seed in range(20):
        parts = partials(2, 64, 4096, seed)
        for own, part in zip(inputs, parts, strict=True):
            own.copy_(part)
        ranks.each(lambda rank, peers: graphs[rank].replay())
        for found in outputs:
            for one in found:
                wanted = reference.partial_sum(parts[:, : len(one)], torch.bfloat16)
                assert torch.equal(one, wanted)
