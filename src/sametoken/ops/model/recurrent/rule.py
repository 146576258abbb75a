"""What folding by position asks of a recurrent rule, and what passes are given.

A rule's sizes and its layers' weights are two frozen dataclasses of its own folder
(``ops.model.gated_delta_rule.rule``). The passes know when a row runs, and keep its raw inputs;
the rule knows what a row does. A backend runs a layer by kernels that it has for the rule's
weights, or, on a CPU, row by row in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from sametoken.errors import InvariantError


class RecurrentRule(Protocol):
    """The sizes of one kind of recurrent layer; equal ones share memory.

    Attributes:
        state_shape: of a slot's state, fp32.
        conv_kernel: K, positions that the short convolution sees, its own included; 1: none.
        conv_channels: C, the part of a raw row that passes the convolution; 0 without one.
        gate_sizes: widths of the parts of a raw row beside that.
        out_features: width of what a row puts out.
    """

    @property
    def state_shape(self) -> tuple[int, ...]: ...

    @property
    def conv_kernel(self) -> int: ...

    @property
    def conv_channels(self) -> int: ...

    @property
    def gate_sizes(self) -> tuple[int, ...]: ...

    @property
    def out_features(self) -> int: ...

    def divided(self, size: int) -> Self:
        """What each of ``size`` ranks has."""
        ...


class RowFunction(Protocol):
    """The one row function of decode, verify, fold and prefill, as the reference runs it."""

    def __call__(self, state: Tensor, window: Tensor, gates: Tensor) -> Tensor:
        """Prepare a row, advance the state by it in place, and read it: [out_features] fp32.

        Args:
            state: [*state_shape] fp32.
            window: [K, C] fp32, the row's own input of the convolution last.
            gates: [G] fp32, the row's gates side by side.
        """
        ...


class RuleWeights(Protocol):
    """One layer's weights between its projections."""

    @property
    def rule(self) -> RecurrentRule: ...

    def row_function(self) -> RowFunction:
        """The layer's, its weights in fp32."""
        ...


@dataclass(frozen=True, slots=True)
class RawRows:
    """A pass's T rows as projected; rows of each part may lie apart.

    Attributes:
        mixed: [T, C], before the convolution.
        gates: what does not pass it: [T, n] for each of ``RecurrentRule.gate_sizes``.
    """

    mixed: Tensor
    gates: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        assert all(part.stride(1) == 1 for part in (self.mixed, *self.gates))
        assert {part.dtype for part in self.gates} == {self.mixed.dtype}

    @property
    def strides(self) -> tuple[int, ...]:
        """How far apart the rows of each part lie."""
        return self.mixed.stride(0), *(part.stride(0) for part in self.gates)


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What S slots keep in one recurrent layer, k pending rows each.

    Attributes:
        states: [S, *state_shape] fp32, all positions below ``Folded.position`` folded in.
        history: [S, K - 1, C], raw inputs of the convolution at the last of them.
        pending_mixed: [S, k, C], raw rows at ``Folded.position`` and above.
        pending_gates: [S, k, G], their gates side by side.
    """

    states: Tensor
    history: Tensor
    pending_mixed: Tensor
    pending_gates: Tensor

    def __post_init__(self) -> None:
        held = (self.states, self.history, self.pending_mixed, self.pending_gates)
        assert all(tensor.is_contiguous() for tensor in held)
        assert len({tensor.dtype for tensor in held[1:]}) == 1

    @property
    def max_pending(self) -> int:
        """k, rows that pending has room for."""
        return self.pending_mixed.shape[1]

    def require_dtype(self, raw: RawRows) -> None:
        """Raise ``InvariantError`` if raw rows are kept in another dtype."""
        if raw.mixed.dtype != self.history.dtype:
            raise InvariantError(
                f"raw inputs in {raw.mixed.dtype} are kept in {self.history.dtype}"
            )


@dataclass(frozen=True, slots=True)
class Folded:
    """How far the recurrent layers of a model are folded; passes alone write it.

    Attributes:
        position: [S] int64, positions that each slot has folded.
        num_pending: [S] int64, rows that it holds from there on.
        max_pending: k, how many it can hold.
    """

    position: Tensor
    num_pending: Tensor
    max_pending: int


class RecurrentPass(Protocol):
    """One forward pass over a model's slots: ``run`` once for every layer, then ``finish``."""

    def run(self, weights: RuleWeights, raw: RawRows, memory: LayerMemory) -> Tensor:
        """Run the pass's rows in one layer, folded ones first: [T, out_features].

        Sums run in fp32 and round once, to the dtype of the raw rows.

        Raises:
            InvariantError: the memory cannot hold these inputs exactly.
        """
        ...

    def finish(self) -> None:
        """Settle how far each slot is folded, once all layers have run."""
        ...
