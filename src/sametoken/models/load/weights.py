"""Streaming weight loader: a checkpoint's tensors to packed weights, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.layers.linear import Linear, Projection, RowParallelLinear
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.layers.share import Part as Part
from sametoken.layers.share import Share, share_of
from sametoken.layers.share import Split as Split
from sametoken.models.load.linear_format import UNQUANTIZED, Quantization
from sametoken.models.load.sources import FLOATING, TensorSource, dtype_name, require_finite
from sametoken.ops.backend import Kernels
from sametoken.ops.weight import UnquantizedWeight, Weight


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads tensors, checks them, and packs them for one backend.

    Callers pass the checkpoint's shapes; for a split tensor, this rank's share is read and
    returned.

    Attributes:
        dtype: dtype of every weight.
        device: device of every weight.
        parallel: the ranks that divide split tensors.
        quantize_fp8: whether projections become fp8; for draft heads, never for a target.
        quantization: the formats in which the checkpoint stores linears.
    """

    source: TensorSource
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    parallel: TensorParallel = SINGLE_RANK
    quantize_fp8: bool = False
    quantization: Quantization = UNQUANTIZED
    _read: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.source.names()

    def vector(self, name: str, size: int) -> Tensor:
        """A [size] tensor, e.g. a norm's weight."""
        return self.tensor(Part(name, size))

    def tensor(
        self, part: Part, row_shape: tuple[int, ...] = (), dtype: torch.dtype | None = None
    ) -> Tensor:
        """An unpacked [part.rows, *row_shape] tensor in ``dtype``, by default the reader's."""
        return self.filled((part,), row_shape, dtype)

    def packed_stack(
        self, count: int, in_features: int, part: Part, *, transposed: bool = False
    ) -> list[Weight]:
        """Pack each matrix of a [count, part.rows, in_features] tensor; ``part`` is one matrix.

        With ``transposed``, the tensor is [count, in_features, part.rows]. Errors as ``packed``.
        """
        stack = self.quantization.stack_of(part.name, self.source)
        if stack is not None:
            return stack.read(self, count, in_features, part)
        matrices = self._matrices(count, in_features, part, transposed)
        return [self.kernels.pack(own) for own in matrices]

    def _matrices(
        self, count: int, in_features: int, part: Part, transposed: bool
    ) -> Iterator[Tensor]:
        """This rank's share of each matrix of an unquantized stack."""
        share = self.share(part, (in_features,))
        stored = (in_features, part.rows) if transposed else (part.rows, in_features)
        self._require_shape(part.name, (count, *stored))
        for chunk in self.source.chunks(part.name):
            for matrix in chunk.mT if transposed else chunk:
                own = share.of(matrix, self.dtype, self.device)
                require_finite(own, part.name, self.source)
                yield own
        self._read.add(part.name)

    def packed(self, in_features: int, *parts: Part) -> UnquantizedWeight:
        """Stack the parts into one packed [sum of rows, in_features] weight.

        Raises:
            CheckpointError: a part is missing, of another shape, unreadable, or not finite.
            UnsupportedError: a part is of a dtype that cannot be converted.
        """
        module = parts[0].name.removesuffix(".weight")
        table = self.quantization.format_of_table(module, self.source)
        if table is not None:
            return table.read(self, in_features, (replace(parts[0], name=module),))
        return self.kernels.pack(self.filled(parts, (in_features,)))

    def projection(self, weight: UnquantizedWeight) -> Weight:
        """The weight in the reader's format for projections; an fp8 copy if quantized."""
        return weight.quantize_fp8() if self.quantize_fp8 else weight

    def linear(self, in_features: int, *parts: Part, bias: bool = False) -> Linear:
        """A fused projection; names of ``parts`` are without ``.weight`` and ``.bias``."""
        weight = self._stored(in_features, parts)
        if not bias:
            self._pass_zero_biases(parts)
            return Linear(weight, parts=parts)
        biases = tuple(part.of_rows().tensor("bias") for part in parts)
        return Linear(weight, self.filled(biases), parts)

    def row_parallel(self, in_features: int, part: Part, *, bias: bool = False) -> Projection:
        """A row-parallel projection: ranks divide its input, its output is whole."""
        if self.parallel.size == 1:
            return self.linear(in_features, part, bias=bias)
        own = self.linear(in_features, replace(part, split=Split.COLUMNS), bias=bias)
        return RowParallelLinear(self.kernels, self.parallel, own.weight, own.bias, own.parts)

    def expanded(self, in_features: int, part: Part) -> Tensor:
        """A linear's matrix in the reader's dtype, whatever its format: what is no product reads.

        The name of ``part`` is without ``.weight``.
        """
        linear = self.quantization.format_of(part.name, self.source)
        if linear is None:
            return self.tensor(part.tensor("weight"), (in_features,))
        return linear.expanded(self, in_features, part).to(self.dtype)

    def _stored(self, in_features: int, parts: tuple[Part, ...]) -> Weight:
        """The parts as one weight, adjacent ones of one format as one."""
        weights: list[Weight] = []
        for linear, same in groupby(
            parts, lambda part: self.quantization.format_of(part.name, self.source)
        ):
            run = tuple(same)
            if linear is None:
                plain = (part.tensor("weight") for part in run)
                weights.append(self.projection(self.packed(in_features, *plain)))
            else:
                weights.append(linear.read(self, in_features, run))
        return weights[0] if len(weights) == 1 else self.kernels.stack(weights)

    def _pass_zero_biases(self, parts: tuple[Part, ...]) -> None:
        """Count biases of zeros as read: old writers of GPTQ give one to every linear."""
        for part in parts:
            name = f"{part.name}.bias"
            quantized = self.quantization.format_of(part.name, self.source) is not None
            if quantized and name in self and not any(map(torch.any, self.source.chunks(name))):
                self._read.add(name)

    def pass_over(self, module: str) -> None:
        """Count a module's tensors as read: they are copies."""
        self._read.update(name for name in self.source.names() if name.startswith(f"{module}."))

    def skip(self, name: str) -> None:
        """Count a tensor as read, if there is one: it is not needed."""
        if name in self:
            self._read.add(name)

    def small(self, name: str, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
        """A whole small tensor in fp32 on the host, of one of the shapes; errors as ``packed``.

        It may hold powers of two in a byte each (UE8M0), as scales do.
        """
        source = self.source
        found = source.shape(name) if name in self else None
        self._require_shape(name, found if found in shapes else shapes[0])
        in_bytes = source.stored_dtype(name) is torch.float8_e8m0fnu
        chunks = source.stored_chunks(name) if in_bytes else source.chunks(name)
        tensor = torch.cat([chunk.float().cpu() for chunk in chunks])
        require_finite(tensor, name, source)
        self._read.add(name)
        return tensor

    def require_head(self, module: str) -> None:
        """Refuse a checkpoint without a head that its config does not tie to the embedding.

        Raises:
            CheckpointError: no tensor is of the module.
        """
        if not any(name.startswith(f"{module}.") for name in self.source.names()):
            raise CheckpointError(
                f"{self.source.location} lacks the tensor {module}.weight, and its config does not "
                "tie it to the embedding",
                "set tie_word_embeddings to true if the embedding is the head, else download or "
                "convert the checkpoint again",
            )

    def require_tied(self, name: str, module: str) -> None:
        """Refuse a head of the checkpoint that is not the embedding to which it is tied.

        Args:
            name: the embedding's tensor.
            module: the head; it may lack tensors.

        Raises:
            CheckpointError: the two differ, or the head is quantized.
        """
        copy = f"{module}.weight"
        stored = [one for one in self.source.names() if one.startswith(f"{module}.")]
        if not stored:
            return
        equal = (
            stored == [copy]
            and self.source.shape(name) == self.source.shape(copy)
            and all(
                torch.equal(a, b)
                for a, b in zip(self.source.chunks(name), self.source.chunks(copy), strict=True)
            )
        )
        if not equal:
            raise CheckpointError(
                f"{self.source.location}: {copy} differs from {name}, to which the config ties it",
                "set tie_word_embeddings to false if the checkpoint means both",
            )
        self._read.add(copy)

    def require_all_read(self, *, allowed: tuple[str, ...], unused: tuple[str, ...] = ()) -> None:
        """Refuse a checkpoint with tensors that were not read.

        Args:
            allowed: suffixes of names that may stay unread.
            unused: prefixes of names that may stay unread.

        Raises:
            UnsupportedError: the model would silently differ from the one that was trained.
        """
        unread = sorted(set(self.source.names()) - self._read)
        unread = [n for n in unread if not (n.endswith(allowed) or n.startswith(unused))]
        if unread:
            shown = ", ".join(unread[:3]) + (", ..." if len(unread) > 3 else "")
            raise UnsupportedError(
                f"{self.source.location} holds {len(unread)} tensors that its architecture "
                f"does not use: {shown}",
                "check the architecture and the bias settings in its config",
            )

    def filled(
        self,
        parts: tuple[Part, ...],
        row_shape: tuple[int, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """This rank's shares of the parts, one after the other, in ``dtype``, by default its own.

        A dtype that is not floating must be the one that is stored; errors as ``packed``.
        """
        # Checked before allocating: a config may contradict the file.
        for part in parts:
            self._require_shape(part.name, (part.rows, *row_shape))
        shares = tuple(self.share(part, row_shape) for part in parts)
        destination = self._empty(shares, row_shape, dtype)
        first = 0
        for part, share in zip(parts, shares, strict=True):
            self._fill(destination[first : first + share.num_rows], part, share)
            first += share.num_rows
        return destination

    def stored(self, part: Part, in_features: int, row_bytes: int) -> Tensor:
        """This rank's share of a matrix as its file stores it: [rows, bytes] uint8.

        Ranks divide ``row_bytes``, those of a whole row, as they divide features. Errors as
        ``packed``.
        """
        self._require_shape(part.name, (part.rows, in_features))
        share = self.share(part, (row_bytes,))
        own = self._empty((share,), (row_bytes,), torch.uint8)
        share.copy(own, self.source.stored_chunks(part.name))
        self._read.add(part.name)
        return own

    def _empty(
        self,
        shares: tuple[Share, ...],
        row_shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Memory for shares of tensors whose rows have one shape."""
        rows = sum(share.num_rows for share in shares)
        own_shape = (len(shares[0].columns), *row_shape[1:]) if row_shape else ()
        return torch.empty((rows, *own_shape), dtype=dtype or self.dtype, device=self.device)

    def share(self, part: Part, row_shape: tuple[int, ...]) -> Share:
        """This rank's share of a [part.rows, *row_shape] tensor."""
        return share_of(part, row_shape, self.parallel)

    def require_whole_groups(
        self, in_features: int, parts: tuple[Part, ...], size: int, group: str, *otherwise: str
    ) -> None:
        """Refuse ranks whose columns begin within a group.

        Args:
            in_features: columns of each whole part.
            parts: of a linear; only parts that are divided by columns count.
            size: columns of a group.
            group: what it is, for the message.
            otherwise: remedies beside fewer ranks.

        Raises:
            ConfigError: refused.
        """
        ranks = self.parallel.size
        divided = ranks > 1 and any(part.split is Split.COLUMNS for part in parts)
        if divided and in_features % (ranks * size):
            fewer = (str(n) for n in range(2, ranks) if in_features % (n * size) == 0)
            raise ConfigError(
                f"tensor_parallel_size={ranks} cuts the {in_features} features of {parts[0].name} "
                f"within {group}",
                f"use {' or '.join(('1', *fewer, *otherwise))}",
            )

    def _require_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        if name not in self:
            raise CheckpointError(
                f"{self.source.location} lacks the tensor {name}",
                "download or convert the checkpoint again",
            )
        found = self.source.shape(name)
        if found != wanted:
            raise CheckpointError(
                f"tensor {name} of {self.source.location} has shape {list(found)}, "
                f"the config expects {list(wanted)}",
                "check that config and weights belong together",
            )

    def _fill(self, destination: Tensor, part: Part, share: Share) -> None:
        """Copy a tensor in chunks, so that no second copy of it exists in memory."""
        share.copy(_bits(destination), map(_bits, self._chunks(part.name, destination.dtype)))
        require_finite(destination, part.name, self.source)
        self._read.add(part.name)

    def _chunks(self, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        """Chunks that may be copied to ``dtype``: floats to any floats, others to their own."""
        if dtype in FLOATING:
            yield from self.source.chunks(name)
            return
        found = self.source.stored_dtype(name)
        if found != dtype:
            raise CheckpointError(
                f"tensor {name} of {self.source.location} has dtype {dtype_name(found)}, "
                f"its quantization wants {dtype_name(dtype)}",
                "check that config and weights belong together",
            )
        yield from self.source.stored_chunks(name)


def _bits(tensor: Tensor) -> Tensor:
    """A view that can be copied and indexed: float8 as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
