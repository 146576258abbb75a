"""Stage and commit against a device written in lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sametoken.core.plan import Admission, BlockAssignment, PlanRow, StepPlan
from sametoken.core.sampling_params import SamplingParams
from sametoken.errors import StaleInputsError
from sametoken.state.commit import admit, assign_blocks, commit, publish
from sametoken.state.inputs import stage
from sametoken.state.sequences import Sequences

BLOCK, K, SLOTS, MAX_LEN = 4, 3, 3, 48


def make_sequences() -> Sequences:
    return Sequences.allocate(
        max_num_seqs=SLOTS,
        max_len=MAX_LEN,
        num_drafts=K,
        block_size=BLOCK,
        reserved_block=99,
        device=torch.device("cpu"),
    )


def admitted(sequences: Sequences, slot: int, prompt: list[int], num_cached: int = 0) -> None:
    admit(sequences, Admission(slot, tuple(prompt), num_cached, SamplingParams(seed=0)))
    blocks = tuple(range(slot * 12, slot * 12 + 12))
    assign_blocks(sequences, BlockAssignment(slot, 0, blocks))


def check_row(x, b, row, tokens, start, offered) -> None:
    """One plan row's flat rows and window, against its committed tokens and drafts."""
    first, last = int(x.row_starts[b]), int(x.row_starts[b + 1])
    wanted = tokens[start : start + row.num_query] + offered
    positions = list(range(start, start + len(wanted)))
    assert x.token_ids[first:last].tolist() == wanted
    assert x.rows.positions[first:last].tolist() == positions
    kv = [(row.slot * 12 + p // BLOCK) * BLOCK + p % BLOCK for p in positions]
    assert x.rows.kv_slots[first:last].tolist() == kv
    assert x.num_drafts[b] == len(offered)
    if row.samples:
        window = x.logits_indices[int(x.window_starts[b]) :][: len(offered) + 1]
        assert window.tolist() == list(range(last - len(offered) - 1, last))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_steps_follow_the_list_device(data):
    """Random chunks, drafts and verdicts: every staged and committed value is the list's."""
    sequences = make_sequences()
    truth: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    drafts: dict[int, list[int]] = {}
    for slot in range(SLOTS):
        prompt = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=9))
        truth[slot], computed[slot], drafts[slot] = list(prompt), 0, []
        admitted(sequences, slot, prompt)
    for step_id in range(data.draw(st.integers(1, 5))):
        slots = data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))]
        rows = []
        for slot in slots:
            missing = len(truth[slot]) - computed[slot]
            num_query = data.draw(st.integers(1, missing))
            limit = data.draw(st.integers(0, K)) if missing == 1 else 0
            rows.append(PlanRow(slot, num_query, limit, num_query == missing))
        x = stage(sequences, StepPlan(step_id, rows=tuple(rows)))
        num_accepted, next_token = [], []
        for b, row in enumerate(rows):
            offered = drafts[row.slot][: row.draft_limit] if row.samples else []
            check_row(x, b, row, truth[row.slot], computed[row.slot], offered)
            num_accepted.append(data.draw(st.integers(0, len(offered))))
            next_token.append(data.draw(st.integers(0, 50)))
            computed[row.slot] += row.num_query + num_accepted[b]
            if row.samples:
                truth[row.slot] += [*offered[: num_accepted[b]], next_token[b]]
        assert x.logits_indices.shape[0] == sum(
            int(x.num_drafts[b]) + 1 for b, row in enumerate(rows) if row.samples
        )
        commit(sequences, x, torch.tensor(num_accepted), torch.tensor(next_token))
        new = data.draw(st.lists(st.integers(0, K), min_size=len(rows), max_size=len(rows)))
        ids = torch.randint(0, 50, (len(rows), K))
        publish(sequences, x, ids, torch.tensor(new))
        for b, row in enumerate(rows):
            drafts[row.slot] = ids[b, : new[b]].tolist() if row.samples else []
        for slot in range(SLOTS):
            n = len(truth[slot])
            assert sequences.num_tokens[slot] == n
            assert sequences.num_computed[slot] == computed[slot]
            assert sequences.token_ids[slot, :n].tolist() == truth[slot]


def test_a_cached_prefix_is_not_computed_again():
    sequences = make_sequences()
    admitted(sequences, 1, [5, 6, 7, 8, 9], num_cached=4)
    x = stage(sequences, StepPlan(0, rows=(PlanRow(1, 1, 0, True),)))
    assert x.token_ids.tolist() == [9]
    assert x.rows.positions.tolist() == [4]


def test_rejected_drafts_are_never_stored():
    sequences = make_sequences()
    admitted(sequences, 0, [1, 2])
    first = stage(sequences, StepPlan(0, rows=(PlanRow(0, 2, 0, True),)))
    commit(sequences, first, torch.tensor([0]), torch.tensor([3]))
    publish(sequences, first, torch.tensor([[40, 41, 42]]), torch.tensor([3]))
    window = stage(sequences, StepPlan(1, rows=(PlanRow(0, 1, 3, True),)))
    assert window.token_ids.tolist() == [3, 40, 41, 42]
    commit(sequences, window, torch.tensor([1]), torch.tensor([7]))
    assert sequences.token_ids[0, :6].tolist() == [1, 2, 3, 40, 7, 0]
    assert sequences.num_tokens[0] == 5
    assert sequences.num_computed[0] == 4


def test_drafts_alone_are_not_committed_rows():
    sequences = make_sequences()
    admitted(sequences, 0, [1, 2])
    admitted(sequences, 1, [5, 6, 7])
    rows = (PlanRow(0, 2, 0, True), PlanRow(1, 2, 0, False))
    first = stage(sequences, StepPlan(0, rows=rows))
    assert first.rows.committed.tolist() == [True] * 4
    commit(sequences, first, torch.tensor([0, 0]), torch.tensor([3, 0]))
    publish(sequences, first, torch.tensor([[40, 41, 42]] * 2), torch.tensor([2, 0]))
    rows = (PlanRow(0, 1, 3, True), PlanRow(1, 1, 0, True))
    second = stage(sequences, StepPlan(1, rows=rows))
    assert second.rows.committed.tolist() == [True, False, False, True]


def test_admission_clears_the_former_request():
    sequences = make_sequences()
    admitted(sequences, 0, [1, 2])
    x = stage(sequences, StepPlan(0, rows=(PlanRow(0, 2, 0, True),)))
    commit(sequences, x, torch.tensor([0]), torch.tensor([3]))
    publish(sequences, x, torch.tensor([[4, 5, 6]]), torch.tensor([3]))
    admitted(sequences, 0, [9])
    x = stage(sequences, StepPlan(1, rows=(PlanRow(0, 1, 3, True),)))
    assert x.token_ids.tolist() == [9]
    assert x.num_drafts.tolist() == [0]


def test_the_reserved_slot_is_untouched():
    sequences = make_sequences()
    admitted(sequences, 0, [1, 2])
    x = stage(sequences, StepPlan(0, rows=(PlanRow(0, 2, 0, True),)))
    commit(sequences, x, torch.tensor([0]), torch.tensor([3]))
    reserved = sequences.reserved_slot
    assert sequences.num_tokens[reserved] == 0
    assert (sequences.block_table[reserved] == 99).all()


def test_inputs_serve_their_own_step_alone():
    sequences = make_sequences()
    admitted(sequences, 0, [1])
    x = stage(sequences, StepPlan(4, rows=(PlanRow(0, 1, 0, True),)))
    x.require_step(4)
    with pytest.raises(StaleInputsError, match="step 4 were offered to step 5"):
        x.require_step(5)
