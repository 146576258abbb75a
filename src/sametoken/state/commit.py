"""Host writes to ``Sequences``: a slot's new request, its blocks, and the loss of its KV.

Together with ``StepOps.commit`` and ``publish`` these are the only writers
(tests/architecture/test_single_writer.py). Imported by ``runner.runner`` only.
"""

from __future__ import annotations

from sametoken.state.sequences import Sequences
from sametoken.state.upload import upload
from sametoken.types.plan import Admission, BlockAssignment


def admit(sequences: Sequences, admission: Admission) -> None:
    """Assign a slot to a request: its prompt is committed, its cached prefix computed."""
    slot, prompt = admission.slot, admission.prompt_token_ids
    sequences.token_ids[slot, : len(prompt)] = upload(prompt, sequences.device)
    # ``fill_`` passes the value as a launch argument; assignment would wait for a copy.
    sequences.prompt_len[slot].fill_(len(prompt))
    sequences.num_tokens[slot].fill_(len(prompt))
    sequences.num_computed[slot].fill_(admission.num_cached)
    sequences.num_drafts[slot].fill_(0)


def restart(sequences: Sequences, slot: int) -> None:
    """Forget that a slot's positions are computed: its KV is lost. Its tokens stay."""
    sequences.num_computed[slot].fill_(0)
    sequences.num_drafts[slot].fill_(0)


def assign_blocks(sequences: Sequences, assignment: BlockAssignment) -> None:
    """Extend part of a slot's block table, or replace it after a swap-in."""
    first = assignment.first_index
    last = first + len(assignment.block_ids)
    blocks = upload(assignment.block_ids, sequences.device)
    sequences.block_table[assignment.slot, first:last] = blocks
