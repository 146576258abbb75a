"""Every processor against a slow oracle, and every window row against plain decoding."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sametoken.core.sampling_params import SamplingParams
from sametoken.errors import RequestError
from sametoken.kernels.reference import ReferenceKernels
from sametoken.kernels.truncation import reference as truncation
from sametoken.verification.admission import require_choosable
from sametoken.verification.logits import process_logits
from sametoken.verification.windows import sampled_rows

KERNELS = ReferenceKernels()
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


def oracle(logits, row, num_drafts):
    """One row by the book: the tokens before it are its prompt, output, and drafts so far."""
    params = row.params
    output = row.output + row.drafts[:num_drafts]
    values = masked(list(logits.numpy()), row, output)
    for token_id, bias in (params.logit_bias or {}).items():
        values[token_id] = values[token_id] + np.float32(bias)
    for token_id in range(VOCAB_SIZE):
        value = values[token_id]
        if token_id in row.prompt + output and params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        if token_id in output:
            count = np.float32(output.count(token_id))
            value = value - count * np.float32(params.frequency_penalty)
            value = value - np.float32(params.presence_penalty)
        values[token_id] = value
    if params.temperature == 0.0:
        return values
    kept = survivors([v / np.float32(params.temperature) for v in values], params)
    return [v if i in kept else NO_TOKEN for i, v in enumerate(values)]


def masked(values, row, output):
    allowed = set(row.params.allowed_token_ids or range(VOCAB_SIZE))
    for word in row.bad_words:
        if len(word) == 1:
            allowed -= {word[0]}
    if len(output) < row.params.min_tokens:
        allowed -= set(row.stop_ids)
    remaining = set(allowed)
    for word in row.bad_words:
        before = len(word) - 1
        if before and len(output) >= before and output[-before:] == word[:-1]:
            remaining -= {word[-1]}
    if not remaining:
        return [np.float32(0.0) if i == min(allowed) else NO_TOKEN for i in range(VOCAB_SIZE)]
    return [v if i in remaining else NO_TOKEN for i, v in enumerate(values)]


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


@settings(max_examples=150, deadline=None)
@given(batch=batches, seed=st.integers(0, 2**31))
def test_every_row_of_every_window_follows_the_oracle(batch, seed, make_row, stage_step):
    step = stage_step([make_row(**arguments) for arguments in batch])
    logits = coarse_logits(step.num_logits, seed)
    expected = [
        oracle(row_logits, row, r)
        for (row, r), row_logits in zip(
            [(row, r) for row in step.rows for r in range(row.window)], logits, strict=True
        )
    ]
    process_logits(logits, sampled_rows(step.x), step.sequences, step.table, KERNELS)
    want = torch.tensor(np.array(expected, dtype=np.float32)).view(-1, VOCAB_SIZE)
    assert torch.equal(logits, want)


@settings(max_examples=100, deadline=None)
@given(batch=batches, seed=st.integers(0, 2**31))
def test_a_window_row_equals_plain_decoding_of_the_same_tokens(batch, seed, make_row, stage_step):
    step = stage_step([make_row(**arguments) for arguments in batch])
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(step.num_logits, VOCAB_SIZE, generator=generator) * 3
    raw = logits.clone()
    process_logits(logits, sampled_rows(step.x), step.sequences, step.table, KERNELS)
    windows = [
        (arguments, r)
        for arguments in batch
        for r in range(len(arguments["drafts"]) + 1)
        if arguments["samples"]
    ]
    for index, (arguments, r) in enumerate(windows):
        committed = arguments["output"] + arguments["drafts"][:r]
        alone = stage_step([make_row(**arguments | {"output": committed, "drafts": ()})])
        plain = raw[index : index + 1].clone()
        process_logits(plain, sampled_rows(alone.x), alone.sequences, alone.table, KERNELS)
        assert torch.equal(plain, logits[index : index + 1])


def large_batch(make_row):
    """Ordinary requests of a large vocabulary, every processor used by some."""
    common = {"prompt": (5, 6, 7, 8), "output": (9, 10, 5)}
    return [
        make_row(**common, drafts=(6, 7), params=SamplingParams(seed=1, top_p=0.9)),
        make_row(**common, drafts=(9,), params=SamplingParams(seed=2, top_k=50, top_p=0.8)),
        make_row(**common, params=SamplingParams(seed=3, min_p=0.05, temperature=0.6)),
        make_row(
            **common,
            drafts=(10, 10, 10),
            params=SamplingParams(seed=4, repetition_penalty=1.2, top_p=0.99999),
        ),
        make_row(**common, params=SamplingParams(temperature=0.0)),
    ]


@pytest.mark.parametrize("vocab_size", [1003, 32_771])
def test_rows_have_the_same_bits_alone_and_in_any_company(vocab_size, make_row, stage_step):
    rows = large_batch(make_row)
    step = stage_step(rows)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(step.num_logits, vocab_size, generator=generator) * 2
    raw = logits.clone()
    process_logits(logits, sampled_rows(step.x), step.sequences, step.table, KERNELS)
    start = 0
    for row in rows:
        alone = stage_step([row])
        window = raw[start : start + row.window].clone()
        process_logits(window, sampled_rows(alone.x), alone.sequences, alone.table, KERNELS)
        assert torch.equal(window, logits[start : start + row.window])
        start += row.window


def test_rows_without_parameters_are_neither_written_nor_cut(make_row, stage_step, monkeypatch):
    plain = SamplingParams(temperature=0.8, seed=3)
    ruled = SamplingParams(temperature=0.8, seed=3, repetition_penalty=2.0)
    greedy_cut = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0)
    rows = [
        make_row(prompt=(1, 2), drafts=(1, 2), params=params)
        for params in (plain, ruled, greedy_cut)
    ]
    step = stage_step(rows)
    logits = coarse_logits(9, 0)
    logits[0, 0], logits[6, 1] = -0.0, 3.5
    raw = logits.clone()
    # No row of this step is sampled with a cut, so nothing may be sorted.
    monkeypatch.setattr(truncation, "_truncated", None)
    process_logits(logits, sampled_rows(step.x), step.sequences, step.table, KERNELS)
    untouched = [0, 1, 2, 6, 7, 8]
    assert torch.equal(logits[untouched].view(torch.int32), raw[untouched].view(torch.int32))
    assert not torch.equal(logits[3:6], raw[3:6])


def test_top_k_keeps_all_that_equal_the_kth(make_row, stage_step):
    row = make_row(prompt=(1,), params=SamplingParams(seed=0, top_k=2))
    step = stage_step([row])
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    process_logits(logits, sampled_rows(step.x), step.sequences, step.table, KERNELS)
    assert logits.tolist() == [[NO_TOKEN, 3.0, 2.0, 2.0, NO_TOKEN]]


def test_top_p_takes_the_lowest_ids_of_equal_tokens_and_never_none(make_row, stage_step):
    rows = [make_row(prompt=(1,), params=SamplingParams(seed=0, top_p=p)) for p in (0.5, 1e-9)]
    step = stage_step(rows)
    logits = torch.zeros(2, 8)
    process_logits(logits, sampled_rows(step.x), step.sequences, step.table, KERNELS)
    assert (logits == 0).sum(-1).tolist() == [4, 1]
    assert (logits[:, 0] == 0).all()
    assert (logits[0, :4] == 0).all()


def test_a_nucleus_wider_than_the_leaders_is_exact(make_row, stage_step):
    vocab_size = 3000
    row = make_row(prompt=(1,), params=SamplingParams(seed=0, top_p=0.75))
    step = stage_step([row])
    logits = torch.zeros(1, vocab_size)
    logits[0, 5] = 0.5
    process_logits(logits, sampled_rows(step.x), step.sequences, step.table, KERNELS)
    total = vocab_size - 1 + math.exp(0.5)
    size = 1 + math.ceil(0.75 * total - math.exp(0.5))
    assert (logits != NO_TOKEN).sum() == size
    kept = (logits[0] != NO_TOKEN).nonzero().flatten().tolist()
    assert kept == list(range(size))


def test_top_k_beyond_the_vocabulary_keeps_all(make_row, stage_step):
    row = make_row(prompt=(1,), params=SamplingParams(seed=0, top_k=50))
    step = stage_step([row])
    logits = coarse_logits(1, 3)
    raw = logits.clone()
    process_logits(logits, sampled_rows(step.x), step.sequences, step.table, KERNELS)
    assert torch.equal(logits, raw)


def test_a_step_without_windows_is_processed(make_row, stage_step):
    row = make_row(
        prompt=(1, 2, 3),
        num_query=2,
        num_computed=0,
        samples=False,
        params=SamplingParams(seed=0, top_p=0.5, repetition_penalty=1.1),
    )
    step = stage_step([row])
    process_logits(torch.zeros(0, 8), sampled_rows(step.x), step.sequences, step.table, KERNELS)


def test_stop_ids_outside_the_vocabulary_mask_nothing_else(make_row, stage_step):
    row = make_row(
        prompt=(1,), stop_ids=(2, 99), params=SamplingParams(temperature=0.0, min_tokens=3)
    )
    step = stage_step([row])
    logits = torch.zeros(1, 5)
    process_logits(logits, sampled_rows(step.x), step.sequences, step.table, KERNELS)
    assert logits.tolist() == [[0.0, 0.0, NO_TOKEN, 0.0, 0.0]]


def test_a_bad_word_does_not_match_across_the_end_of_the_prompt(make_row, stage_step):
    words = ((2, 4),)
    rows = [
        make_row(prompt=(1, 2), bad_words=words),
        make_row(prompt=(1,), output=(2,), bad_words=words),
        make_row(prompt=(1,), drafts=(2, 3), bad_words=words),
    ]
    step = stage_step(rows)
    logits = torch.zeros(5, 6)
    process_logits(logits, sampled_rows(step.x), step.sequences, step.table, KERNELS)
    assert (logits[:, 4] == NO_TOKEN).tolist() == [False, True, False, True, False]


def test_the_last_permitted_token_outlives_a_bad_word(make_row, stage_step):
    params = SamplingParams(temperature=0.0, allowed_token_ids=[4, 2])
    row = make_row(prompt=(1,), output=(2,), params=params, bad_words=((2, 2), (2, 4), (3,)))
    step = stage_step([row])
    logits = coarse_logits(1, 0)
    process_logits(logits, sampled_rows(step.x), step.sequences, step.table, KERNELS)
    assert logits.argmax() == 2
    assert (logits != NO_TOKEN).sum() == 1
