"""``ExactModel``: the engine's decoder over the parameters of a ``torch.nn.Module``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from sametoken.config import EngineConfig
from sametoken.engine.modes import without_modes
from sametoken.engine.resolve import (
    resolve_device,
    resolve_dtype,
    resolve_max_model_len,
    resolve_sizes,
)
from sametoken.errors import CheckpointError, NumericalError
from sametoken.exact.functions import token_logprobs
from sametoken.exact.kernels import DifferentiableWeight, differentiable
from sametoken.exact.packed import PackedSequences, checked_sequences
from sametoken.layers.rotary import DRAFT_POSITIONS
from sametoken.models.decoder import HEAD, Decoder
from sametoken.models.load.quantization import require_unquantized
from sametoken.models.load.sources import TensorsByName, TensorSource, require_finite
from sametoken.models.load.weights import Part, WeightReader
from sametoken.models.loader import open_checkpoint
from sametoken.models.names import resolve_model
from sametoken.models.registry import model_class
from sametoken.ops.backend import Kernels, RotaryTable
from sametoken.ops.dispatch import select_kernels

#: Tensors whose values are looked at in one operation, and are kept until then.
LOOKED_AT = 64

Reader = TypeVar("Reader", bound=WeightReader)


class ExactModel(nn.Module):
    """A model whose log-probabilities are, bit for bit, those of ``LLM`` with the same weights.

    Its forward pass is the engine's own decoder, run by the engine's own kernels, over whole
    sequences; gradients are those of the same operations in fp32 (``exact.functions``). Weights are
    packed from the parameters in every forward pass, so that no optimizer leaves them stale.

    Parameters have the names of the checkpoint: ``llm.update_weights(model.state_dict().items())``.
    They may be converted to another dtype, as by ``model.float()`` for an optimizer; a pass rounds
    them to ``dtype``, as an update of the engine does.

    Args:
        model: as for ``LLM``.
        dtype: the engine's: "auto", "bfloat16" or "float32".
        device: the engine's: "auto", "cpu" or "cuda".
        max_model_len: the most tokens of a sequence; the engine's, if a checkpoint's rotary
            settings depend on it (LongRoPE).

    Raises:
        ConfigError, CheckpointError: as ``LLM``.
        UnsupportedError: the model has a layer without gradients, or quantized weights.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        options = EngineConfig(model=model, dtype=dtype, device=device, max_model_len=max_model_len)
        where = resolve_device(options)
        checkpoint = open_checkpoint(resolve_model(model, lambda text: None))
        self.config = checkpoint.config
        require_unquantized(self.config.extra, model, "an exact model")
        self._dtype, _ = resolve_dtype(options, self.config.dtype)
        self._block_size = resolve_sizes(options, where).block_size
        self._max_model_len = resolve_max_model_len(options, self.config)
        # Of every device that had a pass: they depend on no parameter.
        self._rotaries: dict[torch.device, tuple[RotaryTable, ...]] = {}
        for name, parameter in self._read(checkpoint.open_tensors(), where).items():
            _attach(self, name, parameter)

    @without_modes()
    def forward(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int] | None = None
    ) -> tuple[Tensor, ...]:
        """Log-probabilities of tokens, each given all tokens before it.

        Args:
            sequences: token ids, prompt and answer together; of any lengths.
            starts: by sequence, index of the first scored token, as the length of its prompt;
                by default 1.

        Returns:
            By sequence, [length - start] fp32: of the model's unprocessed logits, as ``logprobs``
            of ``SamplingParams`` are.

        Raises:
            RequestError: a sequence is too long, has no token to score, a token that the model
                lacks, or one that is no integer.
            NumericalError: a parameter is NaN, infinite, or of another shape.
        """
        lists, firsts = checked_sequences(
            sequences, starts, longest=self._max_model_len, vocab_size=self.config.vocab_size
        )
        device = next(self.parameters()).device
        try:
            tensors = _Parameters("the module", dict(self.named_parameters()))
            reader = self._reader(_ParameterReader, tensors, device)
            decoder = self._decoder(reader)
            reader.require_all_finite()
        except CheckpointError as error:
            raise NumericalError(error.cause, "look at the optimizer's last step") from error
        packed = PackedSequences.of(lists, firsts, self._block_size, device)
        hidden = decoder.forward(packed.token_ids, packed.rows, packed.cache(decoder.caches)).last
        head = decoder.head
        assert isinstance(head, DifferentiableWeight)
        scored = token_logprobs(
            decoder.compute_logits,
            hidden.index_select(0, packed.scored),
            head.matrix,
            packed.chosen,
        )
        # No views: FSDP2 hooks the outputs.
        return tuple(part.clone() for part in torch.split(scored, [*packed.num_scored]))

    @without_modes()
    def _read(self, source: TensorSource, device: torch.device) -> dict[str, nn.Parameter]:
        """The tensors that the decoder reads, and a tied embedding once."""
        tensors = _FirstRead(source, self._dtype, device)
        with torch.no_grad():
            self._decoder(self._reader(_FirstReader, tensors, device))
        tied = self.config.tie_word_embeddings
        return {
            name: nn.Parameter(tensor)
            for name, tensor in tensors.found.items()
            if not (tied and name.endswith(HEAD))
        }

    def _reader(self, kind: type[Reader], tensors: TensorSource, device: torch.device) -> Reader:
        kernels = _device_kernels(device) if device.type == "cuda" else select_kernels(device)
        return kind(tensors, differentiable(kernels), self._dtype, device)

    def _decoder(self, reader: WeightReader) -> Decoder:
        build = model_class(self.config.architecture)
        positions, known = self._max_model_len + DRAFT_POSITIONS, self._rotaries.get(reader.device)
        decoder = build(self.config, reader, max_positions=positions, rotaries=known)
        self._rotaries[reader.device] = decoder.rotaries
        return decoder


