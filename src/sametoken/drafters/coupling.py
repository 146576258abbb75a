"""A drafter chooses with the target's own noise, so that the two agree when sampling too.

The token that is emitted never depends on a draft (docs/lossless.md), so this can raise
acceptance and cannot bias the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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
