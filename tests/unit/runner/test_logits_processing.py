"""Between the halves of a step: rules against a slow oracle, reports against plain numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.logprobs import check_entry
from helpers.one_step import Row, case_of
from helpers.ruled import expected_row
from helpers.static_steps import STEPS
from sametoken.errors import RequestError
from sametoken.ops.sampling import truncation
from sametoken.ops.step import compact
from sametoken.runner.logits_processing import LogitsProcessing
from sametoken.sampling.admission import require_choosable
from sametoken.state.sampling import SamplingTable
from sametoken.types.plan import Admission, ScheduledRequest, StepPlan
from sametoken.types.sampling_params import SamplingParams

VOCAB_SIZE = 9
NO_TOKEN = -math.inf

token_ids = st.integers(0, VOCAB_SIZE - 1)
few_ids = st.lists(token_ids, max_size=6).map(tuple)


def sometimes(strategy, default):
    return st.one_of(st.just(default), strategy)


@st.composite
def parameters(draw):
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        top_k=draw(sometimes(st.integers(1, VOCAB_SIZE + 2), 0)),
        top_p=draw(sometimes(st.sampled_from([0.05, 0.5, 0.9, 0.999]), 1.0)),
        min_p=draw(sometimes(st.sampled_from([0.01, 0.2, 1.0]), 0.0)),
        seed=draw(st.integers(0, 2**63 - 1)),
        max_tokens=None,
        min_tokens=draw(sometimes(st.integers(1, 8), 0)),
        presence_penalty=draw(sometimes(st.sampled_from([-0.7, 1.1]), 0.0)),
        frequency_penalty=draw(sometimes(st.sampled_from([-0.3, 0.6]), 0.0)),
        repetition_penalty=draw(sometimes(st.sampled_from([0.7, 1.3]), 1.0)),
        logit_bias=draw(sometimes(st.dictionaries(token_ids, st.floats(-9, 9)), None)),
        allowed_token_ids=draw(sometimes(st.lists(token_ids, min_size=1, max_size=5), None)),
    )


@st.composite
def row_arguments(draw):
    words = st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=4)
    arguments = {
        "prompt": draw(st.lists(token_ids, min_size=1, max_size=5).map(tuple)),
        "output": draw(few_ids),
        "drafts": draw(few_ids),
        "params": draw(sometimes(parameters(), SamplingParams(temperature=0.0))),
        "stop_ids": draw(sometimes(few_ids, ())),
        "bad_words": draw(sometimes(words.map(tuple), ())),
        "samples": draw(st.sampled_from([True, True, True, False])),
    }
    try:
        require_choosable(
            arguments["params"], VOCAB_SIZE, arguments["stop_ids"], arguments["bad_words"]
        )
    except RequestError:
        assume(False)
    if not arguments["samples"]:
        arguments["drafts"] = ()
    return arguments


batches = st.lists(row_arguments(), min_size=1, max_size=4)


def coarse_logits(count, seed):
    """Quarters in -3..3, so that ties are common."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-12, 13, (count, VOCAB_SIZE), generator=generator).float() / 4


def random_logits(count):
    return torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3


def oracle(logits, row, num_drafts):
    """One row by the book: the tokens before it are its prompt, output, and drafts so far."""
    values = expected_row(logits, row, num_drafts)
    if row.params.temperature == 0.0:
        return values
    kept = survivors([v / np.float32(row.params.temperature) for v in values.numpy()], row.params)
    return values.where(torch.tensor([i in kept for i in range(VOCAB_SIZE)]), NO_TOKEN)


def survivors(scaled, params):
    order = sorted(range(VOCAB_SIZE), key=lambda i: (-scaled[i], i))
    order = [i for i in order if scaled[i] != NO_TOKEN]
    best = scaled[order[0]]
    if params.min_p > 0:
        order = [i for i in order if float(scaled[i] - best) >= np.log(params.min_p)]
    if params.top_k > 0:
        kth = scaled[order[min(params.top_k, len(order)) - 1]]
        order = [i for i in order if scaled[i] >= kth]
    if params.top_p < 1:
        weight = {i: math.exp(scaled[i] - best) for i in order}
        total, reached, kept = sum(weight.values()), 0.0, []
        for i in order:
            kept.append(i)
            reached += weight[i]
            if reached >= params.top_p * total * (1 - 1e-12):
                break
        order = kept
    return set(order)


each_kind = pytest.mark.parametrize("steps", STEPS)


