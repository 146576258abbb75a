"""Datasets by name and by file."""

from __future__ import annotations

import json

import pytest

from sametoken.bench.datasets import DATASETS, load_dataset
from sametoken.errors import ConfigError


@pytest.mark.parametrize(("name", "count"), [("gsm8k", 1319), ("humaneval", 164), ("mt-bench", 80)])
def test_shipped_sets_are_whole(name, count):
    items = load_dataset(name)
    assert len(items) == count
    assert len({item.item_id for item in items}) == count
    assert all(item.turns and all(item.turns) for item in items)


def test_answers_and_turns_are_kept():
    assert load_dataset("gsm8k", limit=1)[0].answer.endswith("#### 18")
    assert "has_close_elements" in load_dataset("humaneval", limit=1)[0].turns[0]
    first = load_dataset("mt-bench", limit=1)[0]
    assert len(first.turns) == 2
    assert first.messages == [{"role": "user", "content": first.turns[0]}]


def test_random_items_follow_from_the_seed():
    assert load_dataset("random", limit=5) == load_dataset("random", limit=5)
    assert load_dataset("random", limit=5) != load_dataset("random", limit=5, seed=1)


def test_a_users_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        "plain text",
        {"prompt": "a", "id": "mine", "answer": "7"},
        {"question": "b"},
        {"turns": ["c", "d"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "e"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    items = load_dataset("custom", path=path)
    assert [item.turns for item in items] == [("plain text",), ("a",), ("b",), ("c", "d"), ("e",)]
    assert items[1].item_id == "mine"
    assert items[1].answer == "7"


def test_a_line_ends_at_a_line_feed_alone(tmp_path):
    """JSON allows other separators inside a text."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one\u2028two"\n"three\x85four"\r\n', encoding="utf-8", newline="")
    texts = [item.turns[0] for item in load_dataset("custom", path=path)]
    assert texts == ["one\u2028two", "three\x85four"]


def test_spec_bench_reads_its_file(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps({"question_id": 81, "category": "qa", "turns": ["x"]}))
    (item,) = load_dataset("spec-bench", path=path)
    assert (item.item_id, item.turns) == ("81", ("x",))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("custom", '{"other": "x"}', " is no prompt. Give a text, or an object"),
        ("spec-bench", '{"other": "x"}', " is no prompt. Give an object with q"),
        *(("custom", one, "") for one in ("{", "7", "[]", '{"prompt": ""}', '{"turns": []}')),
        *(("custom", one, "") for one in ("", "\n")),
    ],
)
def test_a_malformed_file_is_refused_and_told_what_to_be(tmp_path, name, content, told):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl.*{told}"):
        load_dataset(name, path=path)


def test_unknown_names_and_missing_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="not known"):
        load_dataset("alpaca")
    with pytest.raises(ConfigError, match=r"--path .*--prompts"):
        load_dataset("spec-bench")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_dataset("custom", path=tmp_path / "absent.jsonl")
    assert "gsm8k" in DATASETS
