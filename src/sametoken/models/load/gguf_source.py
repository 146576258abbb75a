"""Tensors of a GGUF file under Hugging Face names, in Hugging Face order."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.io.files import open_regular
from sametoken.models.load.gguf_architecture import EACH, Architecture
from sametoken.models.load.gguf_file import GGUFFile, GGUFTensor
from sametoken.models.load.settings import MAX_EXPERTS
from sametoken.models.load.sources import rows_per_chunk

AGAIN = "download or convert the file again"
#: Elements dequantized at once: few calls, and temporaries that stay in a core's cache.
_AT_ONCE = 1 << 17
_INTERLEAVED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
#: Tables of rope, which are settings: no model reads them.
ROPE_FREQUENCIES = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_ROPE_TABLES = (ROPE_FREQUENCIES, LONG_FACTORS, SHORT_FACTORS)
_OF_NORMS = "norm.weight"
#: Of matrices and biases of experts: three times those of the largest model.
_MAX_OF_EXPERTS = 1 << 18


def tensors_by_name(file: GGUFFile, architecture: Architecture) -> dict[str, GGUFTensor]:
    """The tensors by their Hugging Face names, those of experts one by one.

    Raises:
        CheckpointError: a stack of experts is none, or of more than any model has.
    """
    found: dict[str, GGUFTensor] = {}
    for own, tensor in file.tensors.items():
        name = architecture.hugging_face_name(own)
        if EACH in name:
            experts = enumerate(_experts(file, tensor, most=_MAX_OF_EXPERTS - len(found)))
            found |= {name.replace(EACH, str(index)): one for index, one in experts}
        elif name.endswith(architecture.of_one_row) and len(tensor.shape) == 1:
            found[name] = replace(tensor, shape=(1, *tensor.shape))
        else:
            found[name] = tensor
    return found


def _experts(file: GGUFFile, stack: GGUFTensor, most: int) -> list[GGUFTensor]:
    """Each expert's part of a stack, under its name."""
    count, *shape = stack.shape
    if not shape or count > min(MAX_EXPERTS, most):
        raise CheckpointError(
            f"tensor {stack.name} of {file.path} has shape {list(stack.shape)}, which is no stack "
            f"of up to {MAX_EXPERTS} experts",
            AGAIN,
        )
    size = stack.num_rows // count * stack.row_bytes
    offsets = range(stack.offset, stack.offset + count * size, size)
    return [replace(stack, shape=tuple(shape), offset=offset) for offset in offsets]


class GGUFSource:
    """Tensors of a GGUF file under Hugging Face names.

    Args:
        file: the parsed header.
        architecture: the file's.
        head_dim: elements of a head, whose rows may be interleaved.

    Raises:
        CheckpointError: a stack of experts is impossible.
    """

    def __init__(self, file: GGUFFile, architecture: Architecture, head_dim: int) -> None:
        self.location = str(file.path)
        self._path = file.path
        self._tensors = tensors_by_name(file, architecture)
        self._names = dict.fromkeys(name for name in self._tensors if name not in _ROPE_TABLES)
        self._architecture, self._head_dim = architecture, head_dim

    def names(self) -> Collection[str]:
        """Hugging Face names; tensors without one keep the file's names."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in PyTorch's order."""
        return self._tensors[name].shape

    def chunks(self, name: str) -> Iterator[Tensor]:
        """fp32 rows in Hugging Face order."""
        tensor = self._tensors[name]
        added = self._architecture.added_to_norms if name.endswith(_OF_NORMS) else 0.0
        for raw in self._rows(tensor):
            values = _dequantized(raw, tensor, self.location)
            values = values.flatten() if len(tensor.shape) == 1 else values
            values = self._in_order(values - added if added else values, tensor)
            yield (
                values.unflatten(0, (-1, *tensor.shape[1:-1])) if len(tensor.shape) > 2 else values
            )

    def stored_dtype(self, name: str) -> torch.dtype:
        """Bytes of blocks."""
        return torch.uint8

    def stored_chunks(self, name: str) -> Iterator[Tensor]:
        """Rows of a matrix in Hugging Face order, as bytes."""
        tensor = self._tensors[name]
        for raw in self._rows(tensor):
            yield self._in_order(torch.from_numpy(raw), tensor)

    def _in_order(self, rows: Tensor, tensor: GGUFTensor) -> Tensor:
        head_dim = self._head_dim_of(tensor)
        return rows if head_dim is None else _half_split(rows, head_dim)

    def _head_dim_of(self, tensor: GGUFTensor) -> int | None:
        """The head size of a tensor whose rows are interleaved."""
        is_interleaved = self._architecture.interleaved and _INTERLEAVED.fullmatch(tensor.name)
        return self._head_dim if is_interleaved else None

    def _rows(self, tensor: GGUFTensor) -> Iterator[np.ndarray]:
        """Bytes of whole rows, heads or matrices; read, as mapped pages count as memory."""
        together = math.prod(tensor.shape[1:-1])
        step = rows_per_chunk(tensor.shape[-1], self._head_dim_of(tensor) or together)
        with open_regular(self._path) as file:
            file.seek(tensor.offset)
            for first in range(0, tensor.num_rows, step):
                rows = min(step, tensor.num_rows - first)
                raw = np.fromfile(file, np.uint8, rows * tensor.row_bytes)
                if raw.size < rows * tensor.row_bytes:
                    raise CheckpointError(
                        f"{self.location} ends inside tensor {tensor.name}", AGAIN
                    )
                yield raw.reshape(rows, tensor.row_bytes)


def _dequantized(raw: np.ndarray, tensor: GGUFTensor, location: str) -> Tensor:
    try:
        with np.errstate(all="ignore"):
            groups = np.array_split(raw, max(len(raw) * tensor.shape[-1] // _AT_ONCE, 1))
            # gguf takes 16 rows at once, however short they are: here it sees one.
            values = [dequantize(group.reshape(1, -1), tensor.type) for group in groups]
            return torch.from_numpy(np.concatenate(values, axis=1).reshape(len(raw), -1))
    except NotImplementedError as error:
        raise UnsupportedError(
            f"tensor {tensor.name} of {location} has type {tensor.type.name}",
            "use a file of another quantization, such as Q8_0 or Q4_K",
        ) from error


def _half_split(rows: Tensor, head_dim: int) -> Tensor:
    """De-interleave [n * head_dim, ...] rows: per head, rows 0 2 4 .., then 1 3 5 .."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