@pytest.mark.parametrize("steps", ["compact", "static"])
@settings(max_examples=32)
@given(batch=batches, seed=st.integers(0, 2**31))
def test_every_row_of_every_window_follows_the_oracle(steps, batch, seed):
    case = case_of([Row(**arguments) for arguments in batch])
    logits = coarse_logits(case.num_logits, seed)
    windows = [(row, r) for row in case.rows for r in range(row.window)]
    expected = [oracle(given, *where) for given, where in zip(logits, windows, strict=True)]
    found = case.run(logits, steps=steps).processed
    assert torch.equal(found, torch.stack(expected) if expected else logits)


@settings(max_examples=32)
@given(batch=batches, seed=st.integers(0, 2**31))
def test_a_window_row_equals_plain_decoding_of_the_same_tokens(batch, seed):
    case = case_of([Row(**arguments) for arguments in batch])
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(case.num_logits, VOCAB_SIZE, generator=generator) * 3
    found = case.run(raw).processed
    windows = [(row, r) for row in case.rows for r in range(row.window)]
    for index, (row, r) in enumerate(windows):
        alone = case_of([replace(row, output=row.output + row.drafts[:r], drafts=())])
        assert torch.equal(alone.run(raw[index : index + 1]).processed, found[index : index + 1])


def large_batch() -> list[Row]:
    """Ordinary requests of a large vocabulary, every processor used by some."""
    common = {"prompt": (5, 6, 7, 8), "output": (9, 10, 5)}
    penalised = SamplingParams(seed=4, repetition_penalty=1.2, top_p=0.99999)
    return [
        Row(**common, drafts=(6, 7), params=SamplingParams(seed=1, top_p=0.9)),
        Row(**common, drafts=(9,), params=SamplingParams(seed=2, top_k=50, top_p=0.8)),
        Row(**common, params=SamplingParams(seed=3, min_p=0.05, temperature=0.6)),
        Row(**common, drafts=(10, 10, 10), params=penalised),
        Row(**common, params=SamplingParams(temperature=0.0)),
    ]


@pytest.mark.parametrize("vocab_size", [1003, 32_771])
def test_rows_have_the_same_bits_alone_and_in_any_company(vocab_size):
    rows = large_batch()
    case = case_of(rows)
    generator = torch.Generator().manual_seed(5)
    raw = torch.randn(case.num_logits, vocab_size, generator=generator) * 2
    together, start = case.run(raw).processed, 0
    for row in rows:
        own = slice(start, start + row.window)
        assert torch.equal(case_of([row]).run(raw[own]).processed, together[own])
        start += row.window


@each_kind
def test_rows_without_parameters_are_neither_written_nor_cut(steps, monkeypatch):
    plain = SamplingParams(temperature=0.8, seed=3)
    ruled = SamplingParams(temperature=0.8, seed=3, repetition_penalty=2.0)
    greedy_cut = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0)
    rows = [Row((1, 2), drafts=(1, 2), params=params) for params in (plain, ruled, greedy_cut)]
    raw = coarse_logits(9, 0)
    raw[0, 0], raw[6, 1] = -0.0, 3.5
    # No row of this step is sampled with a cut, so nothing may be sorted.
    monkeypatch.setattr(truncation, "_truncated", None)
    found = case_of(rows).run(raw, steps=steps).processed
    untouched = [0, 1, 2, 6, 7, 8]
    assert torch.equal(found[untouched].view(torch.int32), raw[untouched].view(torch.int32))
    assert not torch.equal(found[3:6], raw[3:6])


@each_kind
def test_a_step_without_windows_is_processed(steps):
    params = SamplingParams(seed=0, top_p=0.5, repetition_penalty=1.1)
    row = Row((1, 2, 3), num_query=2, num_computed=0, samples=False, params=params)
    ran = case_of([row, row]).run(torch.zeros(0, 8), steps=steps)
    assert ran.tokens == [(), ()]
    assert ran.failed == [False, False]


def test_stop_ids_outside_the_vocabulary_mask_nothing_else():
    params = SamplingParams(temperature=0.0, min_tokens=3)
    case = case_of([Row((1,), stop_ids=(2, 99), params=params)])
    assert case.run(torch.zeros(1, 5)).processed.tolist() == [[0.0, 0.0, NO_TOKEN, 0.0, 0.0]]


@each_kind
def test_nan_that_a_mask_would_hide_fails_its_request(steps):
    masked = SamplingParams(temperature=0.0, allowed_token_ids=[2])
    rows = [Row((1,), drafts=(2,), params=masked), Row((1,), drafts=(2,), params=masked)]
    logits = torch.zeros(4, 6)
    logits[2, 5] = math.nan
    ran = case_of(rows).run(logits, steps=steps)
    assert ran.failed == [False, True]
    assert ran.tokens[0] == (2, 2)


