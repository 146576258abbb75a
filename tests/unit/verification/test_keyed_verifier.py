import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sametoken.core.plan import Admission
from sametoken.core.sampling_params import SamplingParams
from sametoken.kernels.reference import ReferenceKernels
from sametoken.kernels.sampling import reference
from sametoken.verification.logits import process_logits
from sametoken.verification.windows import sampled_rows

VOCAB_SIZE = 5
token_ids = st.integers(0, VOCAB_SIZE - 1)

rows_of_a_step = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(token_ids, min_size=1, max_size=4).map(tuple),
            "output": st.lists(token_ids, max_size=3).map(tuple),
            "drafts": st.lists(token_ids, max_size=5).map(tuple),
            "temperature": st.sampled_from([0.0, 0.3, 1.0]),
            "penalty": st.sampled_from([1.0, 1.0, 1.5]),
            "seed": st.integers(0, 2**63 - 1),
            "samples": st.sampled_from([True, True, True, False]),
            "poisoned_row": st.sampled_from([None, None, None, 0, 2]),
        }
    ),
    min_size=1,
    max_size=5,
)


def random_logits(count, seed, vocab_size=VOCAB_SIZE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, vocab_size, generator=generator) * 2


def build(specs, make_row, stage_step):
    rows = [
        make_row(
            prompt=s["prompt"],
            output=s["output"],
            drafts=s["drafts"] if s["samples"] else (),
            params=SamplingParams(
                temperature=s["temperature"],
                seed=s["seed"],
                repetition_penalty=s["penalty"],
            ),
            samples=s["samples"],
        )
        for s in specs
    ]
    return stage_step(rows)


@settings(max_examples=120, deadline=None)
@given(specs=rows_of_a_step, seed=st.integers(0, 2**31))
def test_judge_agrees_with_a_plain_loop(specs, seed, make_row, stage_step):
    step = build(specs, make_row, stage_step)
    logits = random_logits(step.num_logits, seed)
    start = 0
    for spec, row in zip(specs, step.rows, strict=True):
        if spec["poisoned_row"] is not None and spec["poisoned_row"] < row.window:
            logits[start + spec["poisoned_row"], 1] = math.nan
        start += row.window
    processed = logits.clone()
    rows = sampled_rows(step.x)
    process_logits(processed, rows, step.sequences, step.table, ReferenceKernels())
    verdict = step.verifier.judge(logits.clone(), step.x)

    start = 0
    for index, row in enumerate(step.rows):
        window = slice(start, start + row.window)
        start += row.window
        tokens = []
        for r, values in enumerate(processed[window]):
            position = len(row.prompt) + len(row.output) + r
            arguments = ([row.params.temperature], [row.params.seed], [position])
            tokens.append(reference.sample(values[None], *map(torch.tensor, arguments)).item())
        accepted = 0
        while accepted < len(row.drafts) and row.drafts[accepted] == tokens[accepted]:
            accepted += 1
        poisoned = bool(logits[window][: accepted + 1].isnan().any())
        assert verdict.poisoned[index] == poisoned
        if poisoned or not row.samples:
            assert verdict.num_accepted[index] == 0
            assert 0 <= verdict.next_token[index] < VOCAB_SIZE
            continue
        assert verdict.tokens[window].tolist() == tokens
        assert verdict.num_accepted[index] == accepted
        assert verdict.next_token[index] == tokens[accepted]
    assert verdict.logprobs is None


def greedy_step(drafts, make_row, stage_step, **options):
    """One request whose target says 1, 2, 3, 4 whatever comes before."""
    step = stage_step([make_row(prompt=(1, 1), drafts=drafts, **options)])
    logits = torch.zeros(len(drafts) + 1, 6)
    logits[torch.arange(len(drafts) + 1), torch.arange(1, len(drafts) + 2)] = 1.0
    return step, logits


