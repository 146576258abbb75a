"""The trained hybrids of the repository: real text, real drafts, the same tokens.

Its drafters meet what they are for, code that repeats itself and a trained MTP module, so
acceptance is asserted beside the tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import cycle
from types import MappingProxyType

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from helpers import calculator
from helpers.harness import swapped_by
from sametoken import LLM, SamplingParams
from sametoken.cli.demo import CALCULATOR_EDIT, WORD_PROBLEM
from sametoken.models.names import CHECKOUT_NAMES, HYBRID_NAME, NEMOTRON_NAME, checkout_directory
from sametoken.runner.cpu_stream import CpuStream
from sametoken.runner.stream import DONE
from sametoken.types.outputs import SpeculationMetrics

transformers_logging.disable_progress_bar()
CODE = '''\
class Stack:
    """A stack of items."""

    def __init__(self):
        self.items = []

    def push(self, item):
'''
MTP = {"method": "mtp", "num_speculative_tokens": 3}
DRAFTERS = {
    "ngram": calculator.NGRAM,
    "mtp-3": MTP,
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
    "ngram, mtp": MTP
    | {"num_speculative_tokens": 12, "cascade": "ngram", "cascade_model_tokens": 3},
}
EDIT, CODE_ALONE = 0, 4
#: Tokens per step that drafters must reach in the greedy edit, and in the greedy code.
LEAST = {"ngram": (4.0, 1.1), "mtp-3": (3.0, 1.9), "suffix": (3.2, 1.2), "ngram, mtp": (4.5, 1.9)}
Tokens = list[tuple[int, ...]]


def hybrid(name: str = HYBRID_NAME, **options) -> LLM:
    return LLM(name, **{"device": "cpu", "max_model_len": 512, "max_num_seqs": 1} | options)


def asked(max_tokens: int, temperature: float = 0.0, **options) -> SamplingParams:
    """Greedy, or sampled; the answer is as long as it may be."""
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, ignore_eos=True, **{"seed": 1} | options
    )


CHATS = [
    (CALCULATOR_EDIT, asked(48)),
    (CALCULATOR_EDIT, asked(32, 0.8)),
    (calculator.PROMPT, asked(16, 1.0, seed=3)),
    (WORD_PROBLEM, asked(16)),
]
TEXTS = [(CODE, asked(32)), (CODE, asked(24, 0.7, top_p=0.9)), (calculator.PROMPT, asked(20))]


def answers(
    llm: LLM, limits: Mapping[int, int] = MappingProxyType({})
) -> tuple[Tokens, list[SpeculationMetrics]]:
    """To all prompts, with their counters; ``limits`` are drafts that requests take at most."""
    chats = [llm.render_chat([{"role": "user", "content": text}]).token_ids for text, _ in CHATS]
    prompts = [*({"prompt_token_ids": ids} for ids in chats), *(text for text, _ in TEXTS)]
    params = [
        replace(one, num_speculative_tokens=limits.get(index))
        for index, (_, one) in enumerate((*CHATS, *TEXTS))
    ]
    outputs = llm.generate(prompts, params)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert [len(one) for one in tokens] == [one.max_tokens for one in params]
    return tokens, [output.metrics.speculation for output in outputs]


@cache
def plain() -> Tokens:
    """One request at a time, one token a step."""
    tokens, speculation = answers(hybrid())
    assert all(one.acceptance_length == 1 for one in speculation)
    return tokens


def fixed(drafter: str) -> dict:
    """The drafter with as many drafts in a batch as alone."""
    return DRAFTERS[drafter] | {"draft_limits": "fixed"}


@cache
def alone(drafter: str) -> tuple[Tokens, list[SpeculationMetrics]]:
    return answers(hybrid(speculative_config=fixed(drafter)))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_requests_one_at_a_time(drafter):
    tokens, speculation = alone(drafter)
    assert tokens == plain()
    lengths = [one.acceptance_length for one in speculation]
    assert lengths[EDIT] > LEAST[drafter][0]
    assert lengths[CODE_ALONE] > LEAST[drafter][1]
    assert sum(one.num_accepted_tokens < one.num_draft_tokens for one in speculation) > 4


def test_steps_of_changing_numbers_of_threads(monkeypatch):
    """As where other processes come and go; also beside the drafts that are accepted."""
    # Most steps have one: threads that wait for others spin.
    numbers = cycle((1, 2, 1, 1, 1, 3, 1, 1))

    def submit(self, work):
        before = torch.get_num_threads()
        torch.set_num_threads(next(numbers))
        work()
        torch.set_num_threads(before)
        return DONE

    monkeypatch.setattr(CpuStream, "submit", submit)
    assert answers(hybrid(speculative_config=fixed("mtp-3"))) == alone("mtp-3")


def test_matches_are_accepted_most_in_the_edit():
    _, speculation = alone("ngram")
    lengths = [one.acceptance_length for one in speculation]
    assert lengths[EDIT] == max(lengths)


@pytest.mark.parametrize("drafter", ["suffix", "ngram, mtp"])
def test_a_batch_in_small_chunks(drafter):
    """Four at once, the others wait; two take fewer drafts, and no other request loses one."""
    sizes = {"max_num_seqs": 4, "prefill_chunk_size": 32, "max_num_batched_tokens": 512}
    limits = {3: 1, 6: 0}
    tokens, speculation = answers(hybrid(speculative_config=fixed(drafter), **sizes), limits)
    assert tokens == plain()
    # Suffix drafts come from what others said before, and here others did.
    if drafter != "suffix":
        own = [index for index in range(len(tokens)) if index not in limits]
        assert [speculation[i] for i in own] == [alone(drafter)[1][i] for i in own]
    assert speculation[3].num_draft_tokens <= speculation[3].num_steps
    assert speculation[6].num_draft_tokens == 0


def test_steps_in_flight():
    """Three at once, in chunks of one block."""
    options = {"steps_in_flight": 3, "prefill_chunk_size": 16, "max_num_seqs": 3}
    tokens, speculation = answers(hybrid(speculative_config=DRAFTERS["mtp-3"], **options))
    assert tokens == plain()
    assert speculation[EDIT].acceptance_length > LEAST["mtp-3"][0]


def test_preempted_requests_go_on_as_they_were(monkeypatch):
    """Memory for about three of the seven."""
    drafter = "ngram, mtp"
    memory = {"max_model_len": 416, "num_kv_blocks": 27, "max_num_seqs": 7}
    llm = hybrid(speculative_config=DRAFTERS[drafter], **memory)
    swapped = swapped_by(llm._engine, monkeypatch)
    tokens, speculation = answers(llm)
    assert swapped, "nothing was preempted"
    assert tokens == plain()
    assert speculation[EDIT].acceptance_length > LEAST[drafter][0]


@pytest.mark.parametrize(("name", "k", "least"), [(HYBRID_NAME, 3, 3.0), (NEMOTRON_NAME, 5, 4.0)])
def test_drafts_leave_what_transformers_says(name, k, least):
    """In fp32, up to the end of the greedy edit's text: each token is the likeliest one."""
    drafts = MTP | {"num_speculative_tokens": k}
    llm = hybrid(name, speculative_config=drafts, dtype="float32")
    prompt = llm.render_chat([{"role": "user", "content": CALCULATOR_EDIT}]).token_ids
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt}], SamplingParams(temperature=0.0, max_tokens=96)
    )
    said = output.outputs[0].token_ids
    model = AutoModelForCausalLM.from_pretrained(
        checkout_directory(name), dtype=torch.float32, trust_remote_code=False
    )
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *said]])).logits[0]
    assert len(said) > 60
    assert said == tuple(logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist())
    assert output.metrics.speculation.acceptance_length > least


