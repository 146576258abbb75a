"""Masks, biases and penalties by both implementations: an oracle's bits, in any batch."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch

from helpers.compiled import compile_launches
from helpers.ruled import (
    Ruled,
    check_rows,
    expected_row,
    greedy,
    make_scene,
    random_logits,
    random_request,
)
from sametoken.errors import InvariantError
from sametoken.ops.backend import SampledRows
from sametoken.ops.sampling import logits_rules_reference as reference
from sametoken.ops.sampling import logits_rules_triton as kernel
from sametoken.ops.sampling.logits_rules import Edits, Parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GAPS = (2, 0, 1, 3)
LOGIT_READ = re.compile(r"ld\.global(\.v\d)?\.b32")


@pytest.fixture(params=[reference, kernel], ids=["reference", "triton"])
def implementation(request):
    return request.param


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles, programs and runs of counters where one would do."""
    for name, size in [("_LANES", 16), ("_IDS", 2), ("_BAD_WORDS", 2), ("_BLOCK", 16)]:
        monkeypatch.setattr(kernel, name, size)
    monkeypatch.setattr(kernel, "_COUNTERS_AT_A_TIME", 2)
    monkeypatch.setattr(kernel, "_PROGRAMS", 50)


def check(implementation, requests, vocab_size, **layout):
    scene = make_scene(requests, DEVICE, **layout)
    logits = random_logits(len(scene.owners), vocab_size, seed=vocab_size).to(DEVICE)
    after = scene.apply(implementation, logits)
    check_rows(logits, after, scene)
    return after


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 65, 1003, 4097])
def test_every_row_by_the_book(implementation, vocab_size):
    rng = random.Random(vocab_size)
    for likely in {min(vocab_size, 4), vocab_size}:
        requests = [random_request(rng, vocab_size, likely) for _ in range(6)]
        check(implementation, requests, vocab_size, gaps=GAPS)


@pytest.mark.parametrize("seed", range(4))
def test_tiles_programs_and_runs_change_no_bit(small_tiles, monkeypatch, seed):
    rng = random.Random(seed)
    requests = [random_request(rng, 90, 5 + 20 * seed) for _ in range(6)]
    small = check(kernel, requests, 90, gaps=GAPS)
    monkeypatch.undo()
    assert torch.equal(small, check(kernel, requests, 90, gaps=GAPS))


@pytest.mark.parametrize("seed", range(3))
def test_a_row_alone_and_in_company(implementation, seed):
    rng = random.Random(100 + seed)
    requests = [random_request(rng, 300, 6) for _ in range(5)]
    scene = make_scene(requests, DEVICE, gaps=GAPS)
    logits = random_logits(len(scene.owners), 300, seed).to(DEVICE)
    together = scene.apply(implementation, logits)
    for row, owner in enumerate(scene.owners):
        if owner is not None:
            request, place = owner
            tokens = request.output + request.drafts[:place]
            plain = make_scene([replace(request, output=tokens, drafts=())], DEVICE)
            alone = plain.apply(implementation, logits[row : row + 1])
            assert torch.equal(alone[0].view(torch.int32), together[row].view(torch.int32))


def test_nan_stays_in_its_place(implementation):
    params = greedy(repetition_penalty=1.5, presence_penalty=1.0, allowed_token_ids=[1, 2, 5])
    scene = make_scene([Ruled((1, 2), (2,), (5,), params)], DEVICE, gaps=(1,))
    logits = torch.zeros(len(scene.owners), 9, device=DEVICE)
    logits[:, [2, 4]] = torch.nan
    after = scene.apply(implementation, logits)
    assert after.isnan().nonzero().tolist() == [[0, 2], [0, 4], [1, 2], [2, 2], [3, 2], [3, 4]]


LONG_WORD = tuple(range(1, 40))
WORDS = ((2, 4), (2, 3, 5), (3, 2, 6), LONG_WORD, (7,), (0, 8))


@pytest.mark.parametrize(
    "request_",
    [
        Ruled((1, 2), bad_words=WORDS),
        Ruled((1,), (2,), bad_words=WORDS),
        Ruled((1,), (2,), (3, 2), bad_words=WORDS),
        Ruled((1,), (), (2, 3, 2, 3), bad_words=WORDS),
        Ruled((2,), (3,), (5,), bad_words=WORDS),
        Ruled((5,), LONG_WORD[:-1], bad_words=WORDS),
        Ruled((5,), LONG_WORD[:-3], LONG_WORD[-3:], bad_words=WORDS),
        Ruled(LONG_WORD[:2], LONG_WORD[2:-1], bad_words=WORDS),
        Ruled((1,), (0,), (0,), bad_words=tuple((0, 100 + i) for i in range(150))),
    ],
)
def test_bad_words_within_the_output(implementation, request_):
    after = check(implementation, [request_, Ruled((1,), (2,), (3,))], 300, max_len=64)
    assert (after[0] != -torch.inf).any()


