import math

import pytest
import torch

from sametoken.core.plan import Admission
from sametoken.core.sampling_params import SamplingParams
from sametoken.verification.host import split_by_owner
from sametoken.verification.logprobs import ScoredRows, score_tokens


def random_logits(count, vocab_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, vocab_size, generator=generator) * 3


def check_entry(entry, logits, chosen, num_top):
    """One position against a plain softmax and a stable sort."""
    values = [float(v) for v in logits]
    total = math.log(sum(math.exp(v) for v in values))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert set(entry) == {chosen, *order[:num_top]}
    assert next(iter(entry)) == chosen
    for token_id, candidate in entry.items():
        assert candidate.rank == order.index(token_id) + 1
        assert candidate.logprob == pytest.approx(values[token_id] - total, abs=1e-5)


def test_scores_are_log_softmax_with_ranks_from_one():
    logits = random_logits(6, 12)
    logits[2] = logits[2].round()  # ties
    chosen = torch.tensor([0, 5, 11, 3, 3, 7])
    num_top = torch.tensor([0, 1, 5, 5, 2, 0])
    owner = torch.tensor([0, 0, 2, 2, 2, 3])
    scores = score_tokens(logits, chosen, owner, num_top, 5)
    assert scores.top_ids.shape == (6, 5)
    rows = split_by_owner(scores, 5)
    assert [len(row) if row else row for row in rows] == [2, None, 3, 1, None]
    entries = [entry for row in rows if row for entry in row]
    for index, entry in enumerate(entries):
        check_entry(entry, logits[index], int(chosen[index]), int(num_top[index]))


def test_equal_logits_rank_by_id_whatever_is_asked_for():
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0, -2.0]])
    one = torch.tensor([0])
    for width in range(7):
        scores = score_tokens(logits, torch.tensor([4]), one, torch.tensor([width]), width)
        assert scores.top_ids.tolist() == [[1, 3, 0, 2, 4, 5][:width]]
        assert scores.chosen_ranks.tolist() == [5]


def test_more_candidates_than_tokens_are_all_tokens():
    scores = score_tokens(
        random_logits(1, 4), torch.tensor([2]), torch.tensor([0]), torch.tensor([20]), 20
    )
    (entry,) = split_by_owner(scores, 1)[0]
    assert len(entry) == 4


@pytest.mark.parametrize("vocab_size", [77, 40_001])
def test_scores_have_the_same_bits_alone_and_in_any_company(vocab_size):
    logits = random_logits(7, vocab_size)
    arguments = (torch.arange(7), torch.arange(7), torch.full((7,), 3))
    together = score_tokens(logits, *arguments, 8)
    for row in range(7):
        one = slice(row, row + 1)
        alone = score_tokens(logits[one].clone(), *(a[one] for a in arguments), 3)
        assert torch.equal(alone.chosen_logprobs, together.chosen_logprobs[one])
        assert torch.equal(alone.chosen_ranks, together.chosen_ranks[one])
        assert torch.equal(alone.top_ids, together.top_ids[one, :3])
        assert torch.equal(alone.top_logprobs, together.top_logprobs[one, :3])


def test_judge_scores_raw_logits_of_those_who_asked(make_row, stage_step):
    biased = SamplingParams(temperature=0.0, logprobs=2, logit_bias={3: 100.0})
    sampled = SamplingParams(temperature=0.9, seed=4, logprobs=0, top_k=2)
    rows = [
        make_row(prompt=(1,), drafts=(2, 2)),
        make_row(prompt=(1,), drafts=(3,), params=biased),
        make_row(prompt=(1,), params=sampled),
    ]
    step = stage_step(rows)
    raw = random_logits(6, 9)
    verdict = step.verifier.judge(raw.clone(), step.x)
    assert verdict.logprobs.owner.tolist() == [1, 1, 2]
    assert verdict.logprobs.top_ids.shape == (3, 2)
    first, second, third = split_by_owner(verdict.logprobs, 3)
    assert first is None
    assert verdict.tokens[3:5].tolist() == [3, 3]
    check_entry(second[0], raw[3], 3, 2)
    check_entry(second[1], raw[4], 3, 2)
    check_entry(third[0], raw[5], int(verdict.tokens[5]), 0)


