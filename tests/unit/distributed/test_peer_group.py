"""How ranks agree on writing into each other's memory; CUDA's driver is played."""

from __future__ import annotations

import ctypes
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sametoken.distributed import peer_group as module
from sametoken.distributed.peer_group import PeerGroup, peer_group

REFUSED = 1
_zeros = torch.zeros


class Driver:
    """Of two GPUs with memory on the host.

    Args:
        refuses: a function that fails on the rank of that number.
    """

    def __init__(self, refuses: str = "", on: int = 0) -> None:
        self._refuses, self._on, self._rank = refuses, on, threading.local()
        self.held: list[int] = []
        self._memory: list[ctypes.Array] = []

    def be(self, rank: int) -> None:
        self._rank.value = rank

    def refuses(self, function: str) -> bool:
        return (self._refuses, self._on) == (function, self._rank.value)

    def cuDeviceGetP2PAttribute(self, found, attribute, device, other) -> int:
        assert {device, other} == {0, 1}
        found._obj.value = not self.refuses("cuDeviceGetP2PAttribute")
        return 0

    def cuMemAlloc_v2(self, at, nbytes) -> int:
        self._memory.append(ctypes.create_string_buffer(b"\x7f" * nbytes.value, nbytes.value))
        at._obj.value = ctypes.addressof(self._memory[-1])
        self.held.append(at._obj.value)
        return 0

    def cuMemsetD8_v2(self, at, value, nbytes) -> int:
        ctypes.memset(at.value, value.value, nbytes.value)
        return 0

    def cuIpcGetMemHandle(self, handle, at) -> int:
        ctypes.memmove(handle, ctypes.byref(at), 8)
        return REFUSED if self.refuses("cuIpcGetMemHandle") else 0

    def cuIpcOpenMemHandle_v2(self, at, handle, flags) -> int:
        if self.refuses("cuIpcOpenMemHandle_v2"):
            return REFUSED
        ctypes.memmove(at, ctypes.byref(handle), 8)
        self.held.append(at._obj.value)
        return 0

    def cuMemFree_v2(self, at) -> int:
        self.held.remove(at.value)
        return 0

    cuIpcCloseMemHandle = cuMemFree_v2


def met(monkeypatch, tmp_path, driver: Driver) -> list[PeerGroup | None]:
    """The groups of two ranks, each on a thread."""

    def exchanges(group: PeerGroup) -> bool:
        # The interpreter of kernels serves one thread: tests/unit/ops/model/test_peers.py.
        return not driver.refuses("exchanges")

    cuda = SimpleNamespace(
        current_device=lambda: 0,
        device=nullcontext,
        mem_get_info=lambda device: (0, 0),
        synchronize=lambda: None,
    )
    monkeypatch.setattr(module.torch, "cuda", cuda)
    monkeypatch.setattr(module.torch, "zeros", lambda size, dtype, **where: _zeros(size))
    monkeypatch.setattr(module, "_driver", lambda: driver)
    monkeypatch.setattr(module, "_exchanges_rightly", exchanges)

    def meet(rank: int) -> PeerGroup | None:
        driver.be(rank)
        return peer_group(rank, 2, torch.distributed.FileStore(str(tmp_path / "store"), 2))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(meet, range(2), timeout=30))


def test_ranks_that_reach_each_other_write_into_buffers_that_all_have_open(monkeypatch, tmp_path):
    driver = Driver()
    first, second = met(monkeypatch, tmp_path, driver)
    assert (first.rank, first.size, second.rank) == (0, 2, 1)
    assert first._peers.buffers == second._peers.buffers
    for at in first._peers.buffers:
        assert ctypes.string_at(at, 1000) == bytes(1000)
    assert len(driver.held) == 4
    first.abort()
    assert first._peers.stopped.all()
    assert not second._peers.stopped.any()
    del first, second
    gc.collect()
    assert not driver.held


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "function",
    ["cuDeviceGetP2PAttribute", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "exchanges"],
)
def test_no_rank_does_where_one_cannot(monkeypatch, tmp_path, function, rank):
    driver = Driver(function, rank)
    assert met(monkeypatch, tmp_path, driver) == [None, None]
    gc.collect()
    assert not driver.held
