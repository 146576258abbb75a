"""Keyed verification: a draft is accepted if and only if the target would choose it.

The target's token at a window row is a function of the row's logits, the request's seed
and the position. It exists whether or not a draft was offered, so what is emitted cannot
depend on the drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sametoken.core.plan import Admission
from sametoken.kernels.interface import Kernels
from sametoken.state.inputs import StepInputs
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.verification.base import TokenLogprobs, Verdict
from sametoken.verification.grammar import SlotGrammars
from sametoken.verification.logits import process_logits
from sametoken.verification.logprobs import ScoredRows, score_prompt, score_rows
from sametoken.verification.windows import sampled_rows, settle, window_offsets


class KeyedVerifier:
    """``Verifier`` by keyed sampling; contracts are those of the protocol.

    Args:
        kernels: apply the rules, cut off unlikely tokens, and choose among the others.
        sequences: committed tokens; read only.
        table: sampling parameters by slot; written by ``admit``.

    Attributes:
        grammars: of the slots; written by ``admit``.
    """

    def __init__(self, kernels: Kernels, sequences: Sequences, table: SamplingTable) -> None:
        self._kernels = kernels
        self._sequences = sequences
        self._table = table
        self.grammars = SlotGrammars(sequences)

    def admit(self, admission: Admission) -> None:
        """Take up a slot's sampling parameters."""
        self._table.admit(admission)
        self.grammars.admit(admission)

    def judge(self, logits: Tensor, x: StepInputs) -> Verdict:
        """Choose the target's token at every window row and count the drafts equal to it.

        Args:
            logits: [L, V] fp32; overwritten where a request's parameters change them.
            x: the step's inputs.
        """
        rows = sampled_rows(x)
        has_nan = logits.amax(dim=-1).isnan()
        widths = (x.num_drafts + 1) * x.samples
        scored = _rows_of(self._table.num_logprobs, x, x.window_starts, widths)
        raw = logits[scored.index]
        mask = partial(self.grammars.mask, x=x)
        stuck = process_logits(logits, rows, self._sequences, self._table, self._kernels, mask)
        tokens = self._kernels.sample(
            logits,
            self._table.temperature[rows.slots],
            self._table.seed[rows.slots],
            rows.positions + 1,
        )
        matches = _leading_matches(tokens, x, stuck > 0)
        settled = settle(x, tokens, has_nan | (stuck > 0), matches)
        logprobs = None
        if scored.index.numel():
            logprobs = score_rows(scored, raw, tokens[scored.index])
        return Verdict(
            num_accepted=settled.num_accepted,
            next_token=settled.next_token,
            tokens=tokens,
            poisoned=settled.poisoned,
            stuck=_causes(x, stuck, matches),
            logprobs=logprobs,
        )

    def score_prompt(
        self, hidden: Tensor, x: StepInputs, compute_logits: Callable[[Tensor], Tensor]
    ) -> TokenLogprobs | None:
        """Score prompt token p + 1 by the row at p, for every such row of the step.

        The row of the last prompt token predicts output and is not among them.
        """
        in_prompt = self._sequences.prompt_len[x.slots] - 1 - x.num_computed
        counts = torch.minimum(in_prompt.clamp(min=0), x.num_query)
        scored = _rows_of(self._table.num_prompt_logprobs, x, x.row_starts[:-1], counts)
        if not scored.index.numel():
            return None
        positions = x.rows.positions[scored.index]
        following = self._sequences.token_ids[x.slots[scored.owner], positions + 1]
        return score_prompt(scored, hidden, following, compute_logits)


def _rows_of(asked: dict[int, int], x: StepInputs, first: Tensor, count: Tensor) -> ScoredRows:
    """Of plan rows that asked, ``count`` rows from ``first`` on; both [B] int64.

    The compact layout is the device's, so it is read, but only if someone has asked.
    """
    windows = torch.stack((x.slots, first, count), dim=1).tolist() if asked else ()
    return ScoredRows.of(asked, windows, x.slots.device)


def _causes(x: StepInputs, stuck: Tensor, matches: Tensor) -> Tensor:
    """[B] int64: why a window is stuck, by those of its rows that decide."""
    owner = x.logits_owner
    fatal = torch.where(window_offsets(x) <= matches[owner], stuck, 0)
    return torch.zeros_like(x.slots).scatter_reduce_(0, owner, fatal, "amax")


def _leading_matches(tokens: Tensor, x: StepInputs, stuck: Tensor) -> Tensor:
    """[B] int64: drafts from each window's start that equal the target's token at their row.

    A draft before a stuck row counts as the mismatch: it is emitted as the next token, and
    the request fails at the next window's start, as it would without drafts. Plan rows
    without a window get a meaningless number.
    """
    owner, offset = x.logits_owner, window_offsets(x)
    drafts = x.token_ids[x.logits_indices].roll(-1)
    # A window's last row has no draft after it, so every window holds a mismatch.
    differs = (tokens != drafts) | (offset == x.num_drafts[owner]) | stuck.roll(-1)
    candidates = torch.where(differs, offset, x.num_drafts[owner])
    return x.num_drafts.scatter_reduce(0, owner, candidates, "amin")
