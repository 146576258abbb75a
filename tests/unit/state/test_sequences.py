"""What steps make of sequences, against a device written in lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.step_scenes import ALL_OPS, DEVICE, integers, order_of, with_room
from sametoken.ops.step import compact
from sametoken.ops.step.reference import write_tables
from sametoken.ops.step.types import LayoutTable
from sametoken.state.sequences import NO_HISTORY, Sequences, TokenHistory
from sametoken.state.slots import admit, assign_blocks
from sametoken.types.layout import StepLayout
from sametoken.types.plan import Admission, BlockAssignment, ScheduledRequest, StepPlan
from sametoken.types.sampling_params import SamplingParams

BLOCK, K, SLOTS, MAX_LEN = 4, 3, 3, 48
each_op = pytest.mark.parametrize("ops", ALL_OPS.values(), ids=ALL_OPS)


def make_sequences() -> Sequences:
    return Sequences.allocate(
        max_num_seqs=SLOTS,
        max_len=MAX_LEN,
        num_drafts=K,
        block_size=BLOCK,
        reserved_block=99,
        device=DEVICE,
    )


def admitted(sequences: Sequences, slot: int, prompt: list[int], num_cached: int = 0) -> None:
    admission = Admission(slot, tuple(prompt), num_cached, SamplingParams(seed=0))
    blocks = tuple(range(slot * 12, slot * 12 + 12))
    assigned = assign_blocks(sequences, BlockAssignment(slot, 0, blocks))
    write_tables([*admit(sequences, admission), assigned])


def begin(ops, sequences: Sequences, *rows: ScheduledRequest, room: int = 0):
    """The inputs of a step, and where its requests are; of static operations with room for more."""
    known = ops.known_drafts(sequences, [row.slot for row in rows])
    layout = StepLayout.of(StepPlan(0, requests=rows), known)
    shape = layout.shape
    if ops is not compact:
        shape = with_room(shape, room, room // 2, room, room)
    table = layout.table(shape, sequences.reserved_slot, 0)
    held = LayoutTable(torch.tensor(table, device=DEVICE), shape)
    return ops.prepare_inputs(sequences, held), order_of(layout, shape)


def finish(ops, sequences: Sequences, begun, accepted, next_token, drafts=(), counts=()) -> None:
    """Commit, and publish if there are drafts; padding is given numbers as well."""
    x, order = begun

    def everyone(values, padding):
        found = [padding] * len(x.slots)
        for place, value in zip(order, values, strict=True):
            found[place] = value
        return integers(found)

    ops.commit(sequences, x, everyone(accepted, 0), everyone(next_token, 7))
    if drafts:
        ops.publish(sequences, x, everyone(drafts, [1] * K), everyone(counts, K))


def live(x, reserved_slot: int) -> list[tuple[int, int, int, int, bool]]:
    """Slot, position, token, KV slot and whether it is committed, of every live row."""
    at = (x.rows.slots, x.rows.positions, x.token_ids, x.rows.kv_slots, x.rows.committed)
    rows = [*zip(*(t.tolist() for t in at), strict=True)]
    return [row for row in rows if row[0] != reserved_slot]


def expected_rows(row: ScheduledRequest, tokens, start: int, offered):
    """Of one request, in plain Python."""
    for i, token in enumerate([*tokens[start : start + row.num_query], *offered]):
        position = start + i
        kv = (row.slot * 12 + position // BLOCK) * BLOCK + position % BLOCK
        yield row.slot, position, token, kv, i < row.num_query


@each_op
@settings(max_examples=24)
@given(st.data())
def test_steps_follow_the_list_device(ops, data):
    """Random chunks, drafts and results: every staged and committed value is the list's."""
    sequences = make_sequences()
    truth: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    drafts: dict[int, list[int]] = {}
    for slot in range(SLOTS):
        prompt = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=9))
        truth[slot], computed[slot], drafts[slot] = list(prompt), 0, []
        admitted(sequences, slot, prompt)
    for _ in range(data.draw(st.integers(1, 5))):
        slots = data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))]
        rows = []
        for slot in slots:
            missing = len(truth[slot]) - computed[slot]
            num_query = data.draw(st.integers(1, missing))
            limit = data.draw(st.integers(0, K)) if missing == 1 else 0
            rows.append(ScheduledRequest(slot, num_query, limit, num_query == missing))
        rows.sort(key=lambda row: row.num_query > 1 or not row.samples)
        begun = begin(ops, sequences, *rows, room=data.draw(st.integers(0, 3)))
        wanted, accepted, next_token = [], [], []
        for row in rows:
            offered = drafts[row.slot][: row.draft_limit] if row.samples else []
            wanted += expected_rows(row, truth[row.slot], computed[row.slot], offered)
            accepted.append(data.draw(st.integers(0, len(offered))))
            next_token.append(data.draw(st.integers(0, 50)))
            computed[row.slot] += row.num_query + accepted[-1]
            if row.samples:
                truth[row.slot] += [*offered[: accepted[-1]], next_token[-1]]
        assert live(begun[0], SLOTS) == wanted
        counts = data.draw(st.lists(st.integers(0, K), min_size=len(rows), max_size=len(rows)))
        ids = torch.randint(0, 50, (len(rows), K)).tolist()
        finish(ops, sequences, begun, accepted, next_token, ids, counts)
        for b, row in enumerate(rows):
            drafts[row.slot] = ids[b][: counts[b]] if row.samples else []
        for slot in range(SLOTS):
            n, d = len(truth[slot]), len(drafts[slot])
            assert sequences.num_tokens[slot] == n
            assert sequences.num_computed[slot] == computed[slot]
            assert sequences.token_ids[slot, :n].tolist() == truth[slot]
            assert sequences.num_drafts[slot] == d
            assert sequences.draft_ids[slot, :d].tolist() == drafts[slot]
        check_reserved(sequences)


