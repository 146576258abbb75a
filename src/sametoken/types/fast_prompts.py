"""Which positions of a prompt are in the fast form (``EngineConfig.fast_prompts_from``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sametoken.types.plan import StepPlan


@dataclass(frozen=True, slots=True)
class FastForm:
    """The fast form of a model's prompts.

    Attributes:
        least_len: tokens from which prompts have it; 0: none has.
        multiple: positions at which its chunks begin are multiples of it.
    """

    least_len: int = 0
    multiple: int = 1

    @property
    def expands(self) -> bool:
        """Whether latents are expanded, by chunks that begin anywhere; recurrent layers' do not."""
        return self.least_len > 0 and self.multiple == 1

    def end(self, prompt_len: int) -> int:
        """Positions of a prompt, the first ones, that are in it: by the prompt's length alone.

        The last token is no part of it if it would be a chunk of its own, which is a window.
        """
        if not 0 < self.least_len <= prompt_len:
            return 0
        return prompt_len - (prompt_len % self.multiple == 1 % self.multiple)


NO_FAST_FORM = FastForm()


@dataclass(frozen=True, slots=True)
class ExpandedChunk:
    """A chunk of a step whose latents are expanded.

    Attributes:
        slot: of its request.
        first_row, num_rows: its rows.
        stop: number of positions that its last row sees.
    """

    slot: int
    first_row: int
    num_rows: int
    stop: int


def expanded_chunks(plan: StepPlan, row_starts: Sequence[int]) -> tuple[ExpandedChunk, ...]:
    """The chunks of a plan whose latents are expanded, given every request's first row."""
    return tuple(
        ExpandedChunk(one.slot, first, one.num_query, one.expanded_to)
        for one, first in zip(plan.requests, row_starts, strict=False)
        if one.expanded_to
    )
