"""A trainer's group carries bits of any dtype, and says when it is not whole."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from sametoken.distributed.trainer_group import TrainerGroup
from sametoken.errors import WeightUpdateError
from sametoken.types.weight_updates import Rendezvous

DTYPES = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8)


def rendezvous(world_size: int, timeout_s: float = 20.0, backend: str = "gloo") -> list[Rendezvous]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    return [
        Rendezvous(backend, "127.0.0.1", port, rank, world_size, timeout_s)
        for rank in range(world_size)
    ]


def joined(ranks: list[Rendezvous]) -> list[TrainerGroup]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(TrainerGroup, ranks))


def test_every_engine_gets_the_trainers_bits():
    groups = joined(rendezvous(3))
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for shape in ((3, 5), (), (0, 4), (7,)):
            sent = (100 * torch.rand(shape, generator=generator)).to(dtype)
            tensors = [sent, torch.zeros_like(sent), torch.zeros_like(sent)]
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(TrainerGroup.broadcast, groups, tensors))
            for tensor in tensors[1:]:
                same = tensor.reshape(-1).view(torch.uint8) == sent.reshape(-1).view(torch.uint8)
                assert same.all()


@pytest.mark.parametrize(
    ("packed_bytes", "pieces"),
    [
        (0, [[0], [1, 2], [3], [4]]),
        # A piece ends with the tensor that makes it more than the limit, not before.
        (5, [[0, 1, 2], [3, 4]]),
        (9, [[0, 1, 2, 3], [4]]),
        (10, [[0, 1, 2, 3, 4]]),
        (2**30, [[0, 1, 2, 3, 4]]),
    ],
)
def test_tensors_are_joined_as_vllms_trainers_join_them(packed_bytes, pieces):
    at = rendezvous(1)[0]
    group = TrainerGroup(replace(at, packed_bytes=packed_bytes))
    sizes = [4, 0, 2, 4, 1]
    assert [list(one) for one in group.pieces(sizes)] == pieces
    group = TrainerGroup(replace(rendezvous(1)[0], packed_bytes=3))
    assert [list(one) for one in group.pieces(sizes, packed_bytes)] == pieces


def test_a_rank_that_is_gone_is_a_typed_error():
    trainer, engine = joined(rendezvous(2))
    del trainer
    with pytest.raises(WeightUpdateError, match="is not whole"):
        engine.broadcast(torch.zeros(9))


def test_nobody_comes():
    (_, engine) = rendezvous(2, timeout_s=0.2)
    with pytest.raises(WeightUpdateError, match=f"{engine.address}:{engine.port} is not whole"):
        TrainerGroup(engine)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(WeightUpdateError, match="needs a GPU"):
        TrainerGroup(rendezvous(2, backend="nccl")[1])
