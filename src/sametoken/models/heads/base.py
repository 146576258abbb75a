"""What EAGLE heads of every version are to their drafter.

What EAGLE checkpoints of every version and layout have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, Protocol

import torch
from torch import Tensor

from sametoken.config import DUMMY
from sametoken.errors import CheckpointError, DrafterMismatchError, UnsupportedError
from sametoken.layers.norm import RMSNorm
from sametoken.models.base import HiddenStates, ModelConfig
from sametoken.models.decoder import DERIVED_TENSORS
from sametoken.models.load.dummy import dummy_reader
from sametoken.models.load.huggingface import (
    SafetensorsSource,
    model_config,
)
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import (
    Part,
    WeightReader,
)
from sametoken.ops.backend import AttentionRows, Kernels
from sametoken.ops.cache_types import LayerCache
from sametoken.ops.weight import (
    UnquantizedWeight,
    Weight,
)
from sametoken.state.caches import ModelCache


@dataclass(frozen=True, slots=True)
class HeadStates:
    """What a pass of the head leaves, [T, hidden] each.

    Attributes:
        last: what logits are made from.
        feedback: what the row at the next position takes as its hidden state.
    """

    last: Tensor
    feedback: Tensor


class EagleHead(Protocol):
    """A draft head: row p holds the token at p + 1 and a state of p, and predicts p + 2."""

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """What each of its layers keeps."""
        ...

    @property
    def token_ids(self) -> Tensor | None:
        """[V'] int64, ascending: the token of each logits column; None: column i is token i."""
        ...

    def target_states(self, hidden: HiddenStates, rows: Tensor | None) -> Tensor:
        """What rows of the target's forward pass give to the head.

        Args:
            hidden: the target's hidden states of T rows.
            rows: [R] int64, indices of the rows to take; None: all T in order.

        Returns:
            [R, hidden]; may be a tensor of ``hidden``, unless ``forward`` writes into it.
        """
        ...

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        rows: AttentionRows,
        cache: ModelCache,
        kept: Tensor | None = None,
    ) -> HeadStates:
        """Run rows over paged KV, writing theirs.

        Args:
            token_ids: [T] int64; of a row at position p, the token at p + 1.
            hidden: [T, hidden]; of a row at position p, the target's state at p or the
                head's own ``feedback`` of p - 1. Its memory may be reused.
            rows: where the rows stand.
            cache: what the head keeps.
            kept: [R] int64, the rows whose states are wanted; the others are run for their KV
                alone. None: all.
        """
        ...

    def compute_logits(self, last: Tensor) -> Tensor:
        """[R, hidden] to [R, V'] fp32 over the tokens that it can propose."""
        ...


LAYER = "layers.0"
# Tensors of the target that some heads carry and none reads.
UNUSED_TENSORS = (*DERIVED_TENSORS, "verifier_lm_head.weight", "verifier_norm.weight")

_ANOTHER_HEAD = "use a head that was trained for this target"
_RENAMED = (
    ("model.", ""),
    ("midlayer.", f"{LAYER}."),
    ("transformer.", f"{LAYER}."),
    ("fusion_fc.", "fc."),
)


class SharedWeights(Protocol):
    """What a head may take from its target: two packed weights [V, hidden]."""

    embedding: UnquantizedWeight

    def whole_head(self) -> UnquantizedWeight:
        """All rows of the target's lm_head; reads them if this rank does not hold them."""
        ...