@each_kind
def test_log_probabilities_are_of_raw_logits_for_those_who_asked(steps):
    biased = SamplingParams(temperature=0.0, logprobs=2, logit_bias={3: 100.0})
    sampled = SamplingParams(temperature=0.9, seed=4, logprobs=0, top_k=2)
    rows = [
        Row((1,), drafts=(2, 2)),
        Row((1,), drafts=(3,), params=biased),
        Row((1,), params=sampled),
    ]
    case, raw = case_of(rows), random_logits(6)
    ran = case.run(raw, steps=steps)
    assert ran.buffer.logprobs.owner.tolist() == [1, 1, 2]
    assert ran.buffer.logprobs.top_ids.shape == (3, 2)
    first, second, third = (row.logprobs for row in ran.buffer.read(case.plan).requests)
    assert first is None
    assert ran.tokens[1] == (3, 3)
    check_entry(second[0], raw[3], 3, 2)
    check_entry(second[1], raw[4], 3, 2)
    check_entry(third[0], raw[5], ran.tokens[2][0], 0)


@each_kind
def test_processed_log_probabilities_are_of_what_tokens_are_chosen_from(steps):
    biased = SamplingParams(temperature=0.0, logprobs=2, logit_bias={3: 100.0})
    sampled = SamplingParams(
        temperature=0.6,
        seed=4,
        logprobs=4,
        top_k=3,
        presence_penalty=1.5,
        allowed_token_ids=ALLOWED,
    )
    rows = [
        Row((1,), drafts=(2, 2)),
        Row((1,), drafts=(3,), params=biased),
        Row((1, 5), output=(2,), params=sampled),
    ]
    case, raw = case_of(rows), random_logits(6)
    ran = case.run(raw, steps=steps, logprobs_mode="processed_logprobs")
    first, second, third = (row.logprobs for row in ran.buffer.read(case.plan).requests)
    assert first is None
    check_entry(second[0], oracle(raw[3], rows[1], 0), 3, 2)
    check_entry(second[1], oracle(raw[4], rows[1], 1), 3, 2)
    processed = oracle(raw[5], rows[2], 0) / 0.6
    assert processed.isfinite().sum() == 3
    check_entry(third[0], processed, ran.tokens[2][0], 4)


ALLOWED = [0, 2, 3, 4, 6, 7]


def test_a_request_that_has_left_widens_nothing():
    case = case_of([Row((1,), params=SamplingParams(temperature=0.0, logprobs=1))])
    case.table.admit(Admission(0, (1,), 0, SamplingParams(temperature=0.0, logprobs=7)))
    ran = case.run(random_logits(1))
    assert ran.buffer.logprobs.top_ids.shape == (1, 1)


PROMPT = (4, 1, 7, 7, 2, 0, 5)
BY_TOKEN = torch.randn(9, 9, generator=torch.Generator().manual_seed(3)) * 3


def prompt_entries(chunks, params, steps="compact", prompt=PROMPT):
    """Entries of all chunks of a prompt, each a step shared with an unconcerned request."""
    entries, done = [], 0
    for size in chunks:
        rows = [
            Row((3, 3, 3), num_query=2, num_computed=0, samples=False),
            Row(
                prompt, num_query=size, num_computed=done, samples=done + size == len(prompt),
                params=params,
            ),
        ]  # fmt: skip
        case = case_of(rows)
        ran = case.run(by_token=BY_TOKEN.__getitem__, vocab_size=9, steps=steps)
        done += size
        for row, result in zip(case.rows, ran.buffer.read(case.plan).requests, strict=True):
            if row.prompt is prompt:
                entries.extend(result.prompt_logprobs or ())
            else:
                assert result.prompt_logprobs is None
    return entries


@each_kind
@pytest.mark.parametrize("chunks", [(7,), (3, 4), (1, 1, 5), (6, 1), (1,) * 7])
def test_prompt_scores_do_not_depend_on_chunks(chunks, steps):
    entries = prompt_entries(chunks, SamplingParams(temperature=0.0, prompt_logprobs=2), steps)
    assert len(entries) == len(PROMPT) - 1
    for position, entry in enumerate(entries):
        check_entry(entry, BY_TOKEN[PROMPT[position]], PROMPT[position + 1], 2)


def test_prompt_scores_cover_more_rows_than_are_held_at_once():
    prompt = tuple(i % 9 for i in range(150))
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    entries = prompt_entries((150,), params, prompt=prompt)
    assert len(entries) == 149
    for position, entry in enumerate(entries):
        check_entry(entry, BY_TOKEN[prompt[position]], prompt[position + 1], 1)


