"""Weights of a running engine: loaded beside the old ones, then written over them.

An update costs a second copy of what it replaces, packed, until it ends: the ``weights_bytes`` of
the target or drafter, and its rotary tables (docs/rollouts.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sametoken.config import DUMMY
from sametoken.drafters.base import LoadedDrafter
from sametoken.engine.modes import without_modes
from sametoken.engine.resolve import ResolvedConfig
from sametoken.errors import (
    CheckpointError,
    DrafterMismatchError,
    InvariantError,
    UnsupportedError,
    WeightUpdateError,
    shown,
)
from sametoken.layers.parallel import TensorParallel
from sametoken.models.decoder import Decoder
from sametoken.models.in_place import Replacement
from sametoken.models.load.linear_format import UNQUANTIZED, Quantization
from sametoken.models.load.quantization import read_quantization
from sametoken.models.load.sources import FLOATING, TensorSource
from sametoken.models.load.weights import Part, WeightReader
from sametoken.models.loader import GGUF_PACKED, low_mmap_threshold, open_checkpoint
from sametoken.models.requantize import left_in_floats, requantized
from sametoken.ops.backend import Kernels
from sametoken.ops.out_of_memory import out_of_memory_as
from sametoken.runner.routed_experts import plain_kernels
from sametoken.types.speculative_methods import EXTRACT
from sametoken.types.weight_updates import DRAFTER, MODEL

#: Versions are 64-bit numbers in prefix cache keys.
_MAX_VERSION = 2**63 - 1
#: Times the weights' bytes that a trainer may send: float64 in place of 16 bits, or of 4.
_WIDEST, _WIDEST_QUANTIZED = 4, 16
#: The remedy where there is no memory for an update.
LEAVE_ROOM = "leave room for it: lower num_kv_blocks or kv_cache_memory_bytes"
_ALL = "send every tensor of the checkpoint, under its Hugging Face name"
#: Ends of names of tensors that transformers has as buffers: trainers that send a model's
#: ``named_parameters`` leave them out.
_BUFFERS = (".e_score_correction_bias", ".layer_scalar")


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights that fit, loaded and not in use yet.

    Attributes:
        replacement: of the tensors in use.
        of_target: whether the target's weights are among them.
        leaves_buffers: whether some of the target's tensors are to stay as they are.
    """

    replacement: Replacement
    of_target: bool
    leaves_buffers: bool = False

    @classmethod
    def same(cls) -> NewWeights:
        """The target's own weights, for another version."""
        return cls(Replacement(()), of_target=True)

    def drop(self) -> None:
        """No rank keeps them."""
        self.replacement.drop()

    def version_after(self, current: int, wanted: int | None) -> int:
        """The version once they are in use: the wanted one, or the next; a drafter's keep it.

        Raises:
            WeightUpdateError: it is no integer above ``current``, as a version means one set of
                weights, or a drafter's weights are to have one.
        """
        if not self.of_target and wanted is None:
            return current
        if not self.of_target:
            raise WeightUpdateError("a drafter's weights have no version", "leave version out")
        if wanted is None:
            return current + 1
        if type(wanted) is not int or not current < wanted <= _MAX_VERSION:
            raise WeightUpdateError(
                f"version={shown(wanted)} does not follow version {current}",
                "give a larger integer, or none for the next",
            )
        return wanted


@contextmanager
def update_errors() -> Iterator[None]:
    """Errors of loading, as those of an update."""
    try:
        with out_of_memory_as(
            WeightUpdateError, "no memory for a second copy of the weights", LEAVE_ROOM
        ):
            yield
    except (CheckpointError, UnsupportedError, DrafterMismatchError) as error:
        raise WeightUpdateError(error.cause, _ALL) from error


