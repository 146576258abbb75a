"""A tensor that is shared is found where it is, by its device and its place in memory."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch

from sametoken.distributed import shared_memory
from sametoken.distributed.shared_memory import device_name, open_shared, share
from sametoken.errors import WeightUpdateError
from sametoken.types.weight_updates import MemoryHandle

CPU = torch.device("cpu")
HOST = device_name(CPU)


def handle_of(place: tuple) -> MemoryHandle:
    _, shape, strides, offset, _, dtype, _, memory, num_bytes, first, _, *users = place
    name = str(dtype).removeprefix("torch.")
    return MemoryHandle(
        name, tuple(shape), tuple(strides), offset, memory, num_bytes, first, *users
    )


def shared(*tensors: torch.Tensor) -> tuple[object, list[dict[str, MemoryHandle]]]:
    kept, found = share(tensors)
    return kept, [{name: handle_of(place) for name, place in one.items()} for one in found]


def test_both_sides_have_one_memory():
    floats = torch.arange(12.0).view(3, 4)
    dtypes = (torch.int8, torch.float64, torch.bfloat16, torch.float8_e4m3fn)
    given = [floats.to(dtype).t() for dtype in dtypes] + [torch.tensor(7.0), floats[:0]]
    (_, memory), handles = shared(*given)
    found = [open_shared(one, CPU) for one in handles]
    for mine, theirs in zip(found, given, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine.double(), theirs.double())
    memory.bytes.zero_()
    assert not any(one.double().any() for one in found)
    # The trainer's own tensors are its own still.
    assert all(one.double().any() for one in given[:5])


def test_a_part_of_a_storage_of_any_strides():
    _kept, [handles] = shared(torch.arange(20.0))
    whole = handles[HOST]
    part = replace(whole, shape=(3, 2), strides=(2, 6), offset=5)
    found = open_shared({HOST: part}, CPU)
    assert torch.equal(found, torch.arange(20.0).as_strided((3, 2), (2, 6), 5))
    for beyond in (replace(part, offset=100), replace(part, num_bytes=10**6)):
        with pytest.raises(WeightUpdateError, match="cannot be opened"):
            open_shared({HOST: beyond}, CPU)


def test_what_is_gone_or_elsewhere(tmp_path):
    kept, [handles] = shared(torch.zeros(2))
    elsewhere = {"GPU-1": handles[HOST], "GPU-2": handles[HOST]}
    with pytest.raises(WeightUpdateError, match=r"on GPU-1, GPU-2, the engine on host-"):
        open_shared(elsewhere, CPU)
    with (tmp_path / "private").open("w+b") as file:
        file.write(bytes(64))
        for path in (file.name, f"/proc/{os.getpid()}/fd/{file.fileno()}"):
            other = replace(handles[HOST], memory=path.encode())
            with pytest.raises(WeightUpdateError, match="path"):
                open_shared({HOST: other}, CPU)
    del kept
    with pytest.raises(WeightUpdateError, match="cannot be opened"):
        open_shared(handles, CPU)


def test_a_handle_of_a_gpu_goes_to_torch_as_it_came(monkeypatch):
    """With this process's number of the GPU, which may differ from the trainer's."""
    told: list = []
    monkeypatch.setattr(shared_memory, "device_name", lambda device: "GPU-1")
    monkeypatch.setattr(shared_memory, "rebuild_cuda_tensor", lambda *given: told.append(given))
    handle = MemoryHandle("bfloat16", (2, 3), (3, 1), 4, b"m" * 66, 64, 512, b"/c", 7, b"e", True)
    open_shared({"GPU-1": handle}, torch.device("cuda", 1))
    place = (torch.Tensor, (2, 3), (3, 1), 4, torch.storage.TypedStorage, torch.bfloat16)
    assert told == [(*place, 1, b"m" * 66, 64, 512, False, b"/c", 7, b"e", True)]


def test_a_host_has_one_name():
    assert re.fullmatch(r"host-[0-9a-f-]{36}", device_name(CPU))
    assert device_name(CPU) == device_name(CPU)