@each_kind
def test_prompt_scores_are_at_the_temperature_of_each_request(steps):
    params = SamplingParams(temperature=0.7, seed=1, prompt_logprobs=2)
    rows = [
        Row(
            PROMPT, num_query=7, num_computed=0, params=params,
            prompt_temperature=temperature,
        )
        for temperature in (0.5, 1.0, 3.0)
    ]  # fmt: skip
    case = case_of(rows)
    ran = case.run(by_token=BY_TOKEN.__getitem__, vocab_size=9, steps=steps)
    for row, result in zip(case.rows, ran.buffer.read(case.plan).requests, strict=True):
        for position, entry in enumerate(result.prompt_logprobs):
            logits = BY_TOKEN[PROMPT[position]] / row.prompt_temperature
            check_entry(entry, logits, PROMPT[position + 1], 2)


def test_prompt_scores_are_of_prompts_and_for_those_who_asked():
    assert prompt_entries((7,), SamplingParams(temperature=0.0, logprobs=3)) == []
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    ran = case_of([Row((1, 2), (3,), (4, 4), params)]).run(torch.zeros(3, 9))
    assert ran.buffer.prompt_logprobs is None


def test_other_ranks_keep_no_grammars():
    """Rank 0 decides; the others would only lose time."""
    for rank in range(2):
        admitted = []
        grammars = SimpleNamespace(admit=admitted.append)
        table = SimpleNamespace(admit=admitted.append)
        ranks = SimpleNamespace(rank=rank, size=2)
        processing = LogitsProcessing(None, None, None, table, grammars, ranks)
        processing.admit(Admission(0, (1,), 0, SamplingParams(seed=0), grammar="a grammar"))
        assert [one.grammar for one in admitted] == [None if rank else "a grammar", "a grammar"]


def test_warming_up_leaves_slots_as_they_were():
    case = case_of([Row((1,))])
    applied = []
    kernels = SimpleNamespace(apply_rules=lambda *given: applied.append(dict(given[3].edits)))
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=9))
    table = SamplingTable.allocate(3, case.sequences.device)
    LogitsProcessing(case.sequences, model, kernels, table, case.grammars).warm_up(compact)
    assert [len(edits) for edits in applied] == [1, 0]
    assert not table.rules.edits
    assert not table.rules.counters
    assert not table.temperature.any()


REFUSED = [
    ({}, (), ((1, 10),), "bad_words names token id 10"),
    ({}, (), ((),), "no tokens"),
    ({"allowed_token_ids": [2]}, (), ((2,),), "forbid every token"),
    ({"allowed_token_ids": [2, 3], "min_tokens": 1}, (3,), ((2,),), "forbid every token"),
    ({}, (), tuple((i,) for i in range(10)), "forbid every token"),
]
ADMITTED = [
    ({}, (), ()),
    ({"allowed_token_ids": [2]}, (2,), ()),
    ({"allowed_token_ids": [2]}, (), ((2, 2),)),
    ({"min_tokens": 2}, (99,), ()),
    ({"allowed_token_ids": [2, 3], "min_tokens": 1}, (3,), ()),
]


@pytest.mark.parametrize(("options", "stop_ids", "bad_words", "cause"), REFUSED)
def test_impossible_masks_are_refused_by_name(options, stop_ids, bad_words, cause):
    with pytest.raises(RequestError, match=cause):
        require_choosable(SamplingParams(**options), 10, stop_ids, bad_words)


@pytest.mark.parametrize(("options", "stop_ids", "bad_words"), ADMITTED)
def test_possible_masks_are_admitted(options, stop_ids, bad_words):
    require_choosable(SamplingParams(**options), 10, stop_ids, bad_words)


def test_rows_of_prompts_are_scored_where_their_request_asks():
    """All of them, except the last of a prompt, which samples."""
    table = SamplingTable.allocate(2, torch.device("cpu"))
    table.admit(Admission(1, (1, 2, 3), 0, SamplingParams(temperature=0.0, prompt_logprobs=0)))
    processing = LogitsProcessing(None, None, None, table, None)

    def scored(*requests):
        return processing.scores_prompts(StepPlan(0, requests=requests))

    chunk, end, window = (
        ScheduledRequest(1, *rest) for rest in ((1, 0, False), (2, 0, True), (1, 2, True))
    )
    assert [scored(one) for one in (chunk, end, window)] == [True, True, False]
    assert not scored(chunk._replace(slot=0), window)
    assert scored(window._replace(slot=0), chunk)
