"""``benchmarks/cpu/drafters.py``: its sums, and what it says and returns where tokens differ."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from helpers.scripts import imported

PROMPTS_OF_EACH = 2


@pytest.fixture
def drafters():
    with imported("cpu", "drafters") as modules:
        yield modules.drafters


def answer(seconds: float, last_token: int = 4, speculation=None) -> dict:
    """Four tokens, the first after half the time."""
    return {
        "token_ids": [1, 2, 3, last_token],
        "decode_tokens": 3,
        "decode_seconds": seconds / 2,
        "seconds": seconds,
        "speculation": speculation or {},
        "others_cores": 0.0,
        "peak_rss": 4e8,
    }


def results_of(drafters, changed: int | None) -> dict:
    """Plain decoding, EAGLE-3 at twice its speed and llama.cpp at half of it."""
    options = SimpleNamespace(
        threads=2,
        cascade_drafts=3,
        cascade_match=4,
        llama_python="python",
        llama_model="bf16.gguf",
        max_tokens=4,
        load_format="auto",
    )
    plain, _, head, *_, llama = drafters.sides("model.gguf", "head", options)
    assert (plain.model, llama.model) == ("model.gguf", "bf16.gguf")
    prompts = [
        drafters.Prompt(name, [7]) for name in drafters.DATASETS for _ in range(PROMPTS_OF_EACH)
    ]
    counts = {
        "num_steps": 2,
        "num_draft_tokens": 2,
        "num_accepted_tokens": 2,
        "offered_per_position": [1, 1],
        "accepted_per_position": [1, 1],
    }
    measured = []
    for side, seconds, speculation in ((plain, 2.0, None), (head, 1.0, counts), (llama, 4.0, None)):
        facts = {"llama-cpp-python": "1", "system": "AVX2"} if side is llama else {}
        answers = [
            answer(seconds, 9 if side is head and i == changed else 4, speculation)
            for i in range(len(prompts))
        ]
        measured.append(drafters.Measured(SimpleNamespace(side=side), facts, answers))
    return {
        "prompts": dict.fromkeys(drafters.DATASETS, PROMPTS_OF_EACH),
        "head": {"name": "head", "sha256": "0" * 64},
        "max_tokens": 4,
        "threads": 2,
        "cores": 2,
        "cpu": "a CPU",
        "torch": "2",
        "date": "today",
        "command": "python",
        "load_before": 0.0,
        "load_after": 2.0,
        "sides": [drafters.as_json(one, measured[0], prompts) for one in measured],
    }


def printed(drafters, results: dict) -> tuple[bool, str]:
    file = io.StringIO()
    same = drafters.report(results, Console(file=file, width=160, highlight=False))
    return same, file.getvalue()


def test_sums_and_speed_ups(drafters):
    plain, head, llama = results_of(drafters, changed=None)["sides"]
    found = head["datasets"]["gsm8k"]
    assert found["tokens"] == 4 * PROMPTS_OF_EACH
    assert found["decode_tokens_per_second"] == 3 / 0.5
    assert found["request_tokens_per_second"] == 4
    assert found["speculation"]["acceptance_length"] == 3
    assert found["speculation"]["per_position"] == [1, 1]
    assert plain["mean_decode_speed_up"] == 1
    assert head["mean_decode_speed_up"] == head["mean_request_speed_up"] == 2
    assert llama["mean_decode_speed_up"] == 0.5


def test_the_same_tokens_are_said_and_llama_is_beaten(drafters):
    same, text = printed(drafters, results_of(drafters, changed=None))
    assert same
    assert "the same in all 6 prompts" in text
    assert "EAGLE-3 2, 2.00x plain" in text
    assert "over llama.cpp, after the first token: gsm8k 4.00x" in text
    assert "Peak memory of the process, MB: plain 400" in text


def test_one_changed_token_fails_and_is_named(drafters):
    same, text = printed(drafters, results_of(drafters, changed=3))
    assert not same
    assert "FAILED: EAGLE-3 2 changed tokens of the prompts [3]" in text
    assert "the same in all" not in text
