"""The GGUF header parser against gguf's own reader, and against damaged files."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.examples import FIXED
from helpers.gguf_files import written
from sametoken.errors import CheckpointError
from sametoken.models.load.gguf_file import read_gguf


def write(path):
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_int64("a.negative", -(2**40))
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "größer")
    writer.add_array("a.tokens", ["x", "", "ü"])
    writer.add_array("a.scores", [0.5, -1.0])
    writer.add_array("a.flags", [True, False])
    generator = np.random.default_rng(0)
    writer.add_tensor("vector", generator.standard_normal(5, np.float32))
    matrix = generator.standard_normal((6, 64), np.float32)
    writer.add_tensor("matrix", matrix)
    q8 = GGMLQuantizationType.Q8_0
    writer.add_tensor("quantized", quantize(matrix, q8), raw_dtype=q8)
    return written(writer, path)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf")


def test_agrees_with_the_reader_of_the_gguf_package(path):
    file, reader = read_gguf(path), GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items()}
    theirs = {key: value for key, value in theirs.items() if not key.startswith("GGUF.")}
    assert file.metadata == theirs
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.type, ours.offset) == (tensor.tensor_type, tensor.data_offset)
        assert ours.num_rows * ours.row_bytes == tensor.n_bytes


def test_every_truncation_is_refused(path, tmp_path):
    whole = path.read_bytes()
    last = max(t.offset + t.num_rows * t.row_bytes for t in read_gguf(path).tensors.values())
    for size in [*range(0, last, 37), last - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf is not a complete GGUF file"):
            read_gguf(tmp_path / "cut.gguf")


@settings(FIXED, max_examples=150)
@given(damage=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_damage_never_raises_anything_else(path, tmp_path, damage):
    data = bytearray(path.read_bytes())
    for place, value in damage:
        data[int(place * 600)] = value
    (tmp_path / "damaged.gguf").write_bytes(data)
    with contextlib.suppress(CheckpointError):
        read_gguf(tmp_path / "damaged.gguf")


def header(*values, version=3, tensors=0):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(values)) + b"".join(values)


def entry(value_type, payload):
    return struct.pack("<Q1sI", 1, b"k", value_type) + payload


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(60), "magic"),
        (header(version=1), "version 1"),
        (header(version=3 << 24), "little endian"),
        (header(entry(9, struct.pack("<IQ", 4, 2**60))), "more than 4194304 values"),
        (header(entry(9, struct.pack("<IQ", 8, 2**60))), "more than 4194304 values"),
        (header(entry(8, struct.pack("<Q", 2**63))), "ends inside its header"),
        (header(entry(9, struct.pack("<IQ", 9, 1))), "array of arrays"),
        (header(entry(99, b"")), "99"),
        (header(tensors=2**14 + 1), "more than 16384 tensors"),
        (header(*[entry(0, b"0")] * (2**14 + 1)), "more than 16384 keys"),
        (header(tensors=9), "ends inside its header"),
    ],
)
def test_impossible_headers(tmp_path, data, message):
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(tmp_path / "bad.gguf")


@pytest.mark.parametrize("type_id", [4, 32, 200])
def test_types_of_the_past_and_of_the_future_are_named(tmp_path, type_id):
    """Q4_0_4_8 is 32; another download would be of the same type."""
    tensor = struct.pack("<Q1sIQIQ", 1, b"t", 1, 32, type_id, 0)
    (tmp_path / "old.gguf").write_bytes(header(tensors=1) + tensor + bytes(64))
    with pytest.raises(CheckpointError, match=rf"old\.gguf has ggml type {type_id}") as caught:
        read_gguf(tmp_path / "old.gguf")
    assert "another quantization" in caught.value.remedy


def test_tensors_that_share_their_data_are_refused(tmp_path):
    """llama.cpp refuses them too: offsets follow each other."""

    def file(second_offset: int) -> bytes:
        places = ((b"a", 0), (b"b", second_offset))
        tensors = (struct.pack("<Q1sIQIQ", 1, name, 1, 8, 0, at) for name, at in places)
        return header(tensors=2) + b"".join(tensors) + bytes(128)

    (tmp_path / "apart.gguf").write_bytes(file(32))
    assert read_gguf(tmp_path / "apart.gguf").tensors.keys() == {"a", "b"}
    (tmp_path / "shared.gguf").write_bytes(file(0))
    with pytest.raises(CheckpointError, match="of tensor b begins within another's"):
        read_gguf(tmp_path / "shared.gguf")


def test_a_directory_is_not_a_file(tmp_path):
    with pytest.raises(CheckpointError, match="not a complete GGUF file"):
        read_gguf(tmp_path)