@pytest.mark.parametrize("num_output", [0, 2, 3])
def test_the_lowest_permitted_id_outlives_the_masks(implementation, num_output):
    params = greedy(allowed_token_ids=[70, 3, 2, 5], min_tokens=3, logit_bias={2: 0.5, 3: 0.25})
    words = ((1, 70), (1, 5), (1, 3), (1, 2), (70,))
    request = Ruled((0,), (1,) * num_output, (1, 1), params, stop_ids=(2,), bad_words=words)
    scene = make_scene([request], DEVICE)
    after = scene.apply(implementation, torch.zeros(3, 100, device=DEVICE))
    for place in range(3):
        row, length = after[place], num_output + place
        expected = {2: 0.5} if length >= 3 else {3: 0.25}
        if length == 0:
            expected |= {5: 0.0}
        kept = (row != -torch.inf).nonzero().squeeze(1).tolist()
        assert {token_id: row[token_id].item() for token_id in kept} == expected


def test_rows_without_a_finite_logit(implementation):
    """As a mask leaves nothing there, so does the model: the lowest permitted id is chosen."""
    masked = Ruled((1,), params=greedy(allowed_token_ids=[4, 6]), bad_words=((4,),))
    biased = Ruled((1,), params=greedy(logit_bias={2: 9.0}))
    scene = make_scene([masked, biased], DEVICE)
    after = scene.apply(implementation, torch.full((2, 8), -torch.inf, device=DEVICE))
    assert (after == 0).nonzero().tolist() == [[0, 6]]
    assert (after != 0).sum() == (after == -torch.inf).sum()


def test_a_long_history(implementation):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 60, (5200,), generator=generator).tolist()
    params = greedy(frequency_penalty=0.37, presence_penalty=-0.2, repetition_penalty=1.07)
    requests = [
        Ruled(tuple(tokens[:2100]), tuple(tokens[2100:]), (3, 3, 99), params),
        Ruled((5,) * 4096, (5,), (5,), params),
        Ruled((5,), (5,) * 4200, (), params),
        Ruled(tuple(tokens)),
    ]
    check(implementation, requests, 120, max_len=5300)


@pytest.mark.parametrize("vocab_size", [5, 1000])
def test_nothing_beyond_the_rows_is_read_or_written(poisoned_memory, vocab_size):
    rng = random.Random(7)
    requests = [random_request(rng, vocab_size, min(5, vocab_size)) for _ in range(4)]
    scene = make_scene(requests, DEVICE, gaps=GAPS)
    count = len(scene.owners)
    memory = torch.empty((count + 4) * vocab_size + 8192, device=DEVICE)
    rows = memory[2 * vocab_size : (2 + count) * vocab_size].view(count, vocab_size)
    rows.copy_(random_logits(count, vocab_size, 3))
    for row, owner in enumerate(scene.owners):
        if owner is None:
            rows[row] = torch.nan
    before = rows.clone()
    kernel.apply_rules(rows, scene.rows, scene.committed, scene.table.rules)
    check_rows(before, rows, scene)
    assert memory[: 2 * vocab_size].isnan().all()
    assert memory[(2 + count) * vocab_size :].isnan().all()


class Launches:
    """Stands for kernels: names those that are launched, and runs none."""

    def __init__(self, monkeypatch):
        self.names = []
        for name in ("_edit_kernel", "_count_kernel", "_penalise_kernel"):
            monkeypatch.setattr(kernel, name, self._grid_of(name))

    def _grid_of(self, name):
        def launch(*args, **options):
            self.names.append(name)

        class Grid:
            def __getitem__(self, grid):
                assert all(0 < size < 2**16 for size in grid)
                return launch

        return Grid()


@pytest.mark.parametrize(
    ("params", "launched"),
    [
        ({}, []),
        ({"logit_bias": {1: 1.0}}, ["_edit_kernel"]),
        ({"presence_penalty": 1.0}, ["_count_kernel", "_penalise_kernel"]),
        (
            {"min_tokens": 4, "repetition_penalty": 2.0},
            ["_edit_kernel", "_count_kernel", "_penalise_kernel"],
        ),
    ],
)
def test_few_launches_for_any_number_of_requests_and_none_for_none(monkeypatch, params, launched):
    launches = Launches(monkeypatch)
    requests = [Ruled((1,), drafts=(2,), params=greedy(**params), stop_ids=(3,))] * 60
    scene = make_scene([*requests, Ruled()], DEVICE)
    scene.apply(kernel, torch.zeros(len(scene.owners), 8, device=DEVICE))
    assert launches.names == launched


