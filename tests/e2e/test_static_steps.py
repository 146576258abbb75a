"""Steps of static shapes, as graphs hold them: the tokens and reports of the eager verbs.

Penalties, masks, biases, grammars and log-probabilities are done between the halves of a step;
requests that ask for them stay in the batch.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from helpers.harness import ScriptedDrafter, Shape, build, draft_model, request
from helpers.static_steps import DeviceChoices, Uncaptured, static_runner
from helpers.structured import model, structured_request
from helpers.toy import ToyModel
from sametoken.core.structured_outputs import StructuredOutputs, Stuck
from sametoken.drafters.ngram import NgramDrafter
from sametoken.kernels.ngram.triton import lookup
from sametoken.runner.step import StepRunner
from sametoken.verification.grammar import SlowGrammarError

MODEL = ToyModel()
SHAPE = Shape(num_drafts=3, max_num_seqs=4, prefill_chunk_size=8, block_size=4, num_blocks=40)
ASKED = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.3, "seed": 2, "top_k": 4, "top_p": 0.9},
    {"seed": 3, "temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"seed": 4, "temperature": 0.7, "frequency_penalty": 1.0, "logit_bias": {3: 1.5}},
    {"seed": 5, "allowed_token_ids": (1, 2, 5, 7)},
    {"seed": 6, "min_tokens": 3, "stop_token_ids": (4, 6), "logprobs": 2, "prompt_logprobs": 1},
    {"seed": 7, "temperature": 1.1, "logprobs": 0, "repetition_penalty": 0.7},
)
DRAFTERS = {
    "none": None,
    "mixed": lambda parts: ScriptedDrafter(parts, "mixed"),
    "ngram": lambda parts: NgramDrafter(parts.shape.num_drafts, 1, 3, lookup),
    "model": lambda parts: draft_model(parts, MODEL),
}


def requests():
    generator = random.Random(3)
    return [
        request(
            f"r{index}",
            [generator.randrange(11) for _ in range(generator.choice((1, 5, 8, 13, 21)))],
            max_tokens=generator.choice((4, 9)),
            **asked,
        )
        for index, asked in enumerate(ASKED)
    ]


def structured_requests():
    """One of each form; the last two fail: nothing is left to choose, and masks that are slow."""
    word = StructuredOutputs(regex="[a-z]{3,8}")
    three = StructuredOutputs(regex="[a-z]{3}")
    asked = (
        (StructuredOutputs(json_schema='{"enum": ["x", "yes", 10]}'), {"seed": 0}),
        (StructuredOutputs(regex="(ab|cd){2,4}-[0-9]{1,3}"), {"seed": 1, "temperature": 1.2}),
        (word, {"seed": 2, "repetition_penalty": 1.3, "logprobs": 1, "min_tokens": 5}),
        (three, {"seed": 3, "min_tokens": 9}),
        (word, {"seed": 4}),
    )
    items = [
        structured_request(f"s{index}", [40 + index, 41, 42], structured, max_tokens=12, **params)
        for index, (structured, params) in enumerate(asked)
    ]
    items[-1] = replace(items[-1], grammar=SlowGrammar(items[-1].grammar))
    return [*items, request("free", [9, 8, 7], max_tokens=9)]


class SlowGrammar:
    """Its masks use up their time after a few tokens."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def new_matcher(self):
        return SlowMatcher(self._inner.new_matcher(), [0])


class SlowMatcher:
    def __init__(self, inner, committed: list[int]) -> None:
        self._inner, self._committed = inner, committed

    def accept(self, token_id):
        self._committed[0] += 1
        if self._committed[0] > 3:
            raise SlowGrammarError
        return self._inner.accept(token_id)

    def copy(self):
        return SlowMatcher(self._inner.copy(), [-9])

    def fill(self, masks, row):
        self._inner.fill(masks, row)


def answers(make_drafter, expected=None, *, items=None, model=MODEL, **how):
    """Tokens, log-probabilities and prompt log-probabilities by request, and drafts accepted."""
    oracle = None if expected is None else lambda admission: expected[admission.request_id]
    core = build(
        model, SHAPE, make_drafter=make_drafter, kernels=DeviceChoices(), oracle=oracle, **how
    )
    asked = {item.request_id: item for item in items or requests()}
    told = {request_id: ([], [], []) for request_id in asked}
    accepted = 0
    for item in asked.values():
        core.add_request(item)
    while core.has_unfinished:
        for update in core.step():
            tokens, logprobs, prompt_logprobs = told[update.request_id]
            if update.poisoned:
                tokens.append(update.stuck)
            tokens.extend(update.token_ids)
            logprobs.extend(update.logprobs or ())
            prompt_logprobs.extend(update.prompt_logprobs or ())
            accepted += update.num_accepted
            item = asked[update.request_id]
            if len(item.prompt_token_ids) + len(tokens) >= item.max_total_tokens:
                most = item.max_total_tokens - len(item.prompt_token_ids)
                del tokens[most:], logprobs[most:]
                core.release(update.request_id, item.max_total_tokens)
    core.scheduler.check_integrity()
    return told, accepted


@pytest.fixture(scope="module")
def plain():
    """Each request's answer by the eager verbs, without drafts."""
    return answers(None)[0]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_requests_of_every_kind_stay_in_the_batch(drafter, plain, monkeypatch):
    """No row runs by the eager verbs, and every token and report is theirs."""
    monkeypatch.setattr(StepRunner, "run_rows", None)
    monkeypatch.setattr(Uncaptured, "launches", 0)
    expected = {request_id: tokens for request_id, (tokens, _, _) in plain.items()}
    told, accepted = answers(DRAFTERS[drafter], expected, make_runner=static_runner)
    assert told == plain
    assert (accepted > 0) == (drafter != "none")
    assert Uncaptured.launches > 0


@pytest.mark.parametrize("drafter", ["none", "mixed"])
def test_grammars_stay_in_the_batch(drafter, monkeypatch):
    """Their tokens, and why a request fails, are those of the eager verbs."""
    items = structured_requests()
    plain, _ = answers(None, items=items, model=model())
    endings = {name: tokens[-1] for name, (tokens, _, _) in plain.items()}
    assert (endings["s3"], endings["s4"]) == (Stuck.NO_TOKEN, Stuck.SLOW)
    monkeypatch.setattr(StepRunner, "run_rows", None)
    expected = {name: [int(token) for token in tokens] for name, (tokens, _, _) in plain.items()}
    told, accepted = answers(
        DRAFTERS[drafter], expected, items=items, model=model(), make_runner=static_runner
    )
    assert told == plain
    assert (accepted > 0) == (drafter != "none")
