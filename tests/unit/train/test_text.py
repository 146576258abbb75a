"""Reading training text, and splitting it."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from sametoken.errors import ConfigError
from sametoken.train.batches import Batches, DraftRows
from sametoken.train.text import Sequences, is_trainable, read_sequences, require_text


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def row(prompt, output):
    return {"prompt_token_ids": prompt, "output_token_ids": output}


def test_token_ids_are_read_cut_and_counted(tmp_path):
    rows = [row([1, 2], [3, 4, 4]), row([5], [6]), row([], [7, 8]), row([], [7, 8, 8])]
    rows.append(row([1, 1, 1], [2, 2, 2, 2]))
    found = read_sequences(write_lines(tmp_path / "t.jsonl", rows), vocab_size=9, max_length=5)
    # Of the second and the third no token would be drafted.
    assert [found.sequence(i).tolist() for i in range(len(found))] == [
        [1, 2, 3, 4, 4],
        [7, 8, 8],
        [1, 1, 1, 2, 2],
    ]
    assert found.prompt_lens.tolist() == [2, 0, 3]
    assert found.lengths.tolist() == [5, 3, 5]
    assert found.answer_counts(9, [0, 1]).tolist() == [0, 0, 0, 1, 2, 0, 0, 1, 2]
    assert found.answer_counts(9, [2]).tolist() == [0, 0, 2, 0, 0, 0, 0, 0, 0]


def test_packed_files_are_read(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row([1], [2, 3])).encode()))
    assert read_sequences(path, vocab_size=4, max_length=8).sequence(0).tolist() == [1, 2, 3]


def test_messages_are_encoded_with_the_prompt_as_their_beginning(tmp_path):
    def encode(messages):
        text = "".join(f"{m['role'][0]}{m['content']};" for m in messages)
        return [ord(c) for c in text]

    rows = [
        {"prompt": "hi", "answer": "ho!"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "abc"}]},
    ]
    found = read_sequences(
        write_lines(tmp_path / "t.jsonl", rows), vocab_size=128, max_length=64, encode=encode
    )
    assert bytes(found.sequence(0).tolist()).decode() == "uhi;aho!;"
    assert found.prompt_lens.tolist() == [4, 3]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no answer"),
        ('{"prompt_token_ids": [], "output_token_ids": [2, 3]}', "or of three to an empty"),
        ("{", "not JSON"),
        ("3", "no text"),
        ('{"prompt": "a", "answer": "b"}', "no text"),
        ('{"prompt_token_ids": [1]}', "no text"),
        ('{"prompt_token_ids": [1], "output_token_ids": [2, 9]}', "outside 0..8"),
        ('{"prompt_token_ids": [1], "output_token_ids": [2, "x"]}', "no list of integers"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, says):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_sequences(path, vocab_size=9, max_length=8)


def test_every_form_of_a_line_is_named_and_checked_without_a_tokenizer(tmp_path):
    rows = [row([1], [2, 3]), {"prompt": "a", "answer": "b"}]
    rows.append({"messages": [{"role": "assistant", "content": "b"}]})
    path = write_lines(tmp_path / "t.jsonl", rows)
    require_text(path)
    path.write_text(path.read_text() + '{"text": "a"}')
    with pytest.raises(ConfigError, match=r"line 4 of .*t\.jsonl is no text") as refused:
        require_text(path)
    for form in rows:
        assert all(f'"{name}": ' in refused.value.remedy for name in form)


def test_a_missing_file_and_a_broken_archive_are_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sequences(tmp_path / "none", vocab_size=9, max_length=8)
    broken = tmp_path / "t.gz"
    broken.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sequences(broken, vocab_size=9, max_length=8)


@pytest.mark.parametrize("prompt_len", [0, 1, 2])
def test_a_sequence_is_trainable_if_it_has_a_row_to_draft_from(prompt_len):
    for num_tokens in range(1, 6):
        sequences = Sequences.of([([1] * num_tokens, prompt_len)])
        device = torch.device("cpu")
        batches = Batches(sequences, [0], batch_tokens=32, seed=0, device=device)
        has_row = sum(DraftRows.of(batches.at(0)).counts) > 0
        assert is_trainable(prompt_len, num_tokens) == has_row


def test_answers_to_one_prompt_are_held_back_together():
    pairs = [([prompt, 1, 2, sample], 1) for prompt in range(50) for sample in range(3)]
    sequences = Sequences.of(pairs)
    kept, held = sequences.split(0.2)
    assert sorted(kept + held) == list(range(150))
    prompts = [{int(sequences.sequence(i)[0]) for i in part} for part in (kept, held)]
    assert not prompts[0] & prompts[1]
    assert 1 <= len(prompts[1]) <= 25


def test_something_is_held_back_of_little_text_and_nothing_if_unwanted():
    sequences = Sequences.of([([1, 2, 3], 1), ([2, 2, 3], 1)])
    kept, held = sequences.split(0.01)
    assert len(kept) == len(held) == 1
    assert list(map(len, sequences.split(0.999))) == [1, 1]
    assert sequences.split(0.0) == ([0, 1], [])
    assert Sequences.of([([1, 2, 3], 1)]).split(0.5) == ([0], [])


def test_the_digest_tells_texts_apart():
    one, other = Sequences.of([([1, 2, 3], 1)]), Sequences.of([([1, 2], 1), ([3, 4], 1)])
    assert one.digest == Sequences.of([([1, 2, 3], 1)]).digest
    assert one.digest != other.digest
    assert torch.equal(one.starts, torch.tensor([0, 3]))
