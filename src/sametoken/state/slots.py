"""What the host sets in ``Sequences``: a slot's new request, its blocks, and the loss of its KV.

The functions return writes, which ``StepOps.write_tables`` carries out. Together with
``StepOps.commit`` and ``publish`` these are the only writers
(tests/architecture/test_single_writer.py). Imported by ``runner.runner`` only.
"""

from __future__ import annotations

from sametoken.ops.step.types import TableWrite
from sametoken.state.sequences import Sequences
from sametoken.types.plan import Admission, BlockAssignment


def admit(sequences: Sequences, admission: Admission) -> list[TableWrite]:
    """Assign a slot to a request: its prompt is committed, its cached prefix computed."""
    slot, prompt = admission.slot, admission.prompt_token_ids
    return [
        TableWrite(sequences.token_ids[slot, : len(prompt)], prompt),
        TableWrite(sequences.prompt_len[slot], len(prompt)),
        TableWrite(sequences.num_tokens[slot], len(prompt)),
        TableWrite(sequences.num_computed[slot], admission.num_cached),
        TableWrite(sequences.num_drafts[slot], 0),
    ]


def restart(sequences: Sequences, slot: int) -> TableWrite:
    """Forget that a slot's positions are computed: its KV is lost. Its tokens stay.

    Its drafts are those of no row until it has replayed: a chunk takes none and leaves none.
    """
    return TableWrite(sequences.num_computed[slot], 0)


def assign_blocks(sequences: Sequences, assignment: BlockAssignment) -> TableWrite:
    """Extend part of a slot's block table, or replace it after a swap-in."""
    first = assignment.first_index
    last = first + len(assignment.block_ids)
    return TableWrite(sequences.block_table[assignment.slot, first:last], assignment.block_ids)
