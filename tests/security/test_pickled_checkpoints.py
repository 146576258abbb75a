"""Pickled files that lie: nothing runs, nothing large is made, and one typed error names why."""

from __future__ import annotations

import io
import os
import pickle
import resource
import time
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.examples import FIXED
from sametoken.errors import CheckpointError, SametokenError, UnsupportedError
from sametoken.models.load.pickled import MAX_PICKLE_BYTES, load_tensors

MARKER = "ran"
SECONDS, MEGABYTES = 5.0, 300


class Runs:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def archive(path, pickled: bytes, compression=zipfile.ZIP_STORED, **records: bytes):
    """A file as torch.save makes it, around any pickle."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", b"little")
        file.writestr("archive/version", b"3\n")
        for name, data in records.items():
            file.writestr(f"archive/data/{name.removeprefix('n')}", data)
    return path


def refused(path, error=SametokenError, match=None):
    """The file is refused quickly, and without much memory."""
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(error, match=match) as caught:
        load_tensors(path)
    assert time.monotonic() - began < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MEGABYTES * 1000
    assert caught.value.remedy


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    "value",
    [
        Runs(os.system, f"touch {MARKER}"),
        {"w": Runs(os.mkdir, MARKER)},
        {"w": Runs(bytearray, 10**12)},
        {"w": Runs(torch.zeros, 10**9)},
        {"w": Runs(getattr, MARKER, "upper")},
        Runs(eval, f"open({MARKER!r}, 'w')"),
    ],
    ids=["system", "mkdir", "bytearray", "zeros", "getattr", "eval"],
)
def test_nothing_runs(tmp_path, monkeypatch, value, protocol):
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "pytorch_model.bin", pickle.dumps(value, protocol))
    refused(path, UnsupportedError, "pytorch_model.bin holds")
    assert not (tmp_path / MARKER).exists()


def test_a_bomb_is_not_unpacked(tmp_path):
    path = archive(tmp_path / "a.bin", b"\0" * 2**26, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2**18
    refused(path, UnsupportedError, "compressed records")
    refused(archive(tmp_path / "b.bin", b"N" * (MAX_PICKLE_BYTES + 1)), UnsupportedError, "at most")


def test_a_pickle_of_many_objects_is_not_built(tmp_path):
    refused(archive(tmp_path / "a.bin", b"\x80\x02" + b"]" * 2**20 + b"."), UnsupportedError)
    refused(archive(tmp_path / "b.bin", b"\x80\x02" + b"}" * 2**18 + b")."), SametokenError)


def tensor_pickle(sizes, strides, count, key="0"):
    """A dict of one tensor over a storage of ``count`` floats that the file calls ``key``."""

    class Storage(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, key, "cpu", count) if value is here else None

    here = object()
    stream = io.BytesIO()
    tensor = Runs(torch._utils._rebuild_tensor_v2, here, 0, sizes, strides, False, None)
    Storage(stream, 2).dump({"w": tensor})
    return stream.getvalue()


@pytest.mark.parametrize(
    ("sizes", "strides", "count"),
    [
        ((10**6,), (1,), 10**6),
        ((10**12,), (1,), 4),
        ((4,), (10**12,), 4),
        ((-4,), (1,), 4),
        ((4,), (-1,), 4),
        ((4,), (1,), 10**15),
        ((4,), (1,), -4),
        ((2**62, 2**62), (0, 0), 4),
        ((10**6, 10**6), (0, 0), 4),
    ],
)
def test_tensors_beyond_their_bytes(tmp_path, sizes, strides, count):
    data = tensor_pickle(sizes, strides, count)
    refused(archive(tmp_path / "pytorch_model.bin", data, n0=b"\0" * 16), CheckpointError)


def test_the_forged_file_would_load_if_it_were_honest(tmp_path):
    path = archive(tmp_path / "x.bin", tensor_pickle((2, 2), (2, 1), 4), n0=b"\0" * 16)
    assert torch.equal(load_tensors(path)["w"], torch.zeros(2, 2))
    missing = tensor_pickle((2, 2), (2, 1), 4, key="7")
    refused(archive(tmp_path / "y.bin", missing, n0=b"\0" * 16), CheckpointError)


@pytest.mark.parametrize("content", [b"", b"\x80\x02}.", b"PK\x05\x06" + b"\0" * 18, b"\0" * 4096])
def test_what_is_no_archive(tmp_path, content):
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    refused(tmp_path / "pytorch_model.bin")


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pytorch_model.bin")
    refused(tmp_path / "pytorch_model.bin", CheckpointError)
    refused(tmp_path / "absent.bin", CheckpointError)
    refused(tmp_path, CheckpointError)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    path = tmp_path_factory.mktemp("honest") / "pytorch_model.bin"
    torch.save({"a": torch.arange(6.0), "b": torch.ones(3, 2)}, path)
    return path.read_bytes()


@settings(FIXED, max_examples=60)
@given(data=st.data())
def test_damage_is_refused_or_harmless(tmp_path, honest, data):
    damaged = bytearray(honest[: data.draw(st.integers(0, len(honest)))] or honest)
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(damaged)
    try:
        tensors = load_tensors(path)
    except SametokenError:
        return
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
