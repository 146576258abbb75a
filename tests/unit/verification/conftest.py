from dataclasses import dataclass, field

import pytest
import torch

from sametoken.core.plan import Admission, PlanRow, StepPlan
from sametoken.core.sampling_params import SamplingParams
from sametoken.kernels.reference import ReferenceKernels
from sametoken.state import commit
from sametoken.state.inputs import StepInputs, stage
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.verification.keyed import KeyedVerifier

GARBAGE = 3  # what lies above num_tokens: a valid id, so that reading it is not an error


@dataclass(frozen=True)
class Row:
    """One plan row: what is committed in a slot and what its window offers."""

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_query: int = 1
    samples: bool = True
    num_computed: int | None = None

    @property
    def window(self) -> int:
        return len(self.drafts) + 1 if self.samples else 0


@dataclass(frozen=True)
class Step:
    """A staged step and what it was staged from."""

    rows: tuple[Row, ...]
    x: StepInputs
    sequences: Sequences
    table: SamplingTable
    verifier: KeyedVerifier

    @property
    def num_logits(self) -> int:
        return sum(row.window for row in self.rows)


def stage_rows(rows, slots=None, spare_slots=2):
    """Commit the rows' tokens to their slots (descending unless given) and stage one step."""
    count = len(rows) + spare_slots
    slots = slots or [count - 1 - index for index in range(len(rows))]
    width = max(len(row.drafts) for row in rows) + 1
    longest = max(len(row.prompt) + len(row.output) for row in rows) + width + 1
    sequences = Sequences.allocate(
        max_num_seqs=count,
        max_len=longest,
        num_drafts=width,
        block_size=4,
        reserved_block=0,
        device=torch.device("cpu"),
    )
    sequences.token_ids.fill_(GARBAGE)
    sequences.draft_ids.fill_(GARBAGE)
    table = SamplingTable.allocate(count, torch.device("cpu"))
    for slot, row in zip(slots, rows, strict=True):
        admission = Admission(slot, row.prompt, 0, row.params, row.stop_ids, row.bad_words)
        commit.admit(sequences, admission)
        table.admit(admission)
        num_tokens = len(row.prompt) + len(row.output)
        first = num_tokens - row.num_query if row.num_computed is None else row.num_computed
        sequences.token_ids[slot, :num_tokens] = torch.tensor(row.prompt + row.output)
        sequences.num_tokens[slot] = num_tokens
        sequences.num_computed[slot] = first
        sequences.num_drafts[slot] = len(row.drafts)
        sequences.draft_ids[slot, : len(row.drafts)] = torch.tensor(row.drafts, dtype=torch.int64)
    plan_rows = tuple(
        PlanRow(slot, row.num_query, len(row.drafts), row.samples)
        for slot, row in zip(slots, rows, strict=True)
    )
    x = stage(sequences, StepPlan(0, rows=plan_rows))
    verifier = KeyedVerifier(ReferenceKernels(), sequences, table)
    return Step(tuple(rows), x, sequences, table, verifier)


@pytest.fixture(scope="session")
def make_row():
    return Row


@pytest.fixture(scope="session")
def stage_step():
    return stage_rows
