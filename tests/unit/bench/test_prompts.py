"""Datasets as token ids: through the chat template where there is one."""

from __future__ import annotations

import pytest

from helpers.chat_model import write_chat_model
from sametoken.bench.prompts import dataset_prompts
from sametoken.errors import ConfigError
from sametoken.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_chat_model(tmp_path_factory.mktemp("chat") / "model"))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"the inner"\n{"turns": ["other", "later"]}')
    return path


def test_first_turns_through_the_chat_template(tokenizer, path):
    first, second = dataset_prompts("custom", path, tokenizer)
    text = tokenizer.decode(first, skip_special_tokens=False)
    assert text == "<|im_start|>user\nthe inner<|im_end|>\n<|im_start|>assistant\n"
    assert "later" not in tokenizer.decode(second)


def test_texts_as_they_are_without_a_template(tokenizer, path, monkeypatch):
    monkeypatch.setattr(tokenizer.hf, "chat_template", None)
    first, _ = dataset_prompts("custom", path, tokenizer)
    assert tokenizer.decode(first) == "the inner"


def test_random_prompts_are_made_elsewhere():
    assert dataset_prompts("random", None, None) == ()


def test_texts_need_a_tokenizer(path):
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        dataset_prompts("gsm8k", None, None)
