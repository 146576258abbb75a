"""What a drafter may read after a commit.

A drafter chooses with the target's own noise, so that the two agree when sampling too.

The token that is emitted never depends on a draft (docs/lossless.md), so this can raise
acceptance and cannot bias the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from sametoken.models.base import HiddenStates
from sametoken.ops.backend import Kernels
from sametoken.ops.step.types import (
    CatchUp,
    Chains,
    StepInputs,
    StepOps,
)
from sametoken.state.sequences import Sequences

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Derived lengths of one step's B requests.

    The step computed positions ``x.num_computed .. end - 1`` of each request for good. Rejected
    rows lie at ``end`` and above and are not among the live rows. The true token at ``end`` exists
    for every request: the next prompt token inside a prompt, the token just sampled otherwise.

    Attributes:
        x: the step's inputs.
        hidden: the target's hidden states of the step's rows.
        end: [B] int64; ``end == num_tokens - 1`` for requests that sample.
        num_tokens: [B] int64, committed tokens after the step.
        kernels, ops: operations of models and of steps.
    """

    x: StepInputs
    hidden: HiddenStates
    end: Tensor
    num_tokens: Tensor
    sequences: Sequences = field(repr=False)
    kernels: Kernels = field(repr=False)
    ops: StepOps = field(repr=False)

    @property
    def slots(self) -> Tensor:
        """[B] int64, slots of the requests."""
        return self.x.slots

    @property
    def samples(self) -> Tensor:
        """[B] bool, requests that go on to a next window."""
        return self.x.samples

    @property
    def num_speculative_tokens(self) -> int:
        """k."""
        return self.x.num_speculative_tokens

    def catch_up(self) -> CatchUp:
        """The live rows of every request, each with the token after it (draft heads)."""
        return self.ops.catch_up(self.sequences, self.x, self.end, with_newest=False)

    def catch_up_with_newest(self) -> CatchUp:
        """The live rows, and the newest token at ``end`` of every request that samples.

        Each with its own token (draft models).
        """
        return self.ops.catch_up(self.sequences, self.x, self.end, with_newest=True)

    def advanced(self, chains: Chains) -> Chains:
        """The chains one position on."""
        return self.ops.advanced(self.sequences, chains)

    def tokens_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Committed tokens of [T] slots and positions, as a copy. Positions < num_tokens."""
        return self.sequences.token_ids[slots, positions]

    def search(self, find: Callable[[Tensor, Tensor, Tensor], Found]) -> Found:
        """What ``find(token_ids, slots, num_tokens)`` finds in the slots' committed tokens.

        ``find`` only reads; tokens at ``num_tokens`` and above are undefined.
        """
        return find(self.sequences.token_ids, self.slots, self.num_tokens)


class SamplingView(Protocol):
    """What a drafter reads of the slots' sampling parameters."""

    @property
    def temperature(self) -> Tensor:
        """[S] fp32, 0 where the request is greedy."""
        ...

    @property
    def seed(self) -> Tensor:
        """[S] int64, names the request's noise."""
        ...


@dataclass(frozen=True, slots=True)
class Coupling:
    """The keyed choice of tokens.

    Attributes:
        sample: ``Kernels.sample`` of the target's kernels.
        parameters: the slots' parameters, read anew at every choice.
    """

    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    parameters: SamplingView

    def choose(
        self, logits: Tensor, slots: Tensor, positions: Tensor, token_ids: Tensor | None = None
    ) -> Tensor:
        """[R] int64 tokens for the given positions of the slots.

        Args:
            logits: [R, V'] fp32.
            slots: [R] int64.
            positions: [R] int64, where the chosen tokens would stand.
            token_ids: [V'] int64, ascending ids of the target's vocabulary that the columns
                stand for; None: column i is token i.
        """
        temperature, seed = self.parameters.temperature, self.parameters.seed
        return self.sample(logits, temperature, seed, positions, token_ids, slots)
