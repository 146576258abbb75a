"""The interface of draft heads, and the parts that their checkpoints share."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from sametoken.config import DUMMY
from sametoken.errors import DrafterMismatchError, UnsupportedError
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel, gather_columns
from sametoken.models.base import HiddenStates, ModelConfig
from sametoken.models.decoder import DERIVED_TENSORS
from sametoken.models.heads.reader import ANOTHER_HEAD, HeadReader, SharedWeights
from sametoken.models.heads.stored_names import head_source
from sametoken.models.load.dummy import dummy_reader
from sametoken.models.load.huggingface import open_weights
from sametoken.models.load.linear_format import UNQUANTIZED, Quantization
from sametoken.models.load.sources import TensorSource
from sametoken.models.load.weights import WeightReader
from sametoken.ops.backend import AttentionRows, KeptRows, Kernels
from sametoken.ops.cache_types import LayerCache
from sametoken.ops.weight import UnquantizedWeight, Weight
from sametoken.state.caches import ModelCache

# Tensors of the target that some heads contain and none uses.
UNUSED_TENSORS = (*DERIVED_TENSORS, "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True, slots=True)
class HeadStates:
    """Outputs of a head's forward pass, [T, hidden] each.

    Attributes:
        last: input of the lm_head.
        feedback: hidden-state input of the row at the next position.
    """

    last: Tensor
    feedback: Tensor


@dataclass(frozen=True, slots=True)
class EagleHead(ABC):
    """A draft head: row p takes the token at p + 1 and a state of p, and predicts p + 2.

    Attributes:
        embedding: [V, hidden], the target's unless the head has its own.
        lm_head: [V', hidden], likewise; V' is V, or the length of ``token_ids``.
        token_ids: [V'] int64, ascending: the token of each logits column, and so the only ones to
            propose; None: column i is token i.
        caches: the cache declaration of each layer, on this rank.
        parallel: the ranks that divide it; ``lm_head`` is this one's rows.
    """

    kernels: Kernels
    embedding: UnquantizedWeight
    lm_head: Weight
    token_ids: Tensor | None
    caches: tuple[LayerCache, ...]
    parallel: TensorParallel

    @property
    def tables(self) -> tuple[Weight, ...]:
        """Embedding and lm_head, its own or the target's."""
        return self.embedding, self.lm_head

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all matrices except embedding and lm_head."""
        ...

    @property
    def draft_bytes(self) -> int:
        """Bytes of the matrices that a pass for a draft reads."""
        return self.nbytes + self.lm_head.nbytes

    def target_states(self, hidden: HiddenStates, rows: Tensor | None) -> Tensor:
        """The head's hidden-state input from rows of the target's forward pass.

        By default the states after its final norm, which ``forward`` must not write to.

        Args:
            hidden: the target's hidden states of T rows.
            rows: [R] int64, indices of the rows to take; None: all T in order.

        Returns:
            [R, hidden]; may be a tensor of ``hidden``, unless ``forward`` writes into it.
        """
        return self.kernels.take_rows(hidden.last, rows)

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        rows: AttentionRows,
        cache: ModelCache,
        kept: KeptRows | None = None,
    ) -> HeadStates:
        """Run rows over paged KV and write their KV.

        Args:
            token_ids: [T] int64; for a row at position p, the token at p + 1.
            hidden: [T, hidden]; for a row at position p, the target's state at p or the head's
                ``feedback`` of p - 1. Its memory may be reused.
            rows: slots and positions of the rows.
            cache: the head's cache.
            kept: the rows to return; the others are run only for their KV. None: all.
        """
        ...

    def compute_logits(self, last: Tensor) -> Tensor:
        """[R, hidden] to [R, V'] fp32 over the tokens that the head can propose."""
        own = self.lm_head.matmul(last, out_dtype=torch.float32)
        table = self.embedding.out_features
        return gather_columns(
            self.parallel, own, table if self.token_ids is None else len(self.token_ids)
        )


Head = TypeVar("Head")


class HeadCheckpoint(ABC, Generic[Head]):
    """A head on disk, with its config read and its weights not.

    Args:
        directory: the checkpoint.
        load_format: as in ``open_checkpoint`` for the target's own module; "auto", or "dummy" for
            random weights.

    Attributes:
        unused_tensors: endings of tensor names that are not read.
        optional_tensors: optional tensors that a dummy head has.
        num_own_tokens: tokens that it proposes by a map of its own; None: it has none.
        prefix: of its tensors in a target's checkpoint; "" in one of its own.
        quantization: the formats of its linears.

    Raises:
        CheckpointError: config.json is missing, malformed, or lacks a key.
        UnsupportedError: another kind of drafter, or a feature that is not implemented.
    """

    unused_tensors: ClassVar[tuple[str, ...]] = UNUSED_TENSORS
    optional_tensors: tuple[str, ...] = ()
    num_own_tokens: int | None = None
    prefix: str = ""
    quantization: Quantization = UNQUANTIZED

    def __init__(self, directory: Path, *, load_format: str = "auto") -> None:
        self._directory = directory
        self._is_dummy = load_format == DUMMY
        self._given: TensorSource | None = None

    @abstractmethod
    def require_fit(self, target: ModelConfig) -> None:
        """Refuse a head that was trained for another target.

        Raises:
            DrafterMismatchError: another vocabulary, hidden size or number of layers.
        """
        ...

    def drafting(self, k: int) -> Self:
        """This checkpoint for k drafts a step.

        Raises:
            ConfigError: the head makes fewer.
        """
        return self

    def is_divisible(self, size: int) -> bool:
        """Whether ``size`` ranks, which divide the target, divide the head; by default none do."""
        return False

    def aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The target's layers whose inputs the head reads, in its order.

        By default none: it reads the target's last hidden state.

        Raises:
            DrafterMismatchError: a layer does not exist.
        """
        return ()

    @abstractmethod
    def caches(self, dtype: torch.dtype) -> tuple[LayerCache, ...]:
        """The cache declaration of each layer, over all ranks, with weights in ``dtype``."""
        ...

    @abstractmethod
    def _build(self, reader: HeadReader) -> Head:
        """Read all tensors of the head."""
        ...

    def reading(self, source: TensorSource) -> Self:
        """This checkpoint with other tensors, for a head of the same form."""
        other = copy.copy(self)
        other._given = source
        return other

    def _open(self) -> TensorSource:
        """All that the checkpoint holds."""
        return self._stored() if self._given is None else self._given

    def _stored(self) -> TensorSource:
        """The same on disk."""
        return open_weights(self._directory)

    def _open_tensors(self) -> TensorSource:
        """The head's tensors by the names that ``_build`` reads."""
        return head_source(self._open())

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
        parallel: TensorParallel = SINGLE_RANK,
    ) -> Head:
        """Read the weights; an embedding or lm_head that the head lacks is the target's.

        Args:
            shared: the target's weights.
            kernels: the backend that runs the head.
            dtype: dtype of every weight.
            device: device of every weight.
            max_positions: rows of the rotary table.
            token_ids: [V'] int64, ascending, on the device: the only tokens to propose, for a
                head without a token map of its own.
            quantize_fp8: whether projections become fp8, except in a mixture of experts.
            parallel: the ranks that divide the head.

        Raises:
            CheckpointError: a tensor is missing or differs in shape from the config.
            UnsupportedError: only pickled weights, tensors that the head does not use, or a format
                that the kernels have no products of.
            DrafterMismatchError: the shared weights do not fit the head.
        """
        form = self.quantization
        form.require_products(kernels)
        if self._is_dummy and self._given is None:
            optional = self.optional_tensors
            weights = dummy_reader(
                self._directory, kernels, dtype, device, optional, parallel, form
            )
        else:
            source = self._open_tensors()
            weights = WeightReader(source, kernels, dtype, device, parallel, quantization=form)
        weights = replace(weights, quantize_fp8=quantize_fp8)
        head = self._build(HeadReader(weights, shared, max_positions, token_ids))
        weights.require_all_read(allowed=self.unused_tensors)
        return head


def refuse(location: str, *features: tuple[object, str]) -> None:
    """Refuse a head with any of these features: whether it has each, and its name.

    Raises:
        UnsupportedError: the head has one; the first is named.
    """
    for found, what in features:
        if found:
            raise UnsupportedError(
                f"{location}: a draft head with {what} is not supported", "use another head"
            )


def require_sizes(vocab_size: int, hidden_size: int, target: ModelConfig) -> None:
    """Refuse a head trained for another vocabulary or hidden size.

    Raises:
        DrafterMismatchError: one of the two differs.
    """
    for mine, theirs, what in (
        (vocab_size, target.vocab_size, "tokens"),
        (hidden_size, target.hidden_size, "hidden elements"),
    ):
        if mine != theirs:
            raise DrafterMismatchError(
                f"the draft head expects a target of {mine} {what}, the target has {theirs}",
                ANOTHER_HEAD,
            )


def require_layers(ids: tuple[int, ...], num_target_layers: int) -> None:
    """Refuse a head that reads layers beyond the target's.

    Raises:
        DrafterMismatchError: an id is not in 0 .. ``num_target_layers``.
    """
    if not all(0 <= i <= num_target_layers for i in ids):
        raise DrafterMismatchError(
            f"the draft head reads layers {ids}, the target has {num_target_layers} layers",
            ANOTHER_HEAD,
        )