def check_reserved(sequences: Sequences) -> None:
    reserved = sequences.reserved_slot
    for fact in (
        "token_ids",
        "num_tokens",
        "num_computed",
        "prompt_len",
        "draft_ids",
        "num_drafts",
    ):
        assert not getattr(sequences, fact)[reserved].any(), fact
    assert (sequences.block_table[reserved] == 99).all()


@each_op
def test_a_cached_prefix_is_not_computed_again(ops):
    sequences = make_sequences()
    admitted(sequences, 1, [5, 6, 7, 8, 9], num_cached=4)
    x, _ = begin(ops, sequences, ScheduledRequest(1, 1, 0, True))
    assert x.token_ids.tolist() == [9]
    assert x.rows.positions.tolist() == [4]


@each_op
def test_rejected_drafts_are_never_stored(ops):
    sequences = make_sequences()
    admitted(sequences, 0, [1, 2])
    first = begin(ops, sequences, ScheduledRequest(0, 2, 0, True), room=2)
    finish(ops, sequences, first, [0], [3], [[40, 41, 42]], [3])
    window = begin(ops, sequences, ScheduledRequest(0, 1, 3, True), room=2)
    assert [row[2] for row in live(window[0], SLOTS)] == [3, 40, 41, 42]
    finish(ops, sequences, window, [1], [7])
    assert sequences.token_ids[0, :6].tolist() == [1, 2, 3, 40, 7, 0]
    assert sequences.num_tokens[0] == 5
    assert sequences.num_computed[0] == 4
    check_reserved(sequences)


@each_op
def test_admission_clears_the_former_request(ops):
    sequences = make_sequences()
    admitted(sequences, 0, [1, 2])
    finish(
        ops,
        sequences,
        begin(ops, sequences, ScheduledRequest(0, 2, 0, True)),
        [0],
        [3],
        [[4, 5, 6]],
        [3],
    )
    admitted(sequences, 0, [9])
    x, _ = begin(ops, sequences, ScheduledRequest(0, 1, 3, True))
    assert live(x, SLOTS) == [(0, 0, 9, 0, True)]
    assert x.num_drafts.tolist() == [0]


@each_op
def test_the_reserved_slot_is_untouched(ops):
    sequences = make_sequences()
    admitted(sequences, 0, [1, 2])
    x = begin(ops, sequences, ScheduledRequest(0, 2, 0, True), room=3)
    finish(ops, sequences, x, [0], [3], [[4, 5, 6]], [3])
    check_reserved(sequences)


CPU = torch.device("cpu")
UNDEFINED = -7


def sequences(max_len: int = 8) -> Sequences:
    made = Sequences.allocate(
        max_num_seqs=3, max_len=max_len, num_drafts=1, block_size=4, reserved_block=0, device=CPU
    )
    made.token_ids.fill_(UNDEFINED)
    return made


def take(history: TokenHistory, held: Sequences, slot: int, prompt: tuple[int, ...]) -> None:
    history.keep(held, slot)
    write_tables(admit(held, Admission(slot, prompt, 0, SamplingParams(temperature=0.0))))


def texts(history: TokenHistory) -> list[list[int]]:
    lengths = history.lengths.tolist()
    return [row[:n] for row, n in zip(history.texts.tolist(), lengths, strict=True)]


def test_a_text_is_kept_when_its_slot_is_taken_up_again():
    history, held = TokenHistory.allocate(2, 12, CPU), sequences()
    take(history, held, 1, (1, 2, 3))
    take(history, held, 0, (4,))
    assert texts(history) == [[], []]
    take(history, held, 1, (5, 6))
    assert texts(history) == [[1, 2, 3], []]
    take(history, held, 1, (7,))
    take(history, held, 0, (8,))
    assert texts(history) == [[4], [5, 6]]


def test_what_is_not_committed_lies_above_the_length():
    history, held = TokenHistory.allocate(1, 8, CPU), sequences()
    take(history, held, 2, (1, 2, 3))
    take(history, held, 2, (9,))
    assert texts(history) == [[1, 2, 3]]
    assert history.texts[0, 3:].tolist() == [UNDEFINED] * 5


def test_without_room_nothing_is_kept():
    held = sequences()
    take(NO_HISTORY, held, 0, (1,))
    take(NO_HISTORY, held, 0, (2,))
    assert NO_HISTORY.lengths.shape == (0,)
    assert not NO_HISTORY._used
