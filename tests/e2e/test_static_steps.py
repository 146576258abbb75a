"""What requests are told beside their tokens: the same in every layout of steps.

Penalties, masks, biases, grammars and log-probabilities are done between the halves of a step;
requests that ask for them stay in the batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from helpers.harness import ScriptedDrafter, Shape, build, request
from helpers.static_steps import DeviceChoices
from helpers.structured import model, structured_request
from sametoken.sampling.grammar_masks import SlowGrammarError
from sametoken.types.structured_outputs import MaskFault, StructuredOutputs

SHAPE = Shape(num_drafts=3, max_num_seqs=4, prefill_chunk_size=8, block_size=4, num_blocks=40)
WORD, LETTERS = StructuredOutputs(regex="[a-z]{3,8}"), StructuredOutputs(regex="[a-z]{3}")
MAX_TOKENS = 9
ASKED = (
    (None, {"temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5}),
    (None, {"min_tokens": 3, "stop_token_ids": (4, 6), "logprobs": 2, "prompt_logprobs": 1}),
    (None, {"temperature": 1.1, "logprobs": 0, "top_k": 9, "logit_bias": {3: 1.5}}),
    (WORD, {"repetition_penalty": 1.3, "logprobs": 1, "min_tokens": 5}),
    # Nothing is left to choose; and masks that are slow.
    (LETTERS, {"min_tokens": MAX_TOKENS}),
    (WORD, {}),
)


def requests():
    items = []
    for i, (structured, params) in enumerate(ASKED):
        name, prompt = f"r{i}", [40 + i * j % 7 for j in range(1 + 5 * i)]
        asked = params | {"seed": i, "max_tokens": MAX_TOKENS}
        if structured is None:
            items.append(request(name, prompt, **asked))
        else:
            items.append(structured_request(name, prompt, structured, **asked))
    items[-1] = replace(items[-1], grammar=SlowGrammar(items[-1].grammar))
    return items


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


def answers(steps: str, kernels, drafted: bool):
    """Tokens, log-probabilities and causes of failure by request, and drafts accepted."""

    def make_drafter(parts):
        return ScriptedDrafter(parts, "mixed")

    core = build(
        model(),
        SHAPE,
        make_drafter=make_drafter if drafted else None,
        kernels=kernels,
        steps=steps,
        oracle=(lambda admitted: told_plainly()[admitted.request_id][0]) if drafted else None,
    )
    told, accepted = {}, 0
    for item in requests():
        core.add_request(item)
        told[item.request_id] = [], [], [], []
    while core.has_unfinished:
        for update in core.step():
            tokens, logprobs, prompt_logprobs, causes = told[update.request_id]
            causes.extend([update.mask_fault] * update.failed)
            tokens.extend(update.token_ids)
            logprobs.extend(update.logprobs or ())
            prompt_logprobs.extend(update.prompt_logprobs or ())
            accepted += update.num_accepted
            if len(tokens) >= MAX_TOKENS:
                del tokens[MAX_TOKENS:], logprobs[MAX_TOKENS:]
                core.release(update.request_id)
    return told, accepted


@lru_cache
def told_plainly():
    return answers("compact", DeviceChoices(), drafted=False)[0]


@pytest.mark.parametrize(
    ("steps", "drafted"), [("static", True), ("kernels", False), ("kernels", True)]
)
def test_what_is_told_is_that_of_compact_steps(steps, drafted):
    """By the kernels of captured steps, which choose tokens in all of them."""
    told, accepted = answers(steps, DeviceChoices(), drafted=drafted)
    assert told == told_plainly()
    assert told["r4"][3] == [MaskFault.NO_VALID_TOKEN]
    assert told["r5"][3] == [MaskFault.SLOW]
    assert (accepted > 0) == drafted
