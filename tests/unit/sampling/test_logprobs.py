import pytest
import torch

from helpers.logprobs import check_entry
from sametoken.runner.async_output import split_by_owner
from sametoken.sampling.logprobs import ScoredRows, log_probabilities, score_tokens


def random_logits(count, vocab_size):
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(0)) * 3


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


@pytest.mark.parametrize("vocab_size", [77, 40_001, 40_004])
def test_softmax_is_given_rows_that_begin_at_multiples_of_16_bytes(vocab_size, monkeypatch):
    """On a GPU it adds up other rows in another order."""
    given, logits = [], random_logits(3, vocab_size)
    softmax = torch.Tensor.log_softmax
    monkeypatch.setattr(
        torch.Tensor, "log_softmax", lambda rows, dim: given.append(rows) or softmax(rows, dim)
    )
    assert torch.equal(log_probabilities(logits), softmax(logits, -1))
    assert given[0].stride(0) * given[0].itemsize % 16 == 0


def test_rows_to_score_follow_from_what_the_host_knows():
    windows = [(4, 0, 3), (1, 3, 2), (7, 5, 0), (2, 5, 1), (7, 6, 2)]
    rows = ScoredRows.of({7: 0, 1: 5, 2: 3, 9: 20}, windows, torch.device("cpu"))
    assert rows.index.tolist() == [3, 4, 5, 6, 7]
    assert rows.owner.tolist() == [1, 1, 3, 4, 4]
    assert rows.num_top.tolist() == [5, 5, 3, 0, 0]
    assert rows.width == 5
    assert ScoredRows.of({9: 20, 7: 3}, windows[:4], torch.device("cpu")) is None
