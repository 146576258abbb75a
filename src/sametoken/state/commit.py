"""The one writer of ``Sequences``. Imported by ``runner.step`` alone.

tests/architecture/test_single_writer.py holds that no other module writes
``num_tokens`` or ``num_computed``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.core.plan import Admission, BlockAssignment
from sametoken.state.inputs import StepInputs
from sametoken.state.sequences import Sequences
from sametoken.state.upload import upload


@dataclass(frozen=True, slots=True)
class CommittedLengths:
    """Lengths of the step's plan rows after the commit, [B] int64 each."""

    num_tokens: Tensor
    num_computed: Tensor


def admit(sequences: Sequences, admission: Admission) -> None:
    """Give a slot to a request: its prompt is committed, its cached prefix computed."""
    slot, prompt = admission.slot, admission.prompt_token_ids
    sequences.token_ids[slot, : len(prompt)] = upload(prompt, sequences.device)
    # ``fill_`` takes its value along with the launch; assignment would wait for a copy.
    sequences.prompt_len[slot].fill_(len(prompt))
    sequences.num_tokens[slot].fill_(len(prompt))
    sequences.num_computed[slot].fill_(admission.num_cached)
    sequences.num_drafts[slot].fill_(0)


def commit(
    sequences: Sequences, x: StepInputs, num_accepted: Tensor, next_token: Tensor
) -> CommittedLengths:
    """Make a step's accepted tokens true, for every row of every step.

    Args:
        sequences: the truth to advance.
        x: the step's inputs.
        num_accepted: [B] int64, accepted drafts; 0 for rows that do not sample.
        next_token: [B] int64, read only for rows that sample.
    """
    num_computed = x.num_computed + x.num_query + num_accepted
    num_tokens = torch.where(x.samples, x.num_tokens + num_accepted + 1, x.num_tokens)
    sequences.num_computed[x.slots] = num_computed
    sequences.num_tokens[x.slots] = num_tokens

    # Prompt rows rewrite what is there; draft rows up to the last accepted become true.
    committed = x.rows.positions < num_computed[x.row_owner]
    slots, positions = x.rows.slots[committed], x.rows.positions[committed]
    sequences.token_ids[slots, positions] = x.token_ids[committed]
    sampled = x.samples
    sequences.token_ids[x.slots[sampled], num_tokens[sampled] - 1] = next_token[sampled]
    return CommittedLengths(num_tokens, num_computed)


def publish(sequences: Sequences, x: StepInputs, draft_ids: Tensor, num_drafts: Tensor) -> None:
    """Store drafts for the next window of each plan row; rows that do not sample get none.

    Args:
        sequences: the truth to write.
        x: the step's inputs.
        draft_ids: [B, k] int64.
        num_drafts: [B] int64, 0..k.
    """
    sequences.draft_ids[x.slots] = draft_ids
    sequences.num_drafts[x.slots] = torch.where(x.samples, num_drafts, 0)


def assign_blocks(sequences: Sequences, assignment: BlockAssignment) -> None:
    """Extend (or after a swap-in, replace) part of a slot's block table."""
    first = assignment.first_index
    last = first + len(assignment.block_ids)
    blocks = upload(assignment.block_ids, sequences.device)
    sequences.block_table[assignment.slot, first:last] = blocks