def test_no_value_is_asked_of_the_device(monkeypatch):
    """Tensors without values: whoever asked for one would fail."""
    launches = Launches(monkeypatch)
    params = greedy(allowed_token_ids=[1, 2], repetition_penalty=2.0)
    scene = make_scene([Ruled((1,), (2,), (3, 4), params)], gaps=GAPS)

    def without_values(holder):
        names = holder.__slots__ if hasattr(holder, "__slots__") else vars(holder)
        values = {name: getattr(holder, name) for name in names}
        tensors = {n: v.to("meta") for n, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(holder, **tensors)

    rows, committed = without_values(scene.rows), without_values(scene.committed)
    logits = torch.zeros(len(scene.owners), 40, device="meta")
    kernel.apply_rules(logits, rows, committed, without_values(scene.table.rules))
    assert launches.names == ["_edit_kernel", "_count_kernel", "_penalise_kernel"]


def test_a_step_without_rows(implementation):
    request = Ruled((1,), params=greedy(logit_bias={1: 1.0}, presence_penalty=1.0))
    scene = make_scene([request], DEVICE)
    no_rows = SampledRows(None, *torch.empty(4, 0, dtype=torch.int64, device=DEVICE))
    scene = replace(scene, rows=no_rows)
    assert scene.apply(implementation, torch.empty(0, 9, device=DEVICE)).numel() == 0


@pytest.mark.parametrize("allowed", [None, {0}, {63}, {64, 1}, {5, 63, 64, 127, 128}])
def test_a_row_of_integers_says_what_it_was_made_of(allowed):
    edits = Edits(
        allowed_ids=None if allowed is None else frozenset(allowed),
        banned_ids=frozenset({9, 3}),
        stop_ids=frozenset({4, 10**6}),
        min_tokens=7,
        bad_words=((1, 2), (3, 4, 5)),
        biases={8: -0.1, 2: 3.5},
    )
    parts = Parts.of(torch.tensor(edits.pack()))
    assert parts.banned_ids.tolist() == [3, 9]
    assert parts.stop_ids.tolist() == [4, 10**6]
    assert parts.bias_ids.tolist() == [8, 2]
    assert torch.equal(parts.biases, torch.tensor([-0.1, 3.5]))
    assert parts.bad_words == edits.bad_words
    assert (parts.header.min_tokens, parts.header.longest) == (7, 3)
    lowest = 0 if allowed is None else min(allowed)
    assert (parts.header.lowest, parts.header.lowest_early) == (lowest, lowest)
    for vocab_size in (100, 200):
        kept = [i for i in sorted(allowed or ()) if i < vocab_size]
        assert parts.allowed_ids(vocab_size).tolist() == kept


def test_masks_that_leave_nothing_are_an_error():
    edits = Edits(frozenset({2, 3}), frozenset({3}), frozenset({2}), 4, (), {})
    with pytest.raises(InvariantError, match="forbid every token"):
        edits.pack()
    assert Parts.of(torch.tensor(replace(edits, stop_ids=frozenset()).pack())).header.lowest == 2


def test_the_oracle_knows_a_wrong_row():
    request = Ruled((1,), (2,), (3,), greedy(presence_penalty=1.0))
    logits = torch.zeros(5)
    assert not torch.equal(expected_row(logits, request, 0), expected_row(logits, request, 1))


def test_it_compiles_for_a_gpu(tmp_path):
    """Products are not fused with sums, and what is stored is looked at behind a barrier."""
    code = """
from sametoken.ops.backend import SampledRows
from sametoken.ops.sampling.logits_rules import LogitsRules
from sametoken.ops.sampling.logits_rules_triton import apply_rules

class Committed:
    token_ids, prompt_len = torch.zeros(2, 64, dtype=torch.int64), torch.zeros(2).long()

at, numbers = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
rules = LogitsRules({0: at}, at, {0: 70}, at, numbers, numbers, numbers)
for vocab_size in (151936, 1):
    apply_rules(torch.zeros(2, vocab_size), SampledRows(None, at, at, at, at), Committed, rules)
"""
    compile_launches(code, tmp_path)
    made = [(path.stem, path.read_text()) for path in tmp_path.rglob("*.ptx")]
    assert {name for name, _ in made} == {"_edit_kernel", "_count_kernel", "_penalise_kernel"}
    for name, text in made:
        if name == "_penalise_kernel":
            assert "div.rn.f32" in text
            assert "mul.rn.f32" in text
            assert "fma" not in text
        if name == "_edit_kernel":
            first, *others = text.split("bar.sync")
            assert not LOGIT_READ.search(first)
            assert any(LOGIT_READ.search(other) for other in others)
