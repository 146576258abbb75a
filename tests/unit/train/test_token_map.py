"""The map of a draft head's tokens, counted from answers."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.checkpoints import write_llama
from helpers.full_disk import filling_disk
from sametoken.errors import ConfigError
from sametoken.train.options import TokenMapOptions
from sametoken.train.token_map import (
    coverage,
    frequent_tokens,
    membership,
    offsets_of,
    write_token_map,
)

END = 22
COUNTS = torch.tensor([5, 0, 9, 5, 1, 0])
ANSWERS = [
    {"prompt_token_ids": [9, 9, 9, 9], "output_token_ids": [1, 2, 1, 3]},
    {"prompt_token_ids": [8, 8, 8, 8], "output_token_ids": [1, 2, 4]},
]


@pytest.fixture
def target(tmp_path):
    return write_llama(tmp_path / "target", eos_token_id=END)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ANSWERS))
    return path


def write(target, text, tmp_path, **options):
    output = tmp_path / "map.json"
    chosen = TokenMapOptions(**{"validation": 0.0} | options)
    return write_token_map(target, output, text, None, chosen), json.loads(output.read_text())


def test_it_holds_the_most_frequent_tokens_of_answers_and_what_ends_them(target, text, tmp_path):
    result, token_ids = write(target, text, tmp_path, size=3)
    assert token_ids == [1, 2, END]
    assert (result.tokens, result.vocab_size, result.counted) == (3, 23, 7)
    assert result.coverage == 5 / 7


def test_a_size_of_more_than_the_vocabulary_holds_all_of_it(target, text, tmp_path):
    result, token_ids = write(target, text, tmp_path, size=1000)
    assert token_ids == list(range(23))
    assert result.coverage == 1.0


def test_coverage_is_that_of_answers_which_were_not_counted(target, text, tmp_path):
    """Two prompts: one is counted, the other measured."""
    result, token_ids = write(target, text, tmp_path, size=4, validation=0.5)
    counted, measured = ANSWERS if result.counted == 4 else ANSWERS[::-1]
    assert result.counted == len(counted["output_token_ids"])
    assert set(counted["output_token_ids"]) <= set(token_ids)
    inside = [token in token_ids for token in measured["output_token_ids"]]
    assert result.coverage == sum(inside) / len(inside) < 1


def test_a_map_that_cannot_be_written_whole_is_not_there(target, text, tmp_path):
    with filling_disk(), pytest.raises(ConfigError, match="no space left"):
        write(target, text, tmp_path, size=3)
    assert not (tmp_path / "map.json").exists()


@pytest.mark.parametrize("options", [{"size": 0}, {"validation": 1.0}, {"validation": -0.1}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError) as caught:
        TokenMapOptions(**options)
    assert caught.value.remedy


def test_the_most_frequent_tokens_ascending_and_of_equals_the_lowest():
    assert frequent_tokens(COUNTS, 2).tolist() == [0, 2]
    assert frequent_tokens(COUNTS, 3).tolist() == [0, 2, 3]
    assert frequent_tokens(COUNTS, 5).tolist() == [0, 1, 2, 3, 4]
    assert frequent_tokens(COUNTS, 100).tolist() == list(range(6))


def test_both_tables_name_the_same_tokens():
    token_ids = frequent_tokens(COUNTS, 3)
    assert (torch.arange(3) + offsets_of(token_ids)).tolist() == token_ids.tolist()
    assert membership(token_ids, 6).nonzero().flatten().tolist() == token_ids.tolist()


def test_coverage_is_a_share_of_the_counted_tokens():
    assert coverage(COUNTS, torch.tensor([0, 2])) == 14 / 20
    assert coverage(torch.zeros(6, dtype=torch.int64), torch.tensor([0])) == 0.0
