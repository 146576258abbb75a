"""Inputs of a drafter after a commit, and keyed sampling with the target's noise.

Drafter and target sample with the same noise, so they agree in sampling too. Emitted tokens
never depend on a draft (docs/lossless.md): this raises acceptance and cannot bias the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from sametoken.models.base import HiddenStates
from sametoken.ops.backend import Kernels
from sametoken.ops.step.types import CatchUp, Chains, StepInputs, StepOps
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class DraftContext:
    """State of one step's B requests after the commit.

    The step committed positions ``x.num_computed .. end - 1`` of each request. Rejected rows lie
    at ``end`` and above and are not live. The committed token at ``end`` exists for every
    request: the next prompt token inside a prompt, the token just sampled otherwise.

    Attributes:
        x: the step's inputs.
        hidden: the target's hidden states of the step's rows; see ``ForwardOutput``.
        end: [B] int64; ``end == num_tokens - 1`` for requests that sample.
        num_tokens: [B] int64, committed tokens after the step.
        num_wanted: the most drafts of a request that are worth a pass each, 0..k.
        sequences: device state, read only.
        kernels, ops: operations of models and of steps.
    """

    x: StepInputs
    hidden: HiddenStates
    end: Tensor
    num_tokens: Tensor
    num_wanted: int
    sequences: Sequences = field(repr=False)
    kernels: Kernels = field(repr=False)
    ops: StepOps = field(repr=False)

    @property
    def slots(self) -> Tensor:
        """[B] int64, slots of the requests."""
        return self.x.slots

    @property
    def samples(self) -> Tensor:
        """[B] bool, requests that have a next window."""
        return self.x.samples

    @property
    def num_speculative_tokens(self) -> int:
        """k."""
        return self.x.num_speculative_tokens

    def catch_up(self) -> CatchUp:
        """Live rows of every request, each with the token after it (draft heads)."""
        return self.ops.catch_up(self.sequences, self.x, self.end, with_newest=False)

    def catch_up_with_newest(self) -> CatchUp:
        """Live rows, plus the row at ``end`` of requests that sample.

        Each row has its own token (draft models).
        """
        return self.ops.catch_up(self.sequences, self.x, self.end, with_newest=True)

    def advanced(self, chains: Chains) -> Chains:
        """The chains moved by one position."""
        return self.ops.advanced(self.sequences, chains)

    def tokens_at(self, slots: Tensor, positions: Tensor) -> Tensor:
        """A copy of the committed tokens at [T] slots and positions < num_tokens."""
        return self.sequences.token_ids[slots, positions]

    def search(self, find: Callable[[Tensor, Tensor, Tensor], Found]) -> Found:
        """Result of ``find(token_ids, slots, num_tokens)`` on the slots' committed tokens.

        ``find`` must not write; tokens at ``num_tokens`` and above are undefined.
        """
        return find(self.sequences.token_ids, self.slots, self.num_tokens)


@dataclass(frozen=True, slots=True)
class Coupling:
    """Keyed sampling with the target's noise.

    Attributes:
        sample: ``Kernels.sample`` of the target's backend.
        table: the slots' parameters, read at every call.
    """

    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    table: SamplingTable

    def choose(
        self, logits: Tensor, slots: Tensor, positions: Tensor, token_ids: Tensor | None = None
    ) -> Tensor:
        """[R] int64 tokens for the given positions of the slots.

        Args:
            logits: [R, V'] fp32.
            slots: [R] int64.
            positions: [R] int64, positions of the chosen tokens.
            token_ids: [V'] int64, ascending: the target's token of each column; None: column i
                is token i.
        """
        temperature, seed = self.table.temperature, self.table.seed
        return self.sample(logits, temperature, seed, positions, token_ids, slots)
