"""Documents as streams of tokens, and the windows that a step draws."""

from __future__ import annotations

import json

import pytest
import torch

from sametoken.errors import ConfigError
from sametoken.train.corpus import Corpus, Source, encode_corpus
from sametoken.train.tokenizer import (
    END_OF_TEXT,
    load_trained_tokenizer,
    save_tokenizer,
    train_tokenizer,
)


def letters(texts):
    return [[ord(c) for c in text] for text in texts]


def test_documents_of_every_kind(tmp_path):
    chats = tmp_path / "a.jsonl"
    rows = ["one", {"text": "two"}, {"prompt": "q", "answer": "a"}]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Source(chats, 1.0).documents() == [
        "one",
        "two",
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n",
    ]
    code = tmp_path / "b.py"
    code.write_text("x = 1\n")
    assert Source.parse(str(code)).documents() == ["x = 1\n"]


def test_shares_are_parsed(tmp_path):
    assert Source.parse("a/b.txt=0.25") == Source(tmp_path.__class__("a/b.txt"), 0.25)
    for bad in ("a=x", "a=0", "a=-1", "a=inf", "a=1e308"):
        with pytest.raises(ConfigError, match="has no share above 0 and up to 1e"):
            Source.parse(bad)


@pytest.mark.parametrize(("text", "says"), [("", "no documents"), ('{"x": 1}', "no document")])
def test_bad_sources_are_named(tmp_path, text, says):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Source(path, 1.0).documents()
    with pytest.raises(ConfigError, match="cannot be read"):
        Source(tmp_path / "none.txt", 1.0).documents()


def test_streams_end_every_document_and_are_long_enough(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('"ab"\n"c"\n')
    said = []
    corpus = encode_corpus([Source(path, 2.0)], letters, end=0, length=7, announce=said.append)
    assert corpus.streams[0].tolist() == [97, 98, 0, 99, 0] * 2
    assert "5 tokens" in said[0]
    assert corpus.num_tokens == 5


def test_windows_follow_from_seed_and_step_and_keep_the_shares():
    corpus = Corpus(
        (torch.arange(100, dtype=torch.int32), 1000 + torch.arange(50, dtype=torch.int32)),
        torch.tensor([0.25, 0.75], dtype=torch.float64),
        150,
    )
    one = corpus.windows(seed=1, step=3, count=400, length=8)
    assert torch.equal(one, corpus.windows(seed=1, step=3, count=400, length=8))
    assert not torch.equal(one, corpus.windows(seed=1, step=4, count=400, length=8))
    assert not torch.equal(one, corpus.windows(seed=2, step=3, count=400, length=8))
    assert torch.equal(one.diff(dim=1), torch.ones(400, 7, dtype=torch.int64))
    share = (one[:, 0] >= 1000).double().mean()
    assert 0.65 < share < 0.85
    first = one[one[:, 0] < 1000, 0]
    assert first.min() < 10
    assert first.max() > 80
    # Windows as long as a stream.
    assert corpus.windows(1, 0, 3, 50)[:, -1].max() <= 1049


def test_the_tokenizer_writes_and_reads_everything(tmp_path):
    tokenizer = train_tokenizer(["the cat and the hat"] * 50, 300)
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_trained_tokenizer(tmp_path)
    for text in ("the cat", "12345", "naïve ☃", "\tdef f():\n  pass"):
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert len(loaded("2024")["input_ids"]) == 4
    assert len(loaded(" the the")["input_ids"]) < 8
    chat = loaded.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert len(loaded(chat)["input_ids"]) < len(chat) // 2
    assert loaded.bos_token == END_OF_TEXT
