"""NCCL's group meets vLLM's trainers and ends when it fails; a stand-in for the library."""

from __future__ import annotations

import ctypes
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from sametoken.distributed import nccl
from sametoken.distributed.nccl import NcclGroup, new_unique_id, read_unique_id

UNIQUE_ID = bytes(range(128))


class Id(ctypes.Structure):
    """Pickles as vLLM's does."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class Library:
    """Notes collectives, and fills what is received with sevens."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.fails = 0

    def ncclGetUniqueId(self, at) -> int:
        ctypes.memmove(at, UNIQUE_ID, 128)
        return 0

    def ncclCommInitRank(self, comm, world_size, unique_id, rank) -> int:
        self.calls.append(("join", world_size, bytes(unique_id), rank))
        return 0

    def ncclAllReduce(self, sent, received, count, dtype, op, comm, stream) -> int:
        self.calls.append(("all_reduce", count.value, dtype, op))
        return 0

    def ncclBroadcast(self, sent, received, count, dtype, root, comm, stream) -> int:
        self.calls.append(("broadcast", count.value, dtype, root))
        ctypes.memset(received, 7, count.value)
        return self.fails

    def ncclCommGetAsyncError(self, comm, at) -> int:
        ctypes.cast(at, ctypes.POINTER(ctypes.c_int))[0] = self.fails
        return 0

    def ncclCommAbort(self, comm) -> int:
        self.calls.append(("abort",))
        return 0


class Stream:
    """A stream whose work is done, or never is."""

    cuda_stream, done = 0, True

    def wait_stream(self, other) -> None:
        """Nothing to wait for."""

    def record_event(self):
        return SimpleNamespace(query=lambda: self.done)


@pytest.fixture
def library(monkeypatch):
    found = Library()
    monkeypatch.setattr(nccl, "_library", lambda: found)
    monkeypatch.setattr(nccl, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return found


def test_the_handshake_and_a_broadcast(library):
    group = NcclGroup(new_unique_id(), 1, 2, 5.0)
    data = torch.zeros(9, dtype=torch.uint8)
    group.broadcast(data)
    assert data.tolist() == [7] * 9
    # ncclFloat32 is 7, ncclUint8 is 1.
    assert library.calls == [
        ("join", 2, UNIQUE_ID, 1),
        ("all_reduce", 1, 7, 0),
        ("broadcast", 9, 1, 0),
    ]


def test_a_trainer_that_is_too_slow_ends_the_group(library, monkeypatch):
    group = NcclGroup(UNIQUE_ID, 1, 2, 0.01)
    monkeypatch.setattr(Stream, "done", False)
    with pytest.raises(RuntimeError, match=r"no answer in 0\.01 s"):
        group.broadcast(torch.zeros(9, dtype=torch.uint8))
    assert library.calls[-1] == ("abort",)


def test_a_failure_of_another_rank_ends_the_group(library, monkeypatch):
    group = NcclGroup(UNIQUE_ID, 1, 2, 60.0)
    monkeypatch.setattr(Stream, "done", False)
    fails = library.ncclBroadcast

    def broadcast(*given) -> int:
        fails(*given)
        library.fails = 6
        return 0

    library.ncclBroadcast = broadcast
    with pytest.raises(RuntimeError, match="error 6"):
        group.broadcast(torch.zeros(9, dtype=torch.uint8))
    assert library.calls[-1] == ("abort",)


def met(pickled: bytes) -> bytes:
    """What is read from a store that a trainer opens as vLLM's do, waiting for its workers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]

    def trainer() -> torch.distributed.TCPStore:
        store = torch.distributed.TCPStore("127.0.0.1", port, 2, True, use_libuv=False)
        store.set("broadcast_from/0/0", pickled)
        return store

    with ThreadPoolExecutor() as pool:
        _kept = pool.submit(trainer)
        return read_unique_id("127.0.0.1", port, 2, 20.0)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_id_of_a_vllm_trainer(protocol):
    assert met(pickle.dumps(Id.from_buffer_copy(UNIQUE_ID), protocol)) == UNIQUE_ID


@pytest.mark.parametrize(
    "sent",
    [pickle.dumps(one) for one in ({}, b"short", [UNIQUE_ID, bytes(128)])] + [b"\xff\xff"],
)
def test_something_else_is_no_id(sent):
    with pytest.raises(RuntimeError, match="unique id"):
        nccl._id_in(sent)
