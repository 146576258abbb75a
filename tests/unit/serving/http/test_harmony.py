from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.parsing import assert_adds_up
from sametoken.serving.http.harmony import MARKS, Harmony, parse_harmony
from sametoken.serving.http.parsed import FoundCall, Parsed

PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
THINK = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes."
ADD = FoundCall("add", '{"a": 1}')


def call(header: str, end: str = "<|call|>") -> str:
    return f'{header}<|message|>{{"a": 1}}{end}'


ANSWERS = {
    f"{THINK}{FINAL}": Parsed("Yes.", (), "Hm."),
    f"{THINK}{FINAL}<|return|>": Parsed("Yes.", (), "Hm."),
    f"{THINK}<|start|>assistant{THINK}{FINAL}": Parsed("Yes.", (), "Hm.\nHm."),
    call("<|channel|>commentary to=functions.add json"): Parsed("", (ADD,)),
    call("<|channel|>commentary to=functions.add <|constrain|>json"): Parsed("", (ADD,)),
    call("<|channel|>commentary to=functions.add<|constrain|>json"): Parsed("", (ADD,)),
    call(" to=functions.add<|channel|>commentary json"): Parsed("", (ADD,)),
    call("<|channel|>analysis to=functions.add code", ""): Parsed("", (ADD,)),
    "<|channel|>commentary to=functions.now json<|message|><|call|>"
    "<|start|>assistant<|channel|>commentary to=functions.now<|message|>": Parsed(
        "", (FoundCall("now", "{}"), FoundCall("now", "{}"))
    ),
    "<|channel|>commentary<|message|>I add.<|end|>"
    + call("<|start|>assistant<|channel|>commentary to=functions.add json")
    + call("<|start|>assistant<|channel|>commentary to=functions.add json"): Parsed(
        "I add.", (ADD, ADD)
    ),
    "<|channel|>analysis to=python code<|message|>1+1<|call|>": Parsed("", (), "1+1"),
    "<|channel|>commentary to=browser.open<|message|>x<|call|>": Parsed("", (), "x"),
    "<|channel|>commentary to=functions.<|message|>x": Parsed("", (), "x"),
    # Not the format.
    "<|channel|>musing<|message|>text": Parsed("text"),
    "<|message|>text": Parsed("text"),
    "plain text": Parsed("plain text"),
    "plain text<|return|>": Parsed("plain text"),
    "": Parsed(""),
    f"plain text{THINK}": Parsed("plain text", (), "Hm."),
    f"{'long ' * 99}{THINK}": Parsed("long " * 99, (), "Hm."),
    "<|channel|>final The answer is 4.<|return|>": Parsed("final The answer is 4."),
    f"{THINK}<|start|>assistant<|channel|>comment on it<|message|>x": Parsed(
        "assistantcomment on it\nx", (), "Hm."
    ),
    "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b": Parsed(
        "b", (), "a"
    ),
    "<|channel|>analysis<|message|>a<|channel|>final<|message|>b": Parsed("b", (), "a"),
    "<|channel|>analysis<|channel|>final<|message|>b": Parsed("b"),
    f"{THINK}b": Parsed("b", (), "Hm."),
    f"{THINK}<|end|>b<|message|>c": Parsed("bc", (), "Hm."),
    "<|channel|>final<|message|>a<|message|>b<|constrain|>c": Parsed("abc"),
    "<|channel|>final<|message|>a <| b <|en": Parsed("a <| b <|en"),
    # The end comes in a header.
    f"{THINK}<|start|>assistant": Parsed("", (), "Hm."),
    f"{THINK}<|start|>assistant<|channel|>commentary to": Parsed("", (), "Hm."),
    "<|channel|>commentary to=functions.add <|constrain|>json": Parsed(""),
}


@pytest.mark.parametrize(("text", "expected"), ANSWERS.items())
def test_an_answer(text, expected):
    assert Harmony(finds_calls=True, shows_marks=False).parser(PROMPT)(text, True) == expected
    assert parse_harmony(text, True) == expected
    assert_adds_up(parse_harmony, text)


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<|start|>assistant<|channel|>final<|message|>Yes, ", "I do.", Parsed("I do.")),
        ("<|start|>assistant<|channel|>analysis<|message|>Hm", "m.<|end|>", Parsed("", (), "m.")),
        ("<|start|>user<|message|>hi<|end|>", f"<|start|>assistant{THINK}", Parsed("", (), "Hm.")),
        ("hi", f"Well. {THINK}", Parsed("Well. ", (), "Hm.")),
        ("<|start|>" + "long " * 99, "text", Parsed("text")),
    ],
)
def test_a_prompt_may_leave_a_message_open(prompt, text, expected):
    parser = Harmony(finds_calls=True, shows_marks=False).parser(prompt)
    assert parser(text, True) == expected
    assert_adds_up(parser, text)


def test_without_tools_a_call_is_content():
    text = call("<|channel|>commentary to=functions.add json")
    parser = Harmony(finds_calls=False, shows_marks=False).parser(PROMPT)
    assert parser(text, True) == Parsed('{"a": 1}')


def test_marks_without_a_meaning_are_shown_on_request():
    parser = Harmony(finds_calls=True, shows_marks=True).parser(PROMPT)
    text = "<|channel|>final<|message|>a<|constrain|>b<|end|>c<|start|>d<|channel|>e<|end|>"
    assert parser(text, True) == Parsed("a<|constrain|>b\nc\nd\n<|channel|>e")
    assert parser(f"{THINK}{FINAL}<|return|>", True) == Parsed("Yes.", (), "Hm.")
    assert_adds_up(parser, text)


def test_texts_are_shown_as_they_come():
    text = f"{THINK}{FINAL}"
    shown = [parse_harmony(text[:length], False) for length in range(len(text) + 1)]
    assert [one.reasoning for one in shown if one.content == ""][-1] == "Hm."
    assert {one.reasoning for one in shown} >= {"", "H", "Hm", "Hm."}
    assert {one.content for one in shown} == {"", "Y", "Ye", "Yes", "Yes."}
    assert parse_harmony("word " * 99, False).content == "word " * 99


#: Words of headers.
WORDS = ("assistant", "analysis", "commentary", "final", " to=functions.f ", " to=x ", " json", " ")
PIECES = st.lists(st.sampled_from((*MARKS, *MARKS, *WORDS, "<", "<|", "TEXT", "TEXT")), max_size=12)


@settings(max_examples=120)
@given(PIECES, st.booleans(), st.booleans())
def test_a_stream_of_anything_adds_up_and_loses_no_text(pieces, finds_calls, shows_marks):
    text = "".join(f"({i})" if piece == "TEXT" else piece for i, piece in enumerate(pieces))
    # What comes after this mark is the type of the text that follows.
    texts = re.findall(r"\(\d+\)", re.sub(r"(<\|constrain\|>)\s*[^\s<]*", r"\1", text))
    parser = Harmony(finds_calls=finds_calls, shows_marks=shows_marks).parser(PROMPT)
    assert_adds_up(parser, text)
    found = parser(text, True)
    everywhere = found.content + found.reasoning + "".join(one.arguments for one in found.calls)
    assert all(one in everywhere for one in texts), (text, found)
