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
from sametoken.models.base import ModelConfig
from sametoken.models.load.gguf_architecture import EACH, GATE_UP, Architecture, Turns
from sametoken.models.load.gguf_blocks import Blocks
from sametoken.models.load.gguf_file import GGUFFile, GGUFTensor
from sametoken.models.load.settings import MAX_EXPERTS, MAX_LAYERS, Settings
from sametoken.models.load.sources import rows_per_chunk

AGAIN = "download or convert the file again"
#: Elements dequantized at once: few calls, and temporaries that stay in a core's cache.
_AT_ONCE = 1 << 17
_INTERLEAVED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
#: Tables of rope, which are settings: no model reads them.
ROPE_FREQUENCIES = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TABLES = (ROPE_FREQUENCIES, LONG_FACTORS, SHORT_FACTORS)
_OF_NORMS, _OF_DECAYS, _OF_LINEAR = "norm.weight", ".ssm_a", ".linear_attn."
#: That may have a second axis in a file.
_VECTORS = (_OF_DECAYS, ".ssm_d", ".ssm_norm.weight")
#: Twice the error of a logarithm of an exponential in fp32 with an error of one unit.
_OF_ROUNDING = 2**-22
#: Of matrices and biases of experts: three times those of the largest model.
_MAX_OF_EXPERTS = 1 << 18


def _tensors_by_name(
    file: GGUFFile, architecture: Architecture, layers: range
) -> dict[str, GGUFTensor]:
    """The tensors by their Hugging Face names, those of experts one by one.

    ``layers`` are those past the model's own.
    """
    found: dict[str, GGUFTensor] = {}
    for own, tensor in file.tensors.items():
        name = architecture.hugging_face_name(own, layers)
        if name is None:
            continue
        if EACH in name:
            experts = _experts(file, tensor, most=_MAX_OF_EXPERTS - len(found))
            for index, one in enumerate(experts):
                found |= _by_projection(name.replace(EACH, str(index)), one, GATE_UP in name)
        elif own.endswith(_VECTORS):
            size = tensor.num_rows * tensor.row_bytes
            found[name] = replace(tensor, shape=(math.prod(tensor.shape),), row_bytes=size)
        else:
            shape = list(tensor.shape)
            for ending, axis in architecture.missing_axes.items():
                if name.endswith(ending) and len(shape) == axis + 1:
                    shape.insert(axis, 1)
            found[name] = replace(tensor, shape=tuple(shape))
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


def _by_projection(name: str, expert: GGUFTensor, are_two: bool) -> dict[str, GGUFTensor]:
    """An expert's matrix, or its halves, gate and up."""
    rows = expert.shape[0] // 2
    if not are_two or not rows:
        return {name: expert}
    gate = replace(expert, shape=(rows, *expert.shape[1:]))
    up = replace(gate, offset=gate.offset + gate.num_rows * gate.row_bytes)
    return {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}


