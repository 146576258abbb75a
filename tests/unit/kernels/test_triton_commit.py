"""Judge, commit and publish in their padded form, against plain loops and ``state.commit``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.compiled import compile_launches
from sametoken.core.plan import PlanRow, StepPlan
from sametoken.kernels.acceptance import reference as acceptance
from sametoken.kernels.commit import triton as committing
from sametoken.kernels.commit.triton import Chances
from sametoken.kernels.outcome import HAS_NAN, NO_TOKEN, SOUND
from sametoken.kernels.sampling import triton as sampling
from sametoken.kernels.stage.triton import PaddedInputs, stage_chunks, stage_windows
from sametoken.state import commit as truth
from sametoken.state.inputs import stage
from sametoken.state.sequences import Sequences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, MAX_LEN, K, VOCABULARY = 4, 32, 3, 6
WINDOW, NAN_COLUMN = K + 1, 2
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
    return stage_windows(sequences, slots, limit, live, WINDOW)


def logits_for(
    tokens: torch.Tensor, nan_rows: list[int], stuck_rows: tuple[int, ...] | list[int] = ()
) -> torch.Tensor:
    """Greedy logits [B * W, V] whose best are ``tokens``."""
    logits = torch.nn.functional.one_hot(tokens.flatten(), VOCABULARY).float()
    logits[nan_rows, NAN_COLUMN] = torch.nan
    logits[list(stuck_rows)] = float("-inf")
    return logits.to(DEVICE)


def expected_verdict(
    drafts: list[int], targets: list[int], nan: set[int], stuck: frozenset[int] = frozenset()
):
    """(num_accepted, next_token, fault) of one window, in plain Python."""
    accepted = 0
    while (
        accepted < len(drafts)
        and accepted not in nan | stuck
        and accepted + 1 not in stuck
        and drafts[accepted] == targets[accepted]
    ):
        accepted += 1
    if accepted in nan | stuck:
        return 0, 0, NO_TOKEN if accepted in stuck else HAS_NAN
    return accepted, targets[accepted], SOUND


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
    stuck_rows = data.draw(st.lists(st.integers(0, batch * WINDOW - 1), max_size=3))
    nan_rows = [row for row in nan_rows if row not in stuck_rows]
    keys = sampling.greedy_keys(logits_for(torch.tensor(targets), nan_rows, stuck_rows))

    x = windows(fused, plan, padding)
    judgement, lengths_after = committing.judge_and_commit(fused, keys, x, WINDOW)
    for b, row in enumerate(plan):
        offered = reference.draft_ids[row.slot, : reference.num_drafts[row.slot]].tolist()
        own = range(b * WINDOW, (b + 1) * WINDOW)
        nan, stuck = ({r - own[0] for r in rows if r in own} for rows in (nan_rows, stuck_rows))
        offered = offered[: row.draft_limit]
        verdict = expected_verdict(offered, targets[b], nan, frozenset(stuck))
        assert verdict == (
            judgement.num_accepted[b].item(),
            judgement.next_token[b].item(),
            judgement.faults[b].item(),
        )
    count = len(plan)
    for padded in (judgement.num_accepted, judgement.next_token, judgement.faults):
        assert not padded[count:].any()
    clean = [r for r in range(batch * WINDOW) if r not in (*nan_rows, *stuck_rows)]
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


RATES = torch.tensor([0.8, 0.5, 0.9])
SEEDS = torch.tensor([7, 2**63 - 1, 0, 123456789, 5])


def expected_by_chance(drafts: list[int], targets: list[int], nan: set[int], num_accepted: int):
    """(num_accepted, next_token, fault, tokens) of one window, drawn; NaN as judged."""
    fault = expected_verdict(drafts, targets, nan)[2]
    accepted = 0 if fault else num_accepted
    tokens = [*drafts[:accepted], *targets[accepted:]]
    return accepted, 0 if fault else targets[accepted], fault, tokens


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_step_of_windows_judged_by_chance(data):
    token = st.integers(0, 2)
    lengths = []
    for _ in range(SLOTS):
        num_tokens = data.draw(st.integers(1, MAX_LEN - WINDOW))
        lengths.append((num_tokens, num_tokens - 1, data.draw(st.lists(token, max_size=K))))
    reference = sequences_of(lengths)
    fused, apart = copied(reference, DEVICE), copied(reference, DEVICE)
    slots = data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))]
    plan = [PlanRow(slot, 1, data.draw(st.integers(0, K)), True) for slot in slots]
    batch = len(plan) + data.draw(st.integers(0, 2))
    targets = data.draw(
        st.lists(st.lists(token, min_size=WINDOW, max_size=WINDOW), min_size=batch, max_size=batch)
    )
    nan_rows = data.draw(st.lists(st.integers(0, batch * WINDOW - 1), max_size=2))
    keys = sampling.greedy_keys(logits_for(torch.tensor(targets), nan_rows))
    chances = Chances(RATES.to(DEVICE), SEEDS.to(DEVICE))

    x = windows(fused, plan, batch - len(plan))
    drawn = acceptance.accepted(
        RATES, SEEDS[x.slots.cpu()], x.num_tokens.cpu(), x.num_drafts.cpu()
    ).tolist()
    judgement, _ = committing.judge_and_commit(fused, keys, x, WINDOW, chances)
    for b, row in enumerate(plan):
        offered = reference.draft_ids[row.slot, : reference.num_drafts[row.slot]].tolist()
        nan = {r - b * WINDOW for r in nan_rows if b * WINDOW <= r < (b + 1) * WINDOW}
        said = [NAN_COLUMN if r in nan else targets[b][r] for r in range(WINDOW)]
        verdict = expected_by_chance(offered[: row.draft_limit], said, nan, drawn[b])
        assert verdict == (
            judgement.num_accepted[b].item(),
            judgement.next_token[b].item(),
            judgement.faults[b].item(),
            judgement.tokens[b].tolist(),
        )
    count = len(plan)
    for padded in (judgement.num_accepted, judgement.next_token, judgement.faults):
        assert not padded[count:].any()

    plain = stage(reference, StepPlan(0, rows=tuple(plan)))
    accepted, next_token = (t[:count].cpu() for t in (judgement.num_accepted, judgement.next_token))
    truth.commit(reference, plain, accepted, next_token)
    y = windows(apart, plan, batch - count)
    alone = committing.judge(keys, y, WINDOW, chances)
    committing.commit(apart, y, alone.num_accepted, alone.next_token)
    for name in ("num_accepted", "next_token", "faults", "tokens"):
        assert torch.equal(getattr(alone, name), getattr(judgement, name)), name
    for name in FACTS:
        assert torch.equal(getattr(fused, name).cpu(), getattr(reference, name)), name
        assert torch.equal(getattr(apart, name).cpu(), getattr(reference, name)), name


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_certain_and_impossible_drafts(rate):
    """Targets agree with no draft; NaN after the first row poisons nothing, as it is judged."""
    sequences = copied(sequences_of([(5, 4, [1, 1, 1]), (9, 8, [2, 2])]), DEVICE)
    x = windows(sequences, [PlanRow(1, 1, K, True), PlanRow(0, 1, K, True)], 1)
    keys = sampling.greedy_keys(logits_for(torch.full((3, WINDOW), 5), [1]))
    chances = Chances(torch.full((K,), rate, device=DEVICE), SEEDS.to(DEVICE))
    judgement, lengths = committing.judge_and_commit(sequences, keys, x, WINDOW, chances)
    accepted = [2, 3, 0] if rate else [0, 0, 0]
    assert judgement.num_accepted.tolist() == accepted
    assert judgement.next_token.tolist() == [5, 5, 0]
    assert judgement.faults.tolist() == [SOUND] * 3
    assert lengths.num_tokens.tolist() == [10 + accepted[0], 6 + accepted[1], 0]
    assert sequences.token_ids[0, 5 : 7 + accepted[1]].tolist() == [1] * accepted[1] + [5, -7]
    assert judgement.tokens[1].tolist() == [1] * accepted[1] + [5] * (WINDOW - accepted[1])


@pytest.mark.parametrize("by_chance", [False, True])
@pytest.mark.parametrize(("num_query", "samples"), [(4, False), (10, True)])
def test_a_prefill_chunk(num_query, samples, by_chance):
    reference = sequences_of([(3, 2, []), (16, 6, [])])
    sequences = copied(reference, DEVICE)
    x = stage_chunks(
        sequences,
        torch.tensor([1], device=DEVICE),
        torch.tensor([num_query], device=DEVICE),
        torch.tensor([int(samples)], device=DEVICE),
        12,
    )
    keys = sampling.greedy_keys(logits_for(torch.tensor([5]), []))
    chances = Chances(RATES.to(DEVICE), SEEDS.to(DEVICE)) if by_chance else None
    judgement, _ = committing.judge_and_commit(sequences, keys, x, 1, chances)
    assert judgement.num_accepted.item() == 0
    plain = stage(reference, StepPlan(0, rows=(PlanRow(1, num_query, 0, samples),)))
    truth.commit(reference, plain, torch.tensor([0]), torch.tensor([5]))
    for name in FACTS:
        assert torch.equal(getattr(sequences, name).cpu(), getattr(reference, name)), name


def test_padding_with_a_stale_slot_cannot_touch_its_new_row():
    sequences = copied(sequences_of([(5, 4, [])]), DEVICE)
    slots, live = torch.tensor([0, 0], device=DEVICE), torch.tensor([1, 0], device=DEVICE)
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
        num_tokens=torch.ones(2, dtype=torch.int64, device=DEVICE),
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
    x = stage_chunks(sequences, one, one + 2, one, 4)
    committing.publish(sequences, x, torch.full((1, K), 4, device=DEVICE), one + 2)
    assert sequences.num_drafts[0].item() == 0


def test_they_compile_for_a_gpu(tmp_path):
    code = """