@lru_cache
def _device_kernels(device: torch.device) -> Kernels:
    """Kernels that keep what was read and proven of a GPU, for all models on it."""
    return select_kernels(device)


class _Parameters(TensorsByName):
    """A ``TensorSource`` over parameters, which carry their gradients."""

    def __init__(self, location: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(location, tensors)
        self._read: list[Tensor] = []
        self._largest: list[Tensor] = []

    def was_read(self, values: Tensor) -> None:
        """Look at values that a pass takes from parameters, those of many tensors at once."""
        self._read.append(values.detach())
        if len(self._read) == LOOKED_AT:
            self._look()

    def was_finite(self) -> bool:
        """Whether all values that were read are finite."""
        self._look()
        return bool(torch.stack(self._largest).isfinite().all())

    def _look(self) -> None:
        if self._read:
            self._largest.append(get_total_norm(self._read, math.inf))
            self._read.clear()

    def chunks(self, name: str) -> Iterator[Tensor]:
        """The whole tensor, as a copy in chunks would be a node of the graph for each."""
        yield self._tensors[name]

    stored_chunks = chunks


class _ParameterReader(WeightReader):
    """Joins parameters in one operation of the graph, and looks at the values of all at once."""

    __slots__ = ()

    def filled(
        self,
        parts: tuple[Part, ...],
        row_shape: tuple[int, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        for part in parts:
            self._require_shape(part.name, (part.rows, *row_shape))
        self._read.update(part.name for part in parts)
        # A copy also of one part: gradients are of these values, whatever becomes of parameters.
        joined = torch.cat(
            [self._rows(part).to(self.device, dtype or self.dtype) for part in parts]
        )
        self._parameters.was_read(joined)
        return joined

    def require_all_finite(self) -> None:
        """Refuse tensors whose values are not finite; errors as ``packed``."""
        if not self._parameters.was_finite():
            for name in self.source.names():
                values = next(self.source.chunks(name)).to(self.dtype)
                require_finite(values, name, self.source)

    @property
    def _parameters(self) -> _Parameters:
        assert isinstance(self.source, _Parameters)
        return self.source

    def _rows(self, part: Part) -> Tensor:
        """A tensor in the order of its rows in the weight."""
        rows = next(self.source.chunks(part.name))
        if part.permutation is None:
            return rows
        return torch.empty_like(rows).index_copy(0, part.permutation.to(rows.device), rows)


class _FirstRead:
    """A ``TensorSource`` that keeps, in ``found``, what is read of another one.

    Attributes:
        precise: tensors of another dtype than the model's.
    """

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self.location, self.found = source.location, dict[str, Tensor]()
        self.names, self.shape, self.stored_dtype = source.names, source.shape, source.stored_dtype
        self.precise: dict[str, torch.dtype] = {}
        self._source, self._dtype, self._device = source, dtype, device

    def chunks(self, name: str) -> Iterator[Tensor]:
        if name not in self.found:
            dtype = self.precise.get(name, self._dtype)
            parts = [part.to(self._device, dtype) for part in self._source.chunks(name)]
            self.found[name] = torch.cat(parts)
        yield self.found[name]

    stored_chunks = chunks


class _FirstReader(WeightReader):
    """Tells a ``_FirstRead`` which tensors the model reads in a dtype of their own."""

    __slots__ = ()

    def filled(
        self,
        parts: tuple[Part, ...],
        row_shape: tuple[int, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        assert isinstance(self.source, _FirstRead)
        if dtype is not None:
            self.source.precise |= {part.name: dtype for part in parts}
        return super().filled(parts, row_shape, dtype)


def _attach(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)