class Weights(Protocol):
    """The weights of an engine, which may be replaced."""

    def require_target(self, target: str) -> int:
        """The most bytes that a trainer may send for a target of ``load``.

        Raises:
            WeightUpdateError: there is no such target.
            UnsupportedError: this engine's weights cannot change.
        """
        ...

    def load(self, source: TensorSource, target: str) -> NewWeights:
        """Load and check a full set of weights; nothing that runs is changed.

        Args:
            source: the tensors, by their Hugging Face names.
            target: "model", or "drafter".

        Raises:
            WeightUpdateError: a tensor is missing, unknown, of a wrong shape or dtype, or not
                finite, or memory does not suffice.
            UnsupportedError: this engine's weights cannot change.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedWeights:
    """Weights that cannot change.

    Attributes:
        why: what they are part of.
    """

    why: str

    def require_target(self, target: str) -> int:
        """Refuse; see ``Weights``."""
        raise self._refusal

    def load(self, source: TensorSource, target: str) -> NewWeights:
        """Refuse; see ``Weights``."""
        raise self._refusal

    @property
    def _refusal(self) -> UnsupportedError:
        return UnsupportedError(
            f"weights do not change under {self.why}", "build another engine with the new weights"
        )


@dataclass(frozen=True, slots=True)
class LiveWeights:
    """Weights of one process; see ``Weights``.

    Attributes:
        model: the target, or this rank's share.
        drafter: the drafter, with the model that it runs, if any.
        dtype, device: of the weights.
        parallel: the ranks that share the target.
        in_floats: names of the target's tensors that its checkpoint does not quantize.
    """

    model: Decoder
    drafter: LoadedDrafter
    dtype: torch.dtype
    device: torch.device
    parallel: TensorParallel
    in_floats: frozenset[str]

    def require_target(self, target: str) -> int:
        """See ``Weights``."""
        if target not in (MODEL, DRAFTER):
            raise WeightUpdateError(
                f"target={shown(target)} is no part of an engine", f"use {MODEL!r} or {DRAFTER!r}"
            )
        if target == DRAFTER and self.drafter.reload is None:
            raise WeightUpdateError("this engine's drafter has no weights", "leave it out")
        widest = _WIDEST if self._formats() is UNQUANTIZED else _WIDEST_QUANTIZED
        return widest * (self.model.weights_bytes + self.drafter.weights_bytes)

    @low_mmap_threshold()
    @without_modes()
    def load(self, source: TensorSource, target: str) -> NewWeights:
        """See ``Weights``; a module in the target's checkpoint comes with the target.

        If none of the module's tensors are there, it stays as it is, as do buffers of the target
        that are not there. A head's copy of the target's lm_head always comes with the target.
        Factors of an adapter are refused by name.
        """
        self.require_target(target)
        factor = next((name for name in source.names() if ".lora_A." in name), None)
        if factor is not None:
            raise WeightUpdateError(
                f"{shown(factor)} is an adapter's, and no weight of a model",
                "load it by adapters.load, or /v1/load_lora_adapter, or merge it",
            )
        with update_errors():
            return self._load(source, target)

    def _load(self, source: TensorSource, target: str) -> NewWeights:
        # Its memory for packed weights ends with the copy.
        kernels: Kernels = type(plain_kernels(self.model.kernels))()
        model, drafter, formats = self.model, self.drafter, self._formats()
        left_out: list[Tensor] = []
        # A module in the target's checkpoint is quantized as that is.
        if target == MODEL or drafter.in_target is not None:
            source = requantized(source, formats, model.config, self.in_floats)
        if target == MODEL:
            model = model.reloaded(
                _UpdateReader(
                    source,
                    kernels,
                    self.dtype,
                    self.device,
                    self.parallel,
                    quantization=formats,
                    left_out=left_out,
                )
            )
        pairs: list[tuple[object, object]] = [(self.model, model)]
        if target == DRAFTER or self._brings_module(source):
            assert drafter.reload is not None
            pairs.append((drafter.model, drafter.reload(source, model, kernels)))
        elif (shared := drafter.shared_head) is not None:
            pairs.append((shared.weight, shared.made_of(model, kernels)))
        live, loaded = zip(*pairs, strict=True)
        replacement = self._replacement(live, loaded, source).without(left_out)
        return NewWeights(replacement, target == MODEL, leaves_buffers=bool(left_out))

    def _formats(self) -> Quantization:
        """The formats of the target's weights."""
        return read_quantization(self.model.config.extra, MODEL)

    def _replacement(self, live: object, loaded: object, source: TensorSource) -> Replacement:
        """``Replacement.of``; a quantized checkpoint does not say how every tensor is stored."""
        try:
            return Replacement.of(live, loaded)
        except InvariantError as error:
            formats = self._formats()
            if formats is UNQUANTIZED:
                raise
            floats = left_in_floats(source, formats, self.model.config, self.in_floats)
            why = f" ({floats[0]} is in floats)" if floats else ""
            raise WeightUpdateError(
                f"the update is not stored as the weights in use are{why}",
                "send all tensors as the checkpoint has them; floats are quantized in formats that "
                "need no data (docs/rollouts.md)",
            ) from error

    def _brings_module(self, source: TensorSource) -> bool:
        prefix = self.drafter.in_target
        return prefix is not None and any(name.startswith(prefix) for name in source.names())


@dataclass(frozen=True, slots=True)
class _UpdateReader(WeightReader):
    """A reader of updates, in which buffers may be missing.

    Attributes:
        left_out: stand-ins for them, whose values are not to be used.
    """

    left_out: list[Tensor] = field(default_factory=list)

    def tensor(
        self, part: Part, row_shape: tuple[int, ...] = (), dtype: torch.dtype | None = None
    ) -> Tensor:
        if part.name in self or not part.name.endswith(_BUFFERS):
            return WeightReader.tensor(self, part, row_shape, dtype)
        shape = (part.rows, *row_shape)
        self.left_out.append(torch.empty(shape, dtype=dtype or self.dtype, device=self.device))
        return self.left_out[-1]


def weights_of(
    model: Decoder, drafter: LoadedDrafter, resolved: ResolvedConfig, parallel: TensorParallel
) -> Weights:
    """The weights of an engine, or of a rank, that was built.

    Args:
        model, drafter: as loaded.
        resolved: the engine's settings.
        parallel: the ranks that share the model.
    """
    speculative = resolved.config.speculative_config
    if speculative is not None and speculative.method == EXTRACT:
        return FixedWeights("extraction of hidden states")
    if resolved.config.load_format == GGUF_PACKED:
        return FixedWeights(f"load_format {GGUF_PACKED!r}")
    if model.config.holds_factors:
        return FixedWeights("a GGUF file whose weights hold the model's factors")
    in_floats = _names_in_floats(model, resolved)
    return LiveWeights(model, drafter, resolved.dtype, resolved.device, parallel, in_floats)


def _names_in_floats(model: Decoder, resolved: ResolvedConfig) -> frozenset[str]:
    """Names of tensors in floats where others are quantized; dummy weights follow the formats."""
    load_format = resolved.config.load_format
    if load_format == DUMMY or read_quantization(model.config.extra, MODEL) is UNQUANTIZED:
        return frozenset()
    source = open_checkpoint(resolved.model_path, load_format=load_format).open_tensors()
    return frozenset(name for name in source.names() if source.stored_dtype(name) in FLOATING)