def percentages(rates: list[float]) -> str:
    return " ".join(f"{100 * rate:.0f}" for rate in rates)


@pytest.mark.parametrize("name", CHECKOUT_NAMES)
def test_its_card_says_what_its_files_say(name):
    directory = checkout_directory(name)
    card = (directory / "README.md").read_text(encoding="utf-8")
    training = json.loads((directory / "training.json").read_text())
    settings, result = training["settings"], training["result"]
    loop = settings["loop"]
    weights = (directory / "model.safetensors").read_bytes()
    assert f"`{hashlib.sha256(weights).hexdigest()}`" in card
    assert f"{len(weights) / 1e6:.1f} MB, bf16" in card
    assert f"{result['parameters'] / 1e6:.1f} million parameters" in card
    assert f"| time | {result['seconds']:.0f} seconds" in card
    assert f"{result['steps']}, of {loop['batch_tokens']} tokens in windows of 1024" in card
    assert f"{result['trained_tokens'] / 1e6:.1f} million drawn" in card
    assert f"| seed | {loop['seed']} |" in card
    assert f"| perplexity | {result['perplexity']:.2f}," in card
    drafts = percentages(result["acceptance"])
    assert f"| {drafts} %, each once those before it were right; acceptance length" in card
    assert f"acceptance length {result['average_length']:.2f} |" in card


@pytest.mark.parametrize("name", CHECKOUT_NAMES)
def test_its_card_has_the_acceptance_that_was_measured(name):
    card = (checkout_directory(name) / "README.md").read_text(encoding="utf-8")
    found = json.loads((checkout_directory(name) / "acceptance.json").read_text())
    assert f"greedy, {found['settings']['k']} drafts a step" in card
    for prompts, title in (
        ("gsm8k", "GSM8K"),
        ("humaneval", "HumanEval"),
        ("mt-bench", "MT-Bench"),
    ):
        one = found[prompts]
        (row,) = (line for line in card.splitlines() if line.startswith(f"| {title}"))
        figures = f"| {one['requests']} | {one['acceptance_length']:.2f} | "
        assert row.endswith(f"{figures}{percentages(one['per_position'])} |")
    assert f"Mean of the sets: **{found['mean']:.2f}**" in card
