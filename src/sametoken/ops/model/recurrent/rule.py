"""The interface between recurrent rules and passes (fold by position).

A rule's sizes and its layers' weights are two frozen dataclasses in the rule's own folder
(``ops.model.gated_delta_rule.rule``). Passes decide when a row runs, and keep its raw inputs; the
rule computes the row. A backend runs a layer with its kernels for the rule's weights or, on a CPU,
row by row in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from sametoken.errors import InvariantError

#: Rows of a chunk of a prompt in the fast form: all begin at multiples of it.
FAST_ROWS = 64
#: Without drafts, a GPU stores states at positions that are multiples of it: a pass runs up to
#: three pending rows again, and one in four writes a state, which takes longer than these rows.
STATE_STRIDE = 4


class RecurrentRule(Protocol):
    """The sizes of one kind of recurrent layer; layers of equal rules share memory.

    Attributes:
        state_shape: of a slot's state, fp32.
        conv_kernel: K, the width of the short convolution; 1: none.
        conv_channels: C, the width of a raw row's convolved part; 0 without convolution.
        gate_sizes: widths of a raw row's other parts.
        out_features: width of a row's output.
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
        """The shard of one of ``size`` ranks."""
        ...


class RowFunction(Protocol):
    """The row function of the reference, the same in decode, verify, fold and prefill."""

    def __call__(self, state: Tensor, window: Tensor, gates: Tensor) -> Tensor:
        """Prepare a row, advance the state by it in place, and read it: [out_features] fp32.

        Args:
            state: [*state_shape] fp32.
            window: [K, C] fp32, inputs of the convolution, the row's own last.
            gates: [G] fp32, the row's gates concatenated.
        """
        ...


class ChunkFunction(Protocol):
    """The fast form of the reference, of one chunk: n rows, at most ``FAST_ROWS``."""

    def __call__(self, state: Tensor, mixed: Tensor, gates: Tensor) -> Tensor:
        """As ``RowFunction`` of every row: [n, out_features] fp32, whose bits n does not change.

        Args:
            state: [*state_shape] fp32.
            mixed: [K - 1 + n, C] fp32, inputs of the convolution.
            gates: [n, G] fp32.
        """
        ...


class RuleWeights(Protocol):
    """One layer's weights, except its projections."""

    @property
    def rule(self) -> RecurrentRule: ...

    def row_function(self) -> RowFunction:
        """The layer's row function, with weights in fp32."""
        ...

    def chunk_function(self) -> ChunkFunction:
        """The layer's fast form, likewise."""
        ...


@dataclass(frozen=True, slots=True)
class RawRows:
    """A pass's T rows after the input projections; each part may be strided.

    Attributes:
        mixed: [T, C], before the convolution.
        gates: the parts without convolution: [T, n] for each n of ``RecurrentRule.gate_sizes``.
    """

    mixed: Tensor
    gates: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        assert all(part.stride(1) == 1 for part in (self.mixed, *self.gates))
        assert {part.dtype for part in self.gates} == {self.mixed.dtype}

    @property
    def strides(self) -> tuple[int, ...]:
        """Row strides of all parts."""
        return self.mixed.stride(0), *(part.stride(0) for part in self.gates)


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """The memory of S slots in one recurrent layer, with room for P pending rows each.

    Attributes:
        states: [S, *state_shape] fp32, with all positions below ``Folded.position`` folded in.
        history: [S, K - 1, C], raw inputs of the convolution at the last of these positions.
        pending_mixed: [S, P, C], raw rows at ``Folded.position`` and above.
        pending_gates: [S, P, G], their gates concatenated.
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
        """P, the most pending rows of a slot."""
        return self.pending_mixed.shape[1]

    @property
    def max_runs(self) -> int:
        """The most runs of a pass that have rows: slots but the reserved one."""
        return self.states.shape[0] - 1

    def require_dtype(self, raw: RawRows) -> None:
        """Raise ``InvariantError`` if the memory has another dtype than the raw rows."""
        if raw.mixed.dtype != self.history.dtype:
            raise InvariantError(
                f"raw inputs in {raw.mixed.dtype} are kept in {self.history.dtype}"
            )


@dataclass(frozen=True, slots=True)
class FastPrompts:
    """The positions of each slot's prompt that recurrent layers run in the fast form.

    Attributes:
        prompt_len: [S] int64.
        least_len: tokens from which a prompt has that form (``types.fast_prompts.FastForm``).
    """

    prompt_len: Tensor
    least_len: int


@dataclass(frozen=True, slots=True)
class Folded:
    """Folded and pending rows of a model's recurrent layers; only passes write it.

    Attributes:
        position: [S] int64, number of folded positions.
        num_pending: [S] int64, number of pending rows after them.
        max_pending: P, the most pending rows of a slot.
        state_stride: a GPU folds multiples of it at once, except in the fast form.
    """

    position: Tensor
    num_pending: Tensor
    max_pending: int
    state_stride: int


class RecurrentPass(Protocol):
    """One forward pass over a model's slots: ``run`` once per layer, then ``finish``."""

    def run(self, weights: RuleWeights, raw: RawRows, memory: LayerMemory) -> Tensor:
        """Run the pass's rows in one layer, folded ones first: [T, out_features].

        Sums run in fp32 and round once, to the dtype of the raw rows.

        Raises:
            InvariantError: the memory cannot hold these inputs exactly.
        """
        ...

    def finish(self) -> None:
        """Update ``Folded`` after all layers have run."""
        ...
