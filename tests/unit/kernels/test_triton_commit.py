"""Judge, commit and publish in their padded form, against plain loops and ``state.commit``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sametoken.core.plan import PlanRow, StepPlan
from sametoken.kernels.commit import triton as committing
from sametoken.kernels.sampling import triton as sampling
from sametoken.kernels.stage.triton import PaddedInputs, stage_chunks, stage_windows
from sametoken.state import commit as truth
from sametoken.state.inputs import stage
from sametoken.state.sequences import Sequences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, MAX_LEN, K, VOCABULARY = 4, 32, 3, 6
WINDOW = K + 1
FACTS = ("token_ids", "num_tokens", "num_computed", "draft_ids", "num_drafts")


def sequences_of(lengths: list[tuple[int, int, list[int]]]) -> Sequences:
    """Slots of (num_tokens, num_computed, drafts); -7 above the committed tokens."""
    sequences = Sequences.allocate(
        max_num_seqs=SLOTS,
        max_len=MAX_LEN,
        num_drafts=K,
        block_size=4,
        reserved_block=9,
        device=torch.device("cpu"),
    )
    sequences.token_ids[:SLOTS] = -7
    for slot, (num_tokens, num_computed, drafts) in enumerate(lengths):
        sequences.token_ids[slot, :num_tokens] = torch.arange(num_tokens) % VOCABULARY
        sequences.draft_ids[slot, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        sequences.num_tokens[slot] = num_tokens
        sequences.num_computed[slot] = num_computed
        sequences.num_drafts[slot] = len(drafts)
    return sequences


def copied(sequences: Sequences, device: str) -> Sequences:
    names = (*FACTS, "prompt_len", "block_table")
    tensors = {name: getattr(sequences, name).clone().to(device) for name in names}
    return Sequences(**tensors, block_size=sequences.block_size)


def windows(sequences: Sequences, plan: list[PlanRow], padding: int) -> PaddedInputs:
    columns = [(r.slot, r.draft_limit, 1) for r in plan]
    columns += [(sequences.reserved_slot, 0, 0)] * padding
    slots, limit, live = torch.tensor(columns, device=DEVICE).T.contiguous().unbind(0)
    return stage_windows(sequences, slots, limit, live.bool(), WINDOW)


def logits_for(tokens: torch.Tensor, nan_rows: list[int]) -> torch.Tensor:
    """Greedy logits [B * W, V] whose best are ``tokens``."""
    logits = torch.nn.functional.one_hot(tokens.flatten(), VOCABULARY).float()
    logits[nan_rows, 2] = torch.nan
    return logits.to(DEVICE)


def expected_verdict(drafts: list[int], targets: list[int], nan: set[int]):
    """(num_accepted, next_token, poisoned) of one window, in plain Python."""
    accepted = 0
    while accepted < len(drafts) and accepted not in nan and drafts[accepted] == targets[accepted]:
        accepted += 1
    if accepted in nan:
        return 0, 0, True
    return accepted, targets[accepted], False


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_step_of_windows(data):
    """Judged as loops do, committed as ``state.commit`` does; fused and apart are one."""
    token = st.integers(0, 2)
    lengths = []
    for _ in range(SLOTS):
        num_tokens = data.draw(st.integers(1, MAX_LEN - WINDOW))
        drafts = data.draw(st.lists(token, max_size=K))
        lengths.append((num_tokens, num_tokens - 1, drafts))
    reference = sequences_of(lengths)
    fused, apart = copied(reference, DEVICE), copied(reference, DEVICE)
    slots = data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))]
    plan = [PlanRow(slot, 1, data.draw(st.integers(0, K)), True) for slot in slots]
    padding = data.draw(st.integers(0, 2))
    batch = len(plan) + padding
    targets = data.draw(
        st.lists(st.lists(token, min_size=WINDOW, max_size=WINDOW), min_size=batch, max_size=batch)
    )
    nan_rows = data.draw(st.lists(st.integers(0, batch * WINDOW - 1), max_size=2))
    keys = sampling.greedy_keys(logits_for(torch.tensor(targets), nan_rows))

    x = windows(fused, plan, padding)
    judgement, lengths_after = committing.judge_and_commit(fused, keys, x, WINDOW)
    for b, row in enumerate(plan):
        offered = reference.draft_ids[row.slot, : reference.num_drafts[row.slot]].tolist()
        nan = {r - b * WINDOW for r in nan_rows if b * WINDOW <= r < (b + 1) * WINDOW}
        verdict = expected_verdict(offered[: row.draft_limit], targets[b], nan)
        assert verdict == (
            judgement.num_accepted[b].item(),
            judgement.next_token[b].item(),
            judgement.poisoned[b].item(),
        )
    count = len(plan)
    for padded in (judgement.num_accepted, judgement.next_token, judgement.poisoned):
        assert not padded[count:].any()
    clean = [r for r in range(batch * WINDOW) if r not in nan_rows]
    flat = torch.tensor(targets).flatten()
    assert torch.equal(judgement.tokens.cpu().flatten()[clean], flat[clean])

    plain = stage(reference, StepPlan(0, rows=tuple(plan)))
    accepted, next_token = (t[:count].cpu() for t in (judgement.num_accepted, judgement.next_token))
    committed = truth.commit(reference, plain, accepted, next_token)
    assert torch.equal(lengths_after.num_tokens[:count].cpu(), committed.num_tokens)
    assert torch.equal(lengths_after.num_computed[:count].cpu(), committed.num_computed)

    y = windows(apart, plan, padding)
    alone = committing.judge(keys, y, WINDOW)
    committing.commit(apart, y, alone.num_accepted, alone.next_token)
    for name in FACTS:
        assert torch.equal(getattr(fused, name).cpu(), getattr(reference, name)), name
        assert torch.equal(getattr(apart, name).cpu(), getattr(reference, name)), name


@pytest.mark.parametrize(("num_query", "samples"), [(4, False), (10, True)])
def test_a_prefill_chunk(num_query, samples):
    reference = sequences_of([(3, 2, []), (16, 6, [])])
    sequences = copied(reference, DEVICE)
    x = stage_chunks(
        sequences,
        torch.tensor([1], device=DEVICE),
        torch.tensor([num_query], device=DEVICE),
        torch.tensor([samples], device=DEVICE),
        12,
    )
    keys = sampling.greedy_keys(logits_for(torch.tensor([5]), []))
    judgement, _ = committing.judge_and_commit(sequences, keys, x, 1)
    assert judgement.num_accepted.item() == 0
    plain = stage(reference, StepPlan(0, rows=(PlanRow(1, num_query, 0, samples),)))
    truth.commit(reference, plain, torch.tensor([0]), torch.tensor([5]))
    for name in FACTS:
        assert torch.equal(getattr(sequences, name).cpu(), getattr(reference, name)), name


def test_padding_with_a_stale_slot_cannot_touch_its_new_row():
    sequences = copied(sequences_of([(5, 4, [])]), DEVICE)
    slots, live = torch.tensor([0, 0], device=DEVICE), torch.tensor([True, False], device=DEVICE)
    x = stage_windows(sequences, slots, slots * 0, live, 1)
    keys = sampling.greedy_keys(logits_for(torch.tensor([4, 2]), []))
    committing.judge_and_commit(sequences, keys, x, 1)
    assert (sequences.num_tokens[0].item(), sequences.num_computed[0].item()) == (6, 5)
    assert sequences.token_ids[0, 5:7].tolist() == [4, -7]


def test_many_tiles_and_wide_windows_are_walked_whole():
    """More tiles than one pass holds: the best may lie in any of them."""
    rows, tiles = 65, 70
    ranks = torch.randint(
        -(2**40), 2**40, (2 * rows, tiles), generator=torch.Generator().manual_seed(0)
    )
    x = SimpleNamespace(
        slots=torch.tensor([0, 1], device=DEVICE),
        token_ids=torch.zeros(2 * rows, dtype=torch.int64, device=DEVICE),
        num_query=torch.ones(2, dtype=torch.int64, device=DEVICE),
        num_drafts=torch.zeros(2, dtype=torch.int64, device=DEVICE),
        rows_per_plan_row=rows,
    )
    judgement = committing.judge(ranks.to(DEVICE), x, rows)
    expected = 0xFFFFFFFF - (ranks.amax(dim=1) & 0xFFFFFFFF)
    assert torch.equal(judgement.tokens.cpu().flatten(), expected)


def test_publish():
    sequences = copied(sequences_of([(5, 4, [1, 1, 1])] * SLOTS), DEVICE)
    plan = [PlanRow(2, 1, K, True), PlanRow(0, 1, K, True)]
    x = windows(sequences, plan, 1)
    before = sequences.draft_ids.clone()
    drafts = torch.tensor([[4, 5, 3], [2, 2, 2], [1, 1, 1]], device=DEVICE)
    committing.publish(sequences, x, drafts, torch.tensor([3, 1, 3], device=DEVICE))
    assert sequences.draft_ids[[2, 0]].tolist() == [[4, 5, 3], [2, 2, 2]]
    assert torch.equal(sequences.draft_ids[[1, 3, 4]], before[[1, 3, 4]])
    assert sequences.num_drafts.tolist() == [1, 3, 3, 3, 0]


def test_rows_that_do_not_sample_get_no_drafts():
    sequences = copied(sequences_of([(5, 0, [1, 1])]), DEVICE)
    one = torch.tensor([0], device=DEVICE)
    x = stage_chunks(sequences, one, one + 2, one > 0, 4)
    committing.publish(sequences, x, torch.full((1, K), 4, device=DEVICE), one + 2)
    assert sequences.num_drafts[0].item() == 0
