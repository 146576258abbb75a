"""One verdict for several ranks in a captured step: rank 0's is broadcast, and committed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sametoken.layers.parallel import TensorParallel
from sametoken.state.padded import Judgement, PaddedInputs, PaddedLengths, commit
from sametoken.state.sequences import Sequences


class KeyJudge(Protocol):
    """Judges windows by their keys, and commits nothing; ``kernels.commit.judge``."""

    def __call__(self, keys: Tensor, x: PaddedInputs, rows_per_window: int, /) -> Judgement:
        """The verdict on [B * W, tiles] keys."""
        ...


@dataclass(frozen=True, slots=True)
class SharedJudge:
    """A ``PaddedJudge`` for several ranks.

    Attributes:
        inner: judges; what it says on other ranks than 0 is replaced.
        parallel: the ranks.
    """

    inner: KeyJudge
    parallel: TensorParallel

    def __call__(
        self, sequences: Sequences, keys: Tensor, x: PaddedInputs, window: int
    ) -> tuple[Judgement, PaddedLengths]:
        """Judge, and commit what rank 0 decided."""
        verdict = self.inner(keys, x, window)
        decided = torch.stack((verdict.num_accepted, verdict.next_token))
        num_accepted, next_token = self.parallel.broadcast(decided).unbind(0)
        verdict = replace(verdict, num_accepted=num_accepted, next_token=next_token)
        return verdict, commit(sequences, x, num_accepted, next_token)
