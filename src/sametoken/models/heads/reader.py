"""Reading a draft head: its own tensors, and the target's tables where it has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sametoken.errors import DrafterMismatchError, UnsupportedError
from sametoken.layers.norm import RMSNorm
from sametoken.layers.parallel import TensorParallel, of_rank
from sametoken.layers.share import Split
from sametoken.models.load.weights import Part, WeightReader
from sametoken.ops.backend import Kernels
from sametoken.ops.cache_types import LayerCache, divided
from sametoken.ops.weight import CutWeight, UnquantizedWeight, Weight

#: The remedy for a head of another target.
ANOTHER_HEAD = "use a head that was trained for this target"


@dataclass(frozen=True, slots=True)
class HeadInUse:
    """A target's lm_head of which a head that runs has made its own: nobody reads it again.

    Attributes:
        made: what ``lm_head_of`` has made of it.
    """

    made: Weight


class SharedWeights(Protocol):
    """The target's weights that a head may share; embedding and lm_head are [V, hidden]."""

    embedding: UnquantizedWeight
    final_norm: RMSNorm

    @property
    def head(self) -> Weight | HeadInUse:
        """The target's lm_head, or this rank's rows of it."""
        ...

    def whole_head(self) -> Weight | HeadInUse:
        """All rows of the target's lm_head; read from disk if this rank has only a part."""
        ...


@dataclass(frozen=True, slots=True)
class HeadReader:
    """Reads a head's weights; an embedding or lm_head that it lacks is the target's.

    Attributes:
        weights: reads the head's tensors, with the kernels that run it.
        shared: the target's weights.
        max_positions: rows of the rotary table.
        token_ids: [V'] int64, ascending, the only tokens to propose; None: all, or those of the
            head's own map.
    """

    weights: WeightReader
    shared: SharedWeights
    max_positions: int
    token_ids: Tensor | None

    def caches(self, declared: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
        """Of declarations over all ranks, those of this one."""
        return divided(declared, self.weights.parallel.size)

    def embedding(self, rows: int, hidden_size: int) -> UnquantizedWeight:
        """The embedding [rows, hidden_size], whole on every rank.

        Raises:
            DrafterMismatchError: the head has none, and the target's has another shape.
        """
        name = "embed_tokens"
        if f"{name}.weight" in self.weights:
            return self.weights.packed(hidden_size, Part(f"{name}.weight", rows))
        self._require_of_target(name, rows, hidden_size)
        return self.shared.embedding

    def lm_head(
        self,
        rows: int,
        hidden_size: int,
        permutation: Tensor | None = None,
        name: str = "lm_head",
    ) -> Weight:
        """This rank's rows of the head's own [rows, hidden_size] if it has one, else the target's.

        ``permutation`` is as in ``Part``, for the head's own over all ranks.

        Raises:
            DrafterMismatchError: as in ``embedding``.
            UnsupportedError: as ``lm_head_of``.
        """
        linear = self.weights.quantization.format_of(name, self.weights.source)
        if linear is not None:
            split = Split.ROWS if self.token_ids is None else Split.WHOLE
            own = linear.read(self.weights, hidden_size, (Part(name, rows, permutation, split),))
            return own if self.token_ids is None else self.made_of(own)
        if f"{name}.weight" not in self.weights:
            self._require_of_target(name, rows, hidden_size)
            return self.target_lm_head()
        in_order = permutation is None or bool((permutation.diff() == 1).all())
        if in_order and self.token_ids is None:
            own_part = Part(f"{name}.weight", rows, split=Split.ROWS)
            return self.weights.projection(self.weights.packed(hidden_size, own_part))
        whole = Part(f"{name}.weight", rows, permutation)
        return self.made_of(self.weights.packed(hidden_size, whole))

    def target_lm_head(self) -> Weight:
        """``lm_head_of`` the target's, which the reader packs and rounds as projections."""
        weights = self.weights
        return target_lm_head(
            self.shared, weights.kernels, self.token_ids, weights.parallel, weights.quantize_fp8
        )

    def made_of(self, whole: Weight) -> Weight:
        """This rank's rows of a whole lm_head, with the reader's tokens and rounding."""
        weights, rows = self.weights, self.token_ids
        if rows is None and weights.parallel.size > 1:
            rows = torch.arange(whole.out_features, device=weights.device)
        rows = own_rows(rows, weights.parallel)
        return lm_head_of(weights.kernels, whole, rows, quantize_fp8=weights.quantize_fp8)

    def _require_of_target(self, name: str, rows: int, hidden_size: int) -> None:
        """Refuse a head that lacks a table and expects another than the target's."""
        table = self.shared.embedding
        if (table.out_features, table.in_features) != (rows, hidden_size):
            raise DrafterMismatchError(
                f"the draft head has no {name} of its own and expects one of "
                f"{rows} x {hidden_size}, the target's is {table.out_features} x "
                f"{table.in_features}",
                ANOTHER_HEAD,
            )


def own_rows(token_ids: Tensor | None, parallel: TensorParallel) -> Tensor | None:
    """This rank's part of the tokens that a head may propose; None: all."""
    if token_ids is None:
        return None
    own = of_rank(range(len(token_ids)), parallel)
    return token_ids[own.start : own.stop]


def target_lm_head(
    shared: SharedWeights,
    kernels: Kernels,
    token_ids: Tensor | None,
    parallel: TensorParallel,
    quantize_fp8: bool,
) -> Weight:
    """A rank's rows of the target's lm_head, as a head has it that ``parallel`` divides.

    Args:
        shared: the target's weights, which more ranks may divide.
        kernels, quantize_fp8: as in ``lm_head_of``.
        token_ids: as in ``EagleHead``.
        parallel: the ranks that divide the head.
    """
    divides = parallel.size > 1 and token_ids is None
    found = shared.head if divides else shared.whole_head()
    return lm_head_of(kernels, found, own_rows(token_ids, parallel), quantize_fp8=quantize_fp8)


def lm_head_of(
    kernels: Kernels,
    whole: Weight | HeadInUse,
    token_ids: Tensor | None,
    *,
    quantize_fp8: bool = False,
) -> Weight:
    """The projection to the logits of ``token_ids``, or of all tokens; ``whole`` is unchanged.

    With ``quantize_fp8`` a copy in fp8, of a weight that is not quantized.

    Raises:
        UnsupportedError: ``token_ids`` of a quantized weight whose rows this device cannot take.
    """
    if isinstance(whole, HeadInUse):
        return whole.made
    if token_ids is not None and isinstance(whole, CutWeight):
        return whole.cut(token_ids)
    if isinstance(whole, UnquantizedWeight):
        if token_ids is not None:
            whole = kernels.pack(whole.rows(token_ids))
        return whole.quantize_fp8() if quantize_fp8 else whole
    if token_ids is not None:
        raise UnsupportedError(
            "a quantized lm_head cannot be cut to a token_map in this format on this device",
            "leave token_map out",
        )
    return whole
