"""Where tensors come from: what ``WeightReader`` asks of files, and of tensors in memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from sametoken.errors import CheckpointError

CHUNK_ELEMENTS = 1 << 20
#: Dtypes of unquantized weights.
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class TensorSource(Protocol):
    """The tensors of one checkpoint under their Hugging Face names.

    Attributes:
        location: the file or directory, for messages.
    """

    location: str

    def names(self) -> Collection[str]:
        """Every tensor's name; tensors without a Hugging Face name keep the file's."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an existing tensor."""
        ...

    def chunks(self, name: str) -> Iterator[Tensor]:
        """The tensor in order, in chunks of whole rows, of any floating dtype, on any device.

        Raises:
            CheckpointError: the data cannot be read.
            UnsupportedError: the data is not of a floating dtype.
        """
        ...

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype of an existing tensor; errors as in ``chunks``."""
        ...

    def stored_chunks(self, name: str) -> Iterator[Tensor]:
        """As ``chunks``, of any dtype."""
        ...


class TensorsByName:
    """What sources over dense tensors that are in memory, or mapped, share."""

    def __init__(self, location: str, tensors: Mapping[str, Tensor]) -> None:
        self.location = location
        self._tensors = tensors

    def names(self) -> Collection[str]:
        """Every tensor's name."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that exists."""
        return tuple(self._tensors[name].shape)

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor that exists."""
        return self._tensors[name].dtype

    def stored_chunks(self, name: str) -> Iterator[Tensor]:
        """Views of the tensor's rows; a scalar is one row."""
        tensor = self._tensors[name]
        rows = tensor if tensor.dim() else tensor[None]
        yield from rows.split(rows_per_chunk(math.prod(rows.shape[1:])))


def rows_per_chunk(row_elements: int, multiple_of: int = 1) -> int:
    """Number of rows of ``row_elements``, perhaps 0, to read at once: a multiple of another."""
    return max(CHUNK_ELEMENTS // (max(row_elements, 1) * multiple_of), 1) * multiple_of


def require_finite(tensor: Tensor, name: str, source: TensorSource) -> None:
    """Refuse a tensor that was read if not all of its values are finite.

    Raises:
        CheckpointError: one is NaN or infinite.
    """
    if not _is_finite(tensor):
        raise CheckpointError(
            f"tensor {name} of {source.location} holds NaN or infinite values"
            f" in {dtype_name(tensor.dtype)}",
            "download or convert the checkpoint again",
        )


def dtype_name(dtype: torch.dtype) -> str:
    """For messages: without the library's name."""
    return str(dtype).removeprefix("torch.")


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype == torch.float8_e4m3fn:
        # NaN is the only such number, with either sign.
        return not (tensor.view(torch.uint8).bitwise_or(0x80) == 0xFF).any()
    low, high = torch.aminmax(tensor.detach())
    return math.isfinite(low) and math.isfinite(high)
