"""Layers and their blocks, and what may stand between them and the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from sametoken.layers.norm import RMSNorm, RoundingNorm
from sametoken.ops.backend import KeptRows
from sametoken.ops.weight import Normed


class Block(Protocol):
    """A part of a layer: [T, hidden] and further arguments to [T, hidden]."""

    @property
    def nbytes(self) -> int:
        """Bytes of the block's matrices."""
        ...

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        """[T, hidden], as the norm before gives it, -> [T, hidden]."""
        ...


class Matrices:
    """What a frozen dataclass of parts inherits: its bytes are those of its parts.

    A tensor is no part: norms, tables and the weights of a rule do not count.
    """

    __slots__: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        parts = (getattr(self, name) for name in self.__slots__)
        return sum(getattr(one, "nbytes", 0) for one in parts if not isinstance(one, Tensor))


@dataclass(frozen=True, slots=True)
class NoNorm:
    """In place of a norm in front of a block: the block reads the residual stream itself."""

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``x + residual`` (rounded to dtype), twice the same tensor."""
        total = x + residual
        return total, total


#: What may stand in front of a block.
BlockNorm = RMSNorm | RoundingNorm | NoNorm


class Layer(Protocol):
    """A layer of the residual stream; its first norm runs with the layer before."""

    @property
    def input_norm(self) -> BlockNorm:
        """The norm of the layer's input."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's matrices."""
        ...

    def __call__(
        self,
        x: Any,
        residual: Tensor,
        following: BlockNorm,
        *cache: Any,
        kept: KeptRows | None = None,
    ) -> tuple[Normed, Tensor]:
        """Run the layer on the residual stream [T, hidden].

        Args:
            x: [T, hidden], ``input_norm`` of ``residual``; its memory may be reused.
            residual: [T, hidden]; likewise.
            following: the norm after the layer.
            cache: the pass's rows and the layer's memory, for its token mixer (``_memory``).
            kept: the rows to return; the others run only for their memory. None: all.

        Returns:
            ``following`` of the residual stream after the layer, and that stream.
        """
        ...


def kept_of(states: Tensor, kept: KeptRows | None) -> Tensor:
    """[T, ...] of all rows to [R, ...] of those kept; None: ``states`` itself."""
    return states if kept is None else states.index_select(0, kept.index)


@dataclass(frozen=True, slots=True)
class DecoderLayer(Matrices):
    """One layer: norm, attention or another token mixer, norm, MLP."""

    input_norm: BlockNorm
    attention: Block
    post_attention_norm: BlockNorm
    mlp: Block

    def __call__(
        self,
        x: Normed,
        residual: Tensor,
        following: BlockNorm,
        *cache: Any,
        kept: KeptRows | None = None,
    ) -> tuple[Normed, Tensor]:
        """See ``Layer``."""
        attended = self.attention(x, *cache, kept=kept)
        x, residual = self.post_attention_norm.add(attended, kept_of(residual, kept))
        return following.add(self.mlp(x), residual)


@dataclass(frozen=True, slots=True)
class NormedAfter(Matrices):
    """A block whose output is normed before it is added to the residual stream."""

    block: Block
    norm: RMSNorm

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.norm(self.block(x, *args, **kwargs))


@dataclass(frozen=True, slots=True)
class ScaledAfter(Matrices):
    """A block whose output is multiplied before it is added, rounded once."""

    block: Block
    factor: float

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.block(x, *args, **kwargs) * self.factor