@pytest.mark.parametrize(
    ("drafts", "num_accepted", "next_token"),
    [
        ((), 0, 1),
        ((1,), 1, 2),
        ((5,), 0, 1),
        ((1, 2, 3), 3, 4),
        ((1, 5, 3), 1, 2),
        ((5, 2, 3), 0, 1),
        ((1, 2, 5), 2, 3),
    ],
)
def test_the_first_mismatch_ends_acceptance(drafts, num_accepted, next_token, make_row, stage_step):
    step, logits = greedy_step(drafts, make_row, stage_step)
    verdict = step.verifier.judge(logits, step.x)
    assert verdict.num_accepted.tolist() == [num_accepted]
    assert verdict.next_token.tolist() == [next_token]


def test_a_step_of_prefill_chunks_alone_is_judged(make_row, stage_step):
    rows = [
        make_row(prompt=(1, 2, 3, 4), num_query=2, num_computed=0, samples=False) for _ in range(2)
    ]
    step = stage_step(rows)
    verdict = step.verifier.judge(torch.zeros(0, 6), step.x)
    assert verdict.num_accepted.tolist() == [0, 0]
    assert verdict.next_token.tolist() == [0, 0]
    assert verdict.tokens.shape == (0,)
    assert not verdict.poisoned.any()


def test_a_poisoned_window_leaves_its_neighbours_alone(make_row, stage_step):
    rows = [make_row(prompt=(1,), drafts=(2, 2)) for _ in range(3)]
    step = stage_step(rows)
    logits = random_logits(9, 4)
    clean = step.verifier.judge(logits.clone(), step.x)
    logits[3, 0] = math.nan
    verdict = step.verifier.judge(logits, step.x)
    assert verdict.poisoned.tolist() == [False, True, False]
    assert verdict.next_token[[0, 2]].tolist() == clean.next_token[[0, 2]].tolist()
    assert verdict.num_accepted[[0, 2]].tolist() == clean.num_accepted[[0, 2]].tolist()


def test_nan_in_a_rejected_row_harms_nobody(make_row, stage_step):
    """A wrong draft may lead the target anywhere; plain decoding would never see that row."""
    step, logits = greedy_step((1, 5, 3), make_row, stage_step)
    logits[2:] = math.nan
    verdict = step.verifier.judge(logits, step.x)
    assert verdict.poisoned.tolist() == [False]
    assert verdict.num_accepted.tolist() == [1]
    assert verdict.next_token.tolist() == [2]


def test_an_infinite_logit_is_not_poison(make_row, stage_step):
    step, logits = greedy_step((), make_row, stage_step)
    logits[0, 0] = -math.inf
    logits[0, 3] = math.inf
    verdict = step.verifier.judge(logits, step.x)
    assert not verdict.poisoned.any()
    assert verdict.next_token.tolist() == [3]


def test_a_greedy_step_makes_no_noise(make_row, stage_step, monkeypatch):
    monkeypatch.setattr(reference, "gumbel_noise", None)
    step, logits = greedy_step((1, 2), make_row, stage_step)
    assert step.verifier.judge(logits, step.x).num_accepted.tolist() == [2]


def test_a_new_request_inherits_nothing_of_its_slot(make_row, stage_step):
    former = SamplingParams(
        seed=3, top_k=1, min_p=0.5, top_p=0.1, logprobs=2, prompt_logprobs=1,
        repetition_penalty=5.0, logit_bias={0: 50.0}, min_tokens=9,
    )  # fmt: skip
    step = stage_step([make_row(prompt=(1, 1), params=former, stop_ids=(1,))], slots=[1])
    later = stage_step([make_row(prompt=(1, 1))], slots=[1])
    logits = random_logits(1, 3)
    expected = later.verifier.judge(logits.clone(), later.x)
    step.table.admit(Admission(1, (1, 1), 0, SamplingParams(temperature=0.0)))
    verdict = step.verifier.judge(logits, step.x)
    assert torch.equal(verdict.tokens, expected.tokens)
    assert verdict.logprobs is None
    assert not step.table.rules.edits
    assert not step.table.rules.counters