class HeadCheckpoint(Protocol):
    """A head on disk, its config read and its weights not."""

    def require_fit(self, target: ModelConfig) -> None:
        """Refuse a head that was trained for another target.

        Raises:
            DrafterMismatchError: another vocabulary, hidden size or number of layers.
        """
        ...

    def aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The target's layers whose inputs the head reads, in its order.

        Raises:
            DrafterMismatchError: the target has no such layer.
        """
        ...

    def load(
        self,
        shared: SharedWeights,
        *,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        token_ids: Tensor | None = None,
        quantize_fp8: bool = False,
    ) -> EagleHead:
        """Read the weights; what the head lacks of embedding and lm_head is the target's.

        Args:
            shared: the target's weights.
            kernels: the backend that runs the head.
            dtype: what every weight is converted to.
            device: where every weight goes.
            max_positions: rows of the rotary table.
            token_ids: [V'] int64, ascending, on the device: all that the head is to propose, if
                it has no such list of its own.
            quantize_fp8: whether all projections but those of a mixture of experts become fp8.

        Raises:
            CheckpointError: a tensor is missing or has another shape than the config wants.
            UnsupportedError: pickled weights only, or tensors that the head has no use for.
            DrafterMismatchError: the weights to share do not fit the head.
        """
        ...


def read_layer_config(config: Mapping[str, Any], location: Path) -> ModelConfig:
    """The decoder layer's sizes: those of ``speculators`` are nested, SafeAILab's are not.

    Raises:
        CheckpointError: a key is missing or impossible.
        UnsupportedError: the layer needs arithmetic that is not implemented.
    """
    nested = config.get("transformer_layer_config", config)
    if not isinstance(nested, dict):
        raise CheckpointError(f"{location}: transformer_layer_config is not an object")
    layer = model_config(Settings({"architectures": ["EagleHead"], **nested}, str(location)))
    settings = Settings(layer.extra, str(location))
    activation = settings.get("hidden_act", "silu")
    windowed = "sliding_attention" in settings.names("layer_types") or (
        settings.get("use_sliding_window") and settings.get("sliding_window")
    )
    refuse(
        location,
        (activation != "silu", f"activation {short(activation)}"),
        (windowed, "sliding-window attention"),
    )
    return layer


def refuse(location: Path, *features: tuple[object, str]) -> None:
    """Refuse a head by the first of its features that is there.

    Args:
        location: the file, for messages.
        features: whether the head has it, and its name.

    Raises:
        UnsupportedError: the head has one.
    """
    for found, what in features:
        if found:
            raise UnsupportedError(f"{location}: an EAGLE head with {what} is not supported")


def require_sizes(vocab_size: int, hidden_size: int, target: ModelConfig) -> None:
    """Refuse a head that expects a target of another vocabulary or hidden size.

    Raises:
        DrafterMismatchError: one of the two differs.
    """
    for mine, theirs, what in (
        (vocab_size, target.vocab_size, "tokens"),
        (hidden_size, target.hidden_size, "hidden elements"),
    ):
        if mine != theirs:
            raise DrafterMismatchError(
                f"the EAGLE head expects a target of {mine} {what}, the target has {theirs}",
                _ANOTHER_HEAD,
            )


def require_layers(ids: tuple[int, ...], num_target_layers: int) -> None:
    """Refuse a head that reads layers which the target does not have.

    Raises:
        DrafterMismatchError: an id is not in 0 .. ``num_target_layers``.
    """
    if not all(0 <= i <= num_target_layers for i in ids):
        raise DrafterMismatchError(
            f"the EAGLE head reads layers {ids}, the target has {num_target_layers} layers",
            _ANOTHER_HEAD,
        )


def load_norm(reader: WeightReader, name: str, layer: ModelConfig) -> RMSNorm:
    """The norm ``name`` over the layer's hidden size."""
    weight = reader.vector(f"{name}.weight", layer.hidden_size)
    return RMSNorm(reader.kernels, weight, layer.rms_norm_eps)


def own_or_shared(
    reader: WeightReader,
    name: str,
    rows: int,
    hidden_size: int,
    share: Callable[[], UnquantizedWeight],
    places: Tensor | None = None,
) -> UnquantizedWeight:
    """The [rows, hidden_size] weight ``name`` if the head has it, else what ``share`` returns.

    ``places`` is that of ``Part``, for a weight of the head's own.

    Raises:
        DrafterMismatchError: the head has none, and the target's is of another shape.
    """
    if f"{name}.weight" in reader:
        return reader.packed(hidden_size, Part(f"{name}.weight", rows, places))
    shared = share()
    if (shared.out_features, shared.in_features) != (rows, hidden_size):
        raise DrafterMismatchError(
            f"the EAGLE head has no {name} of its own and wants one of {rows} x {hidden_size}, "
            f"the target's is {shared.out_features} x {shared.in_features}",
            _ANOTHER_HEAD,
        )
    return shared


def load_lm_head(
    reader: WeightReader, whole: UnquantizedWeight, token_ids: Tensor | None
) -> Weight:
    """The projection to the logits of the given tokens, or of all; ``whole`` stays as it is."""
    if token_ids is not None:
        whole = reader.kernels.pack(whole.rows(token_ids))
    return reader.projection(whole)


def open_head(
    directory: Path,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    *,
    load_format: str,
    quantize_fp8: bool,
    optional: Collection[str] = (),
) -> WeightReader:
    """A reader of a head's tensors, or under "dummy" of random ones.

    Args:
        directory: the head's.
        kernels, dtype, device, quantize_fp8: as in ``HeadCheckpoint.load``.
        load_format: "auto" or "dummy".
        optional: what a dummy head holds among the tensors that heads may share or lack.
    """
    if load_format == DUMMY:
        reader = dummy_reader(directory, kernels, dtype, device, optional)
    else:
        reader = WeightReader(HeadSource(directory), kernels, dtype, device)
    return replace(reader, quantize_fp8=quantize_fp8)


class HeadSource:
    """A head's floating tensors under one set of names, whatever its layout."""

    def __init__(self, directory: Path) -> None:
        self._source = SafetensorsSource(directory)
        self.location = self._source.location
        names = {_renamed(name): name for name in self._source.names()}
        self._names = {new: old for new, old in names.items() if new not in ("d2t", "t2d")}

    def names(self) -> Collection[str]:
        """Every tensor's name: ``layers.0.*``, ``fc.*`` and so on."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that exists."""
        return self._source.shape(self._names[name])

    def chunks(self, name: str) -> Iterator[Tensor]:
        """The tensor in order, by rows."""
        return self._source.chunks(self._names[name])


def _renamed(name: str) -> str:
    for prefix, replacement in _RENAMED:
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
    return name
