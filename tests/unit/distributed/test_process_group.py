"""What travels between processes arrives with its very bits. Both ends are in this one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sametoken.distributed.process_group import join, meeting, store_in

CPU = torch.device("cpu")


def joined(size: int) -> list:
    """The groups of all ranks."""
    own, others = meeting(size, CPU)
    each = [own, *([other] for other in others)]
    return [join(rank, size, CPU, files) for rank, files in enumerate(each)]


@pytest.fixture(scope="module")
def groups():
    return joined(2)


def on_ranks(work, size: int = 2) -> list:
    """What ``work(rank)`` returns on each."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size), timeout=30))


def tensor(rank, dtype):
    if dtype == torch.bool:
        return torch.tensor([[True, False, bool(rank)]])
    bits = torch.arange(6, dtype=torch.float64).view(2, 3).sub(2.5 + rank)
    x = (bits * 3).to(dtype)
    return x / 0 * 0 if rank and dtype.is_floating_point else x


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_bits_arrive_as_they_are(groups, dtype):
    gathered = on_ranks(lambda rank: groups[rank].gather(tensor(rank, dtype)))
    shared = on_ranks(lambda rank: groups[rank].broadcast(tensor(rank, dtype)))
    expected = torch.stack((tensor(0, dtype), tensor(1, dtype)))
    for rank in range(2):
        assert gathered[rank].dtype == dtype
        as_bytes = gathered[rank].view(torch.uint8), expected.view(torch.uint8)
        assert torch.equal(*as_bytes)
        assert torch.equal(shared[rank], tensor(0, dtype))


def test_what_was_given_is_left_alone(groups):
    x = [torch.zeros(3), torch.ones(3)]
    on_ranks(lambda rank: groups[rank].broadcast(x[rank]))
    assert x[1].tolist() == [1, 1, 1]


def test_columns_of_a_larger_tensor(groups):
    found = on_ranks(lambda rank: groups[rank].gather(torch.arange(12).view(3, 4)[:, rank::2]))
    assert found[1].tolist() == [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 11]]]
    shared = on_ranks(lambda rank: groups[rank].broadcast(torch.arange(12).view(3, 4)[:, rank::2]))
    assert shared[1].tolist() == [[0, 2], [4, 6], [8, 10]]


def test_single_elements_of_a_larger_tensor(groups):
    found = on_ranks(lambda rank: groups[rank].gather(torch.arange(12).view(3, 4)[rank::3, 3::4]))
    assert [one.tolist() for one in found] == [[[[3]], [[7]]]] * 2
    shared = on_ranks(lambda rank: groups[rank].broadcast(torch.arange(12)[6 + rank :: 6]))
    assert [one.tolist() for one in shared] == [[6], [6]]


def test_nothing_is_no_copy(groups):
    assert groups[0].gather(torch.empty(0, 4)).shape == (2, 0, 4)
    assert groups[1].broadcast(torch.empty(3, 0)).shape == (3, 0)


def test_giving_up_on_a_cpu_is_left_to_the_sockets(groups):
    groups[0].abort()
    assert on_ranks(lambda rank: groups[rank].broadcast(torch.tensor(rank)).item()) == [0, 0]


def test_three_ranks():
    """What is gathered is more than a buffer."""
    groups = joined(3)

    def work(rank):
        gathered = groups[rank].gather(torch.full((300_000,), rank))
        return gathered[:, ::299_999].tolist(), groups[rank].broadcast(torch.tensor(rank))

    assert on_ranks(work, 3) == [([[0, 0], [1, 1], [2, 2]], 0)] * 3


def test_a_rank_that_has_ended_ends_the_collectives_of_the_others():
    first, last = joined(2)
    del last
    for collective in (first.gather, first.broadcast):
        with pytest.raises(RuntimeError, match="another rank has ended"):
            collective(torch.zeros(3))


def test_ranks_on_gpus_have_one_store_without_a_name():
    (own,), (other,) = meeting(2, torch.device("cuda"))
    first, last = store_in(own, 2), store_in(other, 2)
    first.set("key", "value")
    assert last.get("key") == b"value"
    assert os.fstat(own.fileno()).st_nlink == 0
    assert os.path.sameopenfile(own.fileno(), other.fileno())
