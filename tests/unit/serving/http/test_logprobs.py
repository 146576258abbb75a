from __future__ import annotations

from sametoken.serving.http.logprobs import (
    MIN_LOGPROB,
    LogprobsForm,
    chat_logprobs,
    completion_logprobs,
    positions,
    prompt_logprobs,
)
from sametoken.types.outputs import Logprob

FIRST = {5: Logprob(-0.1, 1, "ab"), 9: Logprob(-2.0, 2, "\ufffd")}
SECOND = {7: Logprob(float("-inf"), 30, "é"), 5: Logprob(-0.2, 1, "ab"), 9: Logprob(-1.0, 2, "c")}


def test_the_form_of_completions():
    found = completion_logprobs(
        positions((3, 5, 7), (None, FIRST, SECOND), "Hi"), LogprobsForm(1), [10, 12, 14]
    )
    assert found.tokens == ["Hi", "ab", "é"]
    assert found.token_logprobs == [None, -0.1, MIN_LOGPROB]
    assert found.top_logprobs == [None, {"ab": -0.1}, {"ab": -0.2, "é": MIN_LOGPROB}]
    assert found.text_offset == [10, 12, 14]


def test_the_form_of_chat():
    content = chat_logprobs(positions((9, 7), (FIRST, SECOND)), LogprobsForm(2)).content
    assert [(one.token, one.logprob, one.bytes) for one in content] == [
        ("\ufffd", -2.0, None),
        ("é", MIN_LOGPROB, [0xC3, 0xA9]),
    ]
    assert [one.token for one in content[1].top_logprobs] == ["ab", "c"]
    form = LogprobsForm(0, part_of_character=lambda token_id: bytes([0xF0 + token_id]))
    assert chat_logprobs(positions((9,), (FIRST,)), form).content[0].bytes == [0xF9]
    assert chat_logprobs(positions((5,), (FIRST,)), LogprobsForm(0)).content[0].top_logprobs == []


def test_tokens_as_ids():
    """Tokens of one text stay apart; offsets and bytes are those of the text."""
    form = LogprobsForm(2, as_ids=True)
    found = completion_logprobs(positions((3, 7), (None, SECOND), "Hi"), form, [0, 2])
    assert found.tokens == ["token_id:3", "token_id:7"]
    assert found.top_logprobs == [
        None,
        {"token_id:5": -0.2, "token_id:9": -1.0, "token_id:7": MIN_LOGPROB},
    ]
    assert found.text_offset == [0, 2]
    (one,) = chat_logprobs(positions((7,), (SECOND,)), form).content
    assert (one.token, one.bytes) == ("token_id:7", [0xC3, 0xA9])
    assert [top.token for top in one.top_logprobs] == ["token_id:5", "token_id:9"]


def test_the_form_of_prompts():
    assert prompt_logprobs(None) is None
    none, first = prompt_logprobs((None, {5: FIRST[5]}))
    assert none is None
    assert first == {"5": {"logprob": -0.1, "rank": 1, "decoded_token": "ab"}}