from sametoken.kernels.commit import triton as kernels
from sametoken.kernels.stage.triton import stage_windows
from sametoken.state.sequences import Sequences

for options in ({"OVERLAP": False}, {"OVERLAP": True, "launch_pdl": True}):
    kernels.overlapped = lambda tensor: options
    for batch, k, tiles in ((1, 1, 1), (3, 3, 149), (64, 64, 38)):
        sequences = Sequences.allocate(
            max_num_seqs=batch,
            max_len=80,
            num_drafts=k,
            block_size=16,
            reserved_block=9,
            device=torch.device("cpu"),
        )
        slots, amount, flag = torch.zeros(3, batch, dtype=torch.int64).unbind(0)
        x = stage_windows(sequences, slots, amount, flag, k + 1)
        keys = torch.zeros(batch * (k + 1), tiles, dtype=torch.int64)
        for chances in (None, kernels.Chances(torch.zeros(k), sequences.num_tokens)):
            verdict = kernels.judge(keys, x, k + 1, chances)
            kernels.judge_and_commit(sequences, keys, x, k + 1, chances)
        kernels.commit(sequences, x, verdict.num_accepted, verdict.next_token)
        kernels.publish(sequences, x, sequences.draft_ids[:batch], slots)
"""
    compile_launches(code, tmp_path)
