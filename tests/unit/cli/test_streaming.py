"""What a terminal shows of an answer while it is made, in windows of two drafts and a token."""

from __future__ import annotations

import io
from itertools import groupby

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from helpers.chat_model import SPECIAL, byte_tokenizer
from sametoken.cli.streaming import ACCEPTED_STYLE, REASONING_STYLE, content_of, shown
from sametoken.serving.http.parsed import parse_nothing
from sametoken.serving.http.reasoning_parsers import REASONING_FORMS, ComingAnswer, RenderedPrompt
from sametoken.types.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)

HARMONY = (
    "<|channel|>analysis<|message|>Let me héar.<|end|><|start|>assistant"
    "<|channel|>final<|message|>1 + 2 is 3."
)
WINDOW = 3


def outputs_of(text: str, tokenizer):
    ids = tuple(tokenizer.encode(text))
    metrics = RequestMetrics(0.0, 1.0)
    for end in range(WINDOW, len(ids) + WINDOW, WINDOW):
        finished = end >= len(ids)
        num_new = min(end, len(ids)) - end + WINDOW
        speculation = metrics.speculation + SpeculationMetrics.of([(WINDOW, num_new - 1)])
        metrics = RequestMetrics(0.0, 1.0, None, 0, speculation)
        said = tokenizer.decode(ids[:end]).removesuffix("\ufffd")
        completion = CompletionOutput(0, said, ids[:end], "stop" if finished else None)
        yield RequestOutput("0", None, (1,), (completion,), finished, metrics)


class Piece(Console):
    """Notes what is printed and how, in one list for several consoles."""

    def __init__(self, name: str, pieces: list) -> None:
        super().__init__(file=io.StringIO())
        self.name, self.pieces = name, pieces

    def print(self, text, *, style=None, **options) -> None:
        assert (options["end"], options["markup"], options["emoji"]) == ("", False, False)
        self.pieces.append((self.name, style, text))


def show(text: str, form: str | None, prompt: str = "") -> list[tuple[str, str | None, str]]:
    """What was printed; equal neighbours are one."""
    special = (*SPECIAL, "<|channel|>", "<|message|>", "<|start|>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(special))
    parser = parse_nothing
    if form is not None:
        answer = ComingAnswer(RenderedPrompt(prompt), parse_nothing, shows_marks=False)
        parser = REASONING_FORMS[form].parser(answer)
    pieces: list = []
    answers, aside = Piece("answers", pieces), Piece("aside", pieces)
    outputs = shown(outputs_of(text, tokenizer), tokenizer, answers, parser, aside, marks=True)
    assert len(list(outputs)) > 0
    alike = groupby(pieces, key=lambda piece: piece[:2])
    return [(*how, "".join(text for *_, text in some)) for how, some in alike]


def text_to(name: str, pieces) -> str:
    return "".join(text for where, _, text in pieces if where == name)


@pytest.mark.parametrize(
    ("form", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "", "<think>\nhm <b>\n</think>\n\nyes: [b]\n no", "hm <b>\n\n", "yes: [b]\n no"),
        ("qwen3", "<think>\n", "hm</think>yes", "hm\n\n", "yes"),
        ("qwen3", "", "\nyes </think>", "", "\nyes </think>"),
        ("deepseek_r1", "", "cut off </thi", "cut off </thi", ""),
        ("openai_gptoss", "<|start|>assistant", HARMONY, "Let me héar.\n\n", "1 + 2 is 3."),
        (None, "", "<think>hm</think>", "", "<think>hm</think>"),
    ],
)
def test_reasoning_is_dim_and_above_the_content(form, prompt, text, reasoning, content):
    pieces = show(text, form, prompt)
    assert text_to("aside", pieces) == reasoning
    assert text_to("answers", pieces) == content
    assert {style for name, style, _ in pieces if name == "aside"} <= {REASONING_STYLE}
    names = [name for name, _, _ in pieces]
    assert names == sorted(names, key=("aside", "answers").index)


def test_accepted_drafts_are_green_in_the_content_alone():
    # The last windows: ">xy" and "xyz", of which the last token is the target's own.
    pieces = show("<think>uv</think>xyxyz", "qwen3")
    assert [style for name, style, _ in pieces if name == "aside"] == [REASONING_STYLE]
    assert [piece[1:] for piece in pieces if piece[0] == "answers"] == [
        (ACCEPTED_STYLE, "x"),
        (None, "y"),
        (ACCEPTED_STYLE, "xy"),
        (None, "z"),
    ]


def test_the_content_is_what_goes_on_the_conversation():
    answer = ComingAnswer(RenderedPrompt(""), parse_nothing, shows_marks=False)
    parser = REASONING_FORMS["deepseek_r1"].parser(answer)
    assert content_of(parser("hm</think>\n\nyes\n", True)) == "yes\n"
    assert content_of(parse_nothing("\nyes", True)) == "\nyes"
