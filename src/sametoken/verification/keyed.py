"""Keyed verification: a draft is accepted if and only if the target would choose it.

The target's token at a window row is a function of the row's logits, the request's seed
and the position. It exists whether or not a draft was offered, so what is emitted cannot
depend on the drafts.
"""

from __future__ import annotations

from collections.abc import Callable

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
from sametoken.verification.logprobs import concatenate, score_tokens
from sametoken.verification.windows import settle, window_offsets

# Bounds the logits held at once while a prompt is scored: 64 rows of 150k are 38 MB.
_ROWS_AT_A_TIME = 64


class KeyedVerifier:
    """``Verifier`` by keyed sampling; contracts are those of the protocol.

    Args:
        kernels: cut off unlikely tokens, and choose among the others.
        sequences: committed tokens; read only.
        table: sampling parameters by slot; written by ``admit``.
    """

    def __init__(self, kernels: Kernels, sequences: Sequences, table: SamplingTable) -> None:
        self._kernels = kernels
        self._sequences = sequences
        self._table = table
        self._grammars = SlotGrammars(sequences)

    def admit(self, admission: Admission) -> None:
        """Take up a slot's sampling parameters."""
        self._table.admit(admission)
        self._grammars.admit(admission)

    def judge(self, logits: Tensor, x: StepInputs) -> Verdict:
        """Choose the target's token at every window row and count the drafts equal to it.

        Args:
            logits: [L, V] fp32; overwritten where a request's parameters change them.
            x: the step's inputs.
        """
        owner = x.logits_owner
        slots = x.slots[owner]
        has_nan = logits.amax(dim=-1).isnan()
        scored = (self._table.num_logprobs[slots] >= 0).nonzero().squeeze(1)
        raw = logits[scored]
        stuck = process_logits(
            logits, x, self._sequences, self._table, self._kernels, self._grammars
        )
        tokens = self._kernels.sample(
            logits,
            self._table.temperature[slots],
            self._table.seed[slots],
            x.rows.positions[x.logits_indices] + 1,
        )
        matches = _leading_matches(tokens, x, stuck > 0)
        settled = settle(x, tokens, has_nan | (stuck > 0), matches)
        logprobs = None
        if scored.numel():
            num_top = self._table.num_logprobs[slots[scored]]
            logprobs = score_tokens(raw, tokens[scored], owner[scored], num_top, int(num_top.max()))
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
        slots, positions = x.rows.slots, x.rows.positions
        asked = self._table.num_prompt_logprobs[slots]
        in_prompt = positions + 1 < self._sequences.prompt_len[slots]
        rows = ((asked >= 0) & in_prompt).nonzero().squeeze(1)
        if not rows.numel():
            return None
        width = int(asked[rows].max())
        parts = []
        for first in range(0, rows.shape[0], _ROWS_AT_A_TIME):
            some = rows[first : first + _ROWS_AT_A_TIME]
            chosen = self._sequences.token_ids[slots[some], positions[some] + 1]
            logits = compute_logits(hidden[some])
            parts.append(score_tokens(logits, chosen, x.row_owner[some], asked[some], width))
        return concatenate(parts)


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