def test_rows_to_score_follow_from_what_the_host_knows():
    windows = [(4, 0, 3), (1, 3, 2), (7, 5, 0), (2, 5, 1), (7, 6, 2)]
    rows = ScoredRows.of({7: 0, 1: 5, 2: 3, 9: 20}, windows, torch.device("cpu"))
    assert rows.index.tolist() == [3, 4, 5, 6, 7]
    assert rows.owner.tolist() == [1, 1, 3, 4, 4]
    assert rows.num_top.tolist() == [5, 5, 3, 0, 0]
    assert rows.width == 5
    nobody = ScoredRows.of({9: 20}, windows, torch.device("cpu"))
    assert (nobody.index.shape, nobody.width) == ((0,), 0)


def test_a_request_that_has_left_widens_nothing(make_row, stage_step):
    step = stage_step([make_row(prompt=(1,), params=SamplingParams(temperature=0.0, logprobs=1))])
    gone = SamplingParams(temperature=0.0, logprobs=7)
    step.table.admit(Admission(0, (1,), 0, gone))
    verdict = step.verifier.judge(random_logits(1, 9), step.x)
    assert verdict.logprobs.top_ids.shape == (1, 1)


PROMPT = (4, 1, 7, 7, 2, 0, 5)


def prompt_entries(chunks, make_row, stage_step, params):
    """Entries of all chunks of PROMPT, each a step shared with an unconcerned request."""
    table = random_logits(9, 9, seed=3)  # logits by the last token
    entries = []
    done = 0
    for size in chunks:
        samples = done + size == len(PROMPT)
        step = stage_step(
            [
                make_row(prompt=(3, 3, 3), num_query=2, num_computed=0, samples=False),
                make_row(
                    prompt=PROMPT,
                    num_query=size,
                    num_computed=done,
                    samples=samples,
                    params=params,
                ),
            ]
        )
        one_hot = torch.nn.functional.one_hot(step.x.token_ids, 9).float()
        scores = step.verifier.score_prompt(one_hot, step.x, lambda h: h @ table)
        done += size
        if scores is not None:
            first, second = split_by_owner(scores, 2)
            assert first is None
            entries.extend(second)
    return table, entries


@pytest.mark.parametrize("chunks", [(7,), (3, 4), (1, 1, 5), (6, 1), (1,) * 7])
def test_prompt_scores_do_not_depend_on_chunks(chunks, make_row, stage_step):
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    table, entries = prompt_entries(chunks, make_row, stage_step, params)
    assert len(entries) == len(PROMPT) - 1
    for position, entry in enumerate(entries):
        check_entry(entry, table[PROMPT[position]], PROMPT[position + 1], 2)


def test_prompt_scores_cover_more_rows_than_are_held_at_once(make_row, stage_step):
    prompt = tuple(i % 9 for i in range(150))
    row = make_row(
        prompt=prompt,
        num_query=150,
        num_computed=0,
        params=SamplingParams(temperature=0.0, prompt_logprobs=1),
    )
    step = stage_step([row])
    hidden = random_logits(150, 9, seed=8)
    scores = step.verifier.score_prompt(hidden, step.x, lambda h: h)
    (entries,) = split_by_owner(scores, 1)
    assert len(entries) == 149
    for position, entry in enumerate(entries):
        check_entry(entry, hidden[position], prompt[position + 1], 1)


def test_prompt_scores_cost_nothing_unless_asked_for(make_row, stage_step):
    params = SamplingParams(temperature=0.0, logprobs=3)
    assert prompt_entries((7,), make_row, stage_step, params)[1] == []


def test_decoding_rows_have_no_prompt_scores(make_row, stage_step):
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    step = stage_step([make_row(prompt=(1, 2), output=(3,), drafts=(4, 4), params=params)])
    hidden = torch.zeros(3, 9)
    assert step.verifier.score_prompt(hidden, step.x, lambda h: h) is None