class GGUFSource:
    """Tensors of a GGUF file under Hugging Face names; settings are by keys of the architecture.

    Raises:
        CheckpointError: a stack of experts is impossible.
    """

    def __init__(
        self, file: GGUFFile, architecture: Architecture, settings: Settings, config: ModelConfig
    ) -> None:
        self.location = str(file.path)
        num_layers = settings.integer("block_count", most=MAX_LAYERS)
        #: Those of a module for more tokens, past the model's own.
        self._module_layers = range(config.num_layers, num_layers)
        self._tensors = _tensors_by_name(file, architecture, self._module_layers)
        self._names = dict.fromkeys(name for name in self._tensors if name not in ROPE_TABLES)
        self._architecture, self._head_dim = architecture, config.head_dim
        self._turns = architecture.turns(settings)

    def names(self) -> Collection[str]:
        """Hugging Face names; tensors without one keep the file's names."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in PyTorch's order."""
        return self._tensors[name].shape

    def chunks(self, name: str) -> Iterator[Tensor]:
        """fp32 rows in Hugging Face order."""
        tensor, columns = self._tensors[name], self._columns(name)
        for raw in self._rows(name):
            values = dequantized(raw, tensor, self.location).view(-1, *tensor.shape[1:])
            values = self._in_order(values, tensor)
            yield self._as_stored(tensor, values if columns is None else values[..., columns])

    def stored_dtype(self, name: str) -> torch.dtype:
        """Bytes of blocks."""
        return torch.uint8

    def stored_chunks(self, name: str) -> Iterator[Tensor]:
        """Rows of a matrix in Hugging Face order, as bytes."""
        for raw in self._rows(name):
            yield self._in_order(torch.from_numpy(raw), self._tensors[name])

    def blocks(self, *, of_module: bool) -> Blocks:
        """The formats of matrices that stay in their bits: the model's, or its module's."""
        types = {}
        for name, tensor in self._tensors.items():
            turns, match = self._turns_of(name), _LAYER.match(tensor.name)
            is_of_module = match is not None and int(match[1]) in self._module_layers
            # A block may hold columns of several heads.
            if is_of_module == of_module and not (turns and turns.in_columns):
                types[name] = tensor.type
        return Blocks(types)

    def _as_stored(self, tensor: GGUFTensor, values: Tensor) -> Tensor:
        """Values as checkpoints of transformers have them."""
        name, architecture = tensor.name, self._architecture
        if name.endswith(_OF_DECAYS):
            return logarithms(-values)
        is_moved = name.endswith(_OF_NORMS) and not name.endswith(architecture.plain_norms)
        added = architecture.added_to_norms if is_moved else 0.0
        return values - added if added else values

    def _in_order(self, rows: Tensor, tensor: GGUFTensor) -> Tensor:
        head_dim = self._head_dim_of(tensor)
        return rows if head_dim is None else _half_split(rows, head_dim)

    def _head_dim_of(self, tensor: GGUFTensor) -> int | None:
        """The head size of a tensor whose rows are interleaved."""
        is_interleaved = self._architecture.interleaved and _INTERLEAVED.fullmatch(tensor.name)
        return self._head_dim if is_interleaved else None

    def _turns_of(self, name: str) -> Turns | None:
        return self._turns.get(name.rpartition(_OF_LINEAR)[2])

    def _columns(self, name: str) -> Tensor | None:
        """Where the columns of a matrix or elements of a vector are; None: in their order."""
        turns = self._turns_of(name)
        if turns is None or not (turns.in_columns or len(self._tensors[name].shape) == 1):
            return None
        return torch.cat([torch.arange(first, first + count) for first, count in turns.runs()])

    def _runs(self, name: str) -> list[tuple[int, int]]:
        """First row in the file, and number of rows, of each run in Hugging Face order."""
        turns = self._turns_of(name)
        if turns is None or self._columns(name) is not None:
            return [(0, self._tensors[name].num_rows)]
        return turns.runs()

    def _rows(self, name: str) -> Iterator[np.ndarray]:
        """Bytes of whole rows, heads or matrices; read, as mapped pages count as memory."""
        tensor = self._tensors[name]
        together = math.prod(tensor.shape[1:-1])
        step = rows_per_chunk(tensor.shape[-1], self._head_dim_of(tensor) or together)
        with open_regular(tensor.path) as file:
            for start, count in self._runs(name):
                file.seek(tensor.offset + start * tensor.row_bytes)
                for first in range(0, count, step):
                    rows = min(step, count - first)
                    raw = np.fromfile(file, np.uint8, rows * tensor.row_bytes)
                    if raw.size < rows * tensor.row_bytes:
                        raise CheckpointError(
                            f"{tensor.path} ends inside tensor {tensor.name}", AGAIN
                        )
                    yield raw.reshape(rows, tensor.row_bytes)


def logarithms(decays: Tensor) -> Tensor:
    """fp32 ``A_log`` of which a file has the exponentials in fp32.

    Where all that the checkpoint had are values of bf16, as published ones are, 0 and those beyond
    2^-13 come back whatever machine made the file. Else, with exponentials that are rounded
    correctly, values of 1 and more come back, and smaller ones have the same exponentials, which
    several may have.
    """
    exact = decays.double().log()
    rounded = exact.bfloat16().double()
    return (rounded if (rounded - exact).abs().max() < _OF_ROUNDING else exact).float()


def dequantized(raw: np.ndarray, tensor: GGUFTensor, location: str) -> Tensor:
    """Rows of bytes to rows of fp32.

    Raises:
        UnsupportedError: of a type that is no float in blocks.
    """
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
