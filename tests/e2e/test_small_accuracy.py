"""The CI job of vllm#38419 in small: lm-eval's score of a trained Nemotron-H, with and without MTP.

The model cannot calculate, so its questions ask for code again, in which the answer is.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from helpers.trained import MTP
from sametoken.cli.main import app
from sametoken.models.names import NEMOTRON_NAME

pytest.importorskip("lm_eval", reason="lm-eval, the extra eval, is not installed")

QUESTION = "Repeat this code.\n\n```python\ndef {}(a, b):\n    return (a + b) {} {}\n```"
NAMES, SIGNS, NUMBERS = ("scale", "shift", "total"), "+*-", (85, 76, 57, 63)
SIZES = ("--max-num-seqs", "4", "--max-model-len", "256", "--prefill-chunk-size", "16")
TASK = ("--num-fewshot", "0", "--chat", "--max-tokens", "32")


def test_drafts_leave_the_score_of_a_trained_model(tmp_path):
    """Each prompt is read in four chunks."""
    path = tmp_path / "questions.jsonl"
    asked = (
        {
            "question": QUESTION.format(NAMES[i % 3], SIGNS[i % 3], number),
            "answer": f"#### {number}",
        }
        for i, number in enumerate(NUMBERS)
    )
    path.write_text("\n".join(map(json.dumps, asked)))
    command = (
        "eval",
        "gsm8k",
        NEMOTRON_NAME,
        "--path",
        str(path),
        "--device",
        "cpu",
        *SIZES,
        *TASK,
    )
    drafts = ("--speculative-config", json.dumps(MTP), "--compare-plain")
    steps = ("--steps-in-flight", "3")
    result = CliRunner().invoke(app, [*command, *drafts, *steps, "--min-score", "0.5", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{") :])
    assert (found["num_answers"], found["answers_that_differ"]) == (len(NUMBERS), 0)
    assert found["acceptance_length"] > 3.5
