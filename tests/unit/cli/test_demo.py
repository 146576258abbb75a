"""The demo compares tokens and its exit code says whether they are the same."""

from __future__ import annotations

import io
from typing import ClassVar

import pytest
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from helpers.cli import invoke
from sametoken import llm as llm_module
from sametoken.cli import demo
from sametoken.cli.demo import HYBRID_SCENE, SCENES, Comparison, answer, comparison_table
from sametoken.cli.streaming import ACCEPTED_STYLE
from sametoken.types.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from sametoken.types.sampling_params import SamplingParams

LETTERS = "abcdefgh"


class LetterLLM:
    """Says letters by their ids, in windows: all but a window's last were drafts."""

    windows = ([0], [1, 2, 3], [4])
    speculative_windows = windows
    asked: ClassVar[list] = []

    def __init__(self, model, *, announce, speculative_config=None) -> None:
        self.script = self.speculative_windows if speculative_config else self.windows
        self.goes_on = model != HYBRID_SCENE.model
        self.asked.append((model, speculative_config))

    def get_tokenizer(self):
        backend = Backend(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
        backend.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    def render_chat(self, messages):
        return messages[0]["content"]

    def chat(self, messages, params):
        assert params.max_tokens <= 4

    def generate_stream(self, prompt, params):
        assert params.ignore_eos == self.goes_on
        assert params.greedy
        yield from outputs(self.script)


@pytest.fixture(params=[SCENES, (*SCENES, HYBRID_SCENE)], ids=["installed", "in a checkout"])
def scenes(request, monkeypatch):
    """What is shown by an installed package, and by one that runs from the repository."""
    monkeypatch.setattr(llm_module, "LLM", LetterLLM)
    monkeypatch.setattr(demo, "in_checkout", lambda name: HYBRID_SCENE in request.param)
    return request.param


def num_comparisons(scenes) -> int:
    return sum(len(scene.drafts) for scene in scenes)


def outputs(windows):
    token_ids, speculation = (), RequestMetrics(0.0).speculation
    for number, window in enumerate(windows, start=1):
        token_ids += tuple(window)
        speculation += SpeculationMetrics.of([(len(window) - 1, len(window) - 1)])
        finished = number == len(windows)
        metrics = RequestMetrics(0.0, 1.0, 3.0 if finished else None, 0, speculation)
        text = "".join(LETTERS[token_id] for token_id in token_ids)
        completion = CompletionOutput(0, text, token_ids, "length" if finished else None)
        yield RequestOutput("0", None, (7,), (completion,), finished, metrics)


def last(*windows):
    return list(outputs(windows))[-1]


@pytest.mark.parametrize(
    ("speculative", "difference", "says"),
    [
        (last([0, 1, 2]), None, "same tokens: yes (3 of 3)"),
        (last([0, 5, 2]), 1, "same tokens: no (first difference at 1)"),
        (last([0, 1]), 2, "same tokens: no (first difference at 2)"),
        (last([0, 1, 2, 3]), 3, "same tokens: no (first difference at 3)"),
    ],
)
def test_a_comparison_finds_the_first_difference(speculative, difference, says):
    comparison = Comparison("An edit", "n-gram", last([0], [1], [2]), speculative)
    assert comparison.first_difference == difference
    assert comparison.summary() == says


def test_the_same_tokens_exit_with_0(scenes):
    result = invoke("demo", "--max-tokens", "5")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("same tokens: yes (5 of 5)") == num_comparisons(scenes)
    assert result.stdout.count("abcde") == num_comparisons(scenes) + len(scenes)


def test_every_prompt_has_drafts_of_its_own_and_a_place_in_the_table(scenes, monkeypatch):
    monkeypatch.setattr(LetterLLM, "asked", [])
    result = invoke("demo", "--max-tokens", "5")
    plain = [(model, None) for model in dict.fromkeys(scene.model for scene in scenes)]
    drafting = [(scene.model, spec) for scene in scenes for spec in scene.drafts.values()]
    assert LetterLLM.asked == [*plain, *drafting]
    _, table = result.stdout.rsplit("same tokens", 1)
    for scene in scenes:
        assert table.count(scene.title) == 1
        assert all(drafts in table for drafts in scene.drafts)


def test_other_tokens_exit_with_1(scenes, monkeypatch):
    monkeypatch.setattr(LetterLLM, "speculative_windows", ([0], [1, 7, 3], [4]))
    result = invoke("demo", "--max-tokens", "5")
    assert result.exit_code == 1
    different = result.stdout.count("same tokens: no (first difference at 2)")
    assert different == num_comparisons(scenes)


def test_the_table_fits_80_columns():
    speculation = SpeculationMetrics(200, 900, 900, (200,) * 64, (200,) * 64)
    metrics = RequestMetrics(0.0, 1.0, 1.1, 0, speculation)
    output = RequestOutput(
        "0", None, (7,), (CompletionOutput(0, "", tuple(range(1100)), "length"),), True, metrics
    )
    comparisons = [
        Comparison(scene.title, drafts, output, output)
        for scene in (*SCENES, HYBRID_SCENE)
        for drafts in scene.drafts
    ]
    console = Console(file=io.StringIO(), width=300)
    console.print(comparison_table(comparisons))
    lines = console.file.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert (
        sum("10990.0" in line and "100 100 100 ..%" in line for line in lines)
        == len(comparisons) + 1
    )


def test_accepted_drafts_are_coloured():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", soft_wrap=True)
    answer(
        LetterLLM("m", announce=print),
        "p",
        SamplingParams(temperature=0.0, ignore_eos=True),
        console,
    )
    green = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    green.print("b", style=ACCEPTED_STYLE, end="")
    start, _, end = green.file.getvalue().partition("b")
    assert file.getvalue() == f"a{start}bc{end}de\n"
