"""The GGUF container: metadata and tensor directory, with every length checked.

gguf's reader makes several numpy views per vocabulary entry, which takes seconds and hundreds of
megabytes, and does not bound a corrupt array length.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from sametoken.errors import CheckpointError
from sametoken.io.files import open_regular
from sametoken.models.load.files import unreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
#: Limits of a header: at least three times what a vocabulary of 260,000 tokens needs.
MAX_HEADER_BYTES = 2**27
MAX_VALUES = 2**22
#: Of keys, and of tensors: each costs some twenty times its bytes. Models have up to a thousand.
MAX_ENTRIES = 2**14

_UINT64 = struct.Struct("<Q")
_TYPES = frozenset(int(one) for one in GGML_QUANT_SIZES)
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "|b1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor directory.

    Attributes:
        shape: outermost dimension first, as in PyTorch.
        type: the ggml type of the data.
        offset: file offset of the data.
        row_bytes: bytes of one row, along the innermost dimension.
        path: the file that holds the data.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    row_bytes: int
    path: Path

    @property
    def num_rows(self) -> int:
        """Rows of the data; 1 for a vector."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header.

    Attributes:
        metadata: values as int, float, bool, str, or lists of them.
        tensors: by name; of a split model those of all files (``gguf_parts``).
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file and check that the file contains its data.

    Raises:
        CheckpointError: unreadable, not GGUF, of an unknown version, corrupt, or truncated.
    """
    try:
        with (
            open_regular(path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            if data[:4] != MAGIC:
                raise ValueError("it does not start with the GGUF magic")
            return _parsed(path, _Cursor(data, 4))
    except (OSError, ValueError) as error:
        fault = "is not a complete GGUF file"
        raise unreadable(path, fault, error, "download the file again") from error


class _Cursor:
    """Parses the header; a length beyond its end raises ValueError."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.position = position
        self.num_values = 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.position:
            raise ValueError(f"it ends inside its header, at byte {self.position}")
        self.position += size
        if self.position > MAX_HEADER_BYTES:
            raise ValueError(f"its header has more than {MAX_HEADER_BYTES} bytes")
        return self.data[self.position - size : self.position]

    def uint32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def uint64(self) -> int:
        return int(_UINT64.unpack(self.take(_UINT64.size))[0])

    def string(self) -> str:
        return self.take(self.uint64()).decode("utf-8", errors="replace")

    def strings(self, length: int) -> list[str]:
        """Strings of a vocabulary, in one loop: there are hundreds of thousands."""
        found, data, position = [], self.data, self.position
        last = min(len(data), MAX_HEADER_BYTES)
        for _ in range(length):
            start = position + _UINT64.size
            end = start + _UINT64.unpack_from(data, position)[0] if start <= last else last + 1
            if end > last:
                break
            found.append(data[start:end].decode("utf-8", errors="replace"))
            position = end
        self.position = position
        # What the loop did not reach raises here.
        return found + [self.string() for _ in range(length - len(found))]

    def value(self, value_type: GGUFValueType) -> Any:
        if value_type == GGUFValueType.STRING:
            return self.string()
        if value_type == GGUFValueType.ARRAY:
            element_type, length = GGUFValueType(self.uint32()), self.uint64()
            return self.array(element_type, length)
        return self.array(value_type, 1)[0]

    def count(self, length: int) -> None:
        """Count ``length`` more values."""
        self.num_values += length
        if self.num_values > MAX_VALUES:
            raise ValueError(f"its header has more than {MAX_VALUES} values")

    def array(self, element_type: GGUFValueType, length: int) -> list[Any]:
        if element_type == GGUFValueType.ARRAY:
            raise ValueError("it holds an array of arrays")
        self.count(length)
        if element_type == GGUFValueType.STRING:
            return self.strings(length)
        dtype = np.dtype(_SCALARS[element_type])
        return list(np.frombuffer(self.take(dtype.itemsize * length), dtype).tolist())


def _parsed(path: Path, cursor: _Cursor) -> GGUFFile:
    version = cursor.uint32()
    if version not in VERSIONS:
        raise ValueError(f"version {version} is not one of {VERSIONS}, little endian")
    num_tensors, num_keys = cursor.uint64(), cursor.uint64()
    for count, what in ((num_tensors, "tensors"), (num_keys, "keys")):
        if count > MAX_ENTRIES:
            raise ValueError(f"its header has more than {MAX_ENTRIES} {what}")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(GGUFValueType(cursor.uint32()))
    tensors = [_tensor(path, cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors = [replace(tensor, offset=start + tensor.offset) for tensor in tensors]
    end = start
    for tensor in sorted(tensors, key=lambda one: one.offset):
        # Of tensors that share their data, a small file could hold any number.
        if tensor.offset < end:
            raise ValueError(f"the data of tensor {tensor.name} begins within another's")
        end = tensor.offset + tensor.num_rows * tensor.row_bytes
        if end > len(cursor.data):
            raise ValueError(f"it ends before the data of tensor {tensor.name}")
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) < len(tensors):
        raise ValueError("two of its tensors have one name")
    return GGUFFile(path, metadata, by_name)


def _tensor(path: Path, cursor: _Cursor) -> GGUFTensor:
    """A directory entry; its offset is still relative to the data section."""
    name, num_dimensions = cursor.string(), cursor.uint32()
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
    shape = tuple(cursor.uint64() for _ in range(num_dimensions))[::-1]
    if not all(shape):
        raise ValueError(f"tensor {name} has no elements")
    type_id = cursor.uint32()
    if type_id not in _TYPES:
        # Q4_0_4_4 and its kin are of the past, others are new.
        raise CheckpointError(
            f"tensor {name} of {path} has ggml type {type_id}, which is not known",
            "use a file of another quantization, such as Q8_0 or Q4_K",
        )
    tensor_type = GGMLQuantizationType(type_id)
    block_elements, block_bytes = GGML_QUANT_SIZES[tensor_type]
    if shape[-1] % block_elements:
        raise ValueError(f"rows of tensor {name} are no multiple of {block_elements} elements")
    row_bytes = shape[-1] // block_elements * block_bytes
    return GGUFTensor(name, shape, tensor_type, cursor.uint64(), row_bytes, path)
