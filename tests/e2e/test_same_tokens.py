"""Oracle 1 of the design: with speculation on, off, and in any batch, the same tokens.

A state machine adds, aborts and steps requests on an engine with random drafts, random
asynchrony and scarce memory. Each request's tokens must be those of the same request
alone in a plain engine.
"""

from __future__ import annotations

import itertools
import os
import random
from functools import lru_cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers.harness import (
    Ran,
    ScriptedDrafter,
    Shape,
    build,
    collect,
    draft_model,
    request,
    run,
    state_head,
)
from helpers.lookups import ngram_drafter
from helpers.static_steps import CHOICE, DeviceChoices, chosen_steps
from helpers.toy import ToyModel
from sametoken.ops.lookup import ngram as reference
from sametoken.ops.lookup.ngram_triton import lookup as device_lookup
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.runner.stream import LaggingStream

MODEL = ToyModel()
SCRIPTS = ("right", "wrong", "alternating", "empty", "mixed")
BEYOND = 5
# Seeds are all different: with the prompt they name a request's truth.
PARAMS = (
    {"seed": 0},
    {"seed": 1, "temperature": 0.8},
    {"seed": 2, "temperature": 1.3, "top_k": 4},
    {"seed": 3, "temperature": 0.9, "top_p": 0.7, "min_p": 0.05},
    {"seed": 4, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"seed": 5, "temperature": 0.7, "frequency_penalty": 1.0, "logit_bias": {3: 1.5}},
    {"seed": 6, "allowed_token_ids": (1, 2, 5, 7)},
    {"seed": 7, "min_tokens": 3, "stop_token_ids": (4, 6), "logprobs": 2, "prompt_logprobs": 1},
)
LONGEST = 12
TAIL = (7, 3, 10, 0, 5)
BACKENDS = {"reference": ReferenceKernels(), "native": NativeKernels()}


@lru_cache(maxsize=4096)
def alone(prompt: tuple[int, ...], params: int, kernels: str = "reference") -> tuple[int, ...]:
    """The request by itself: no speculation, one step at a time, no shared prefixes."""
    shape = Shape(max_num_seqs=1, prefix_caching=False)
    core = build(MODEL, shape, kernels=BACKENDS[kernels], steps="compact")
    item = request("alone", prompt, max_tokens=LONGEST + BEYOND, **PARAMS[params])
    return tuple(run(core, [item]).tokens["alone"])


def self_drafter(parts):
    """A draft model that is the target itself, with KV of its own."""
    return draft_model(parts, MODEL)


def make_drafter(kind: str, seed: int = 0):
    if kind in SCRIPTS:
        return lambda parts: ScriptedDrafter(parts, kind, seed)
    if kind == "ngram":
        lookup = device_lookup if chosen_steps() == "kernels" else reference.lookup
        return lambda parts: ngram_drafter(parts.shape.num_drafts, lookup=lookup)
    if kind == "state":
        return lambda parts: state_head(parts, MODEL)
    return self_drafter


class SameTokens(RuleBasedStateMachine):
    """Requests come and go; their tokens never depend on it."""

    layouts: tuple[str, ...] = ("compact", "static")

    @initialize(
        data=st.data(),
        kernels=st.sampled_from(list(BACKENDS)),
        kind=st.sampled_from((*SCRIPTS, "ngram", "self", "state")),
        steps_in_flight=st.integers(1, 3),
        num_drafts=st.integers(1, 4),
        chunk=st.sampled_from((4, 8, 16)),
        num_blocks=st.sampled_from((10, 14, 60)),
        caching=st.booleans(),
        draft_share=st.sampled_from((0.0, 0.1, 0.4)),
        seed=st.integers(0, 999),
    )
    def start(
        self,
        data,
        kernels,
        kind,
        steps_in_flight,
        num_drafts,
        chunk,
        num_blocks,
        caching,
        draft_share,
        seed,
    ):
        self.kind, self.kernels = kind, kernels
        self.random = random.Random(seed)
        self.asked = {}
        self.gone = set()
        self.limits = {}
        self.ran = Ran()
        shape = Shape(
            num_drafts=num_drafts,
            steps_in_flight=steps_in_flight,
            prefill_chunk_size=chunk,
            num_blocks=num_blocks,
            max_model_len=36,
            prefix_caching=caching,
            captures=True,
            free_rows=0 if draft_share else 16,
            draft_share=draft_share,
        )
        stream = LaggingStream(lambda queued: self.random.randint(0, queued))
        self.core = build(
            MODEL,
            shape,
            make_drafter=make_drafter(kind, seed),
            oracle=lambda admitted: self.truth[admitted.prompt_token_ids, admitted.params.seed],
            stream=stream,
            kernels=BACKENDS[kernels],
            steps=data.draw(st.sampled_from(self.layouts)),
        )
        self.truth = {}

    @rule(
        prefix=st.sampled_from(((), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 9, 9, 9, 9))),
        length=st.sampled_from((1, 4, 5)),
        max_tokens=st.integers(3, LONGEST),
        params=st.integers(0, len(PARAMS) - 1),
        max_drafts=st.sampled_from((None, None, 0, 1)),
    )
    def add(self, prefix, length, max_tokens, params, max_drafts):
        request_id = f"r{len(self.asked)}"
        # Few prompts, around the edges of blocks: truths are computed once, and blocks are shared.
        prompt = (*prefix, *TAIL[:length])
        item = request(
            request_id, prompt, max_tokens=max_tokens, max_drafts=max_drafts, **PARAMS[params]
        )
        truth = alone(prompt, params, self.kernels)
        self.truth[prompt, params] = list(truth)
        self.asked[request_id] = list(truth[:max_tokens])
        self.limits[request_id] = max_tokens
        self.ran.tokens[request_id] = []
        self.core.add_request(item)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        self.core.release(request_id)
        self.gone.add(request_id)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            if self.core.has_unfinished:
                collect(self.core, self.ran, self.limits)

    @invariant()
    def emitted_tokens_are_those_of_the_request_alone(self):
        if not hasattr(self, "asked"):
            return
        for request_id, truth in self.asked.items():
            out = self.ran.tokens[request_id]
            assert out == truth[: len(out)], request_id
        self.core.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "asked"):
            return
        for _ in range(3000):
            if not self.core.has_unfinished:
                break
            collect(self.core, self.ran, self.limits)
        assert not self.core.has_unfinished
        for request_id, truth in self.asked.items():
            if request_id not in self.gone:
                assert self.ran.tokens[request_id] == truth, request_id
        if self.kind == "wrong":
            assert self.ran.accepted == 0
        if self.kind in ("right", "empty"):
            assert self.ran.accepted == self.ran.offered


TestSameTokens = SameTokens.TestCase
TestSameTokens.settings = settings(max_examples=24, stateful_step_count=30)


class SameTokensOfKernels(SameTokens):
    """The same by the Triton kernels of a step, under the interpreter."""

    layouts = ("kernels",)


TestSameTokensOfKernels = SameTokensOfKernels.TestCase
TestSameTokensOfKernels.settings = settings(max_examples=3, stateful_step_count=12)


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize(
    ("kind", "steps_in_flight"),
    [(kind, 1 + i % 3) for i, kind in enumerate((*SCRIPTS, "ngram", "self", "state"))],
)
def test_every_drafter_leaves_every_token_alone(kind, steps_in_flight):
    prompts = [(1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 6, 7, 8, 3), (4,), tuple(range(10)) * 2]
    # Each parameters with two prompts, and no two with the same two.
    asked = [
        (prompts[(params + more) % 4], params)
        for params in range(len(PARAMS))
        for more in (0, 1 + params // 4)
    ]
    items = [
        request(f"r{i}", prompt, max_tokens=LONGEST, **PARAMS[params])
        for i, (prompt, params) in enumerate(asked)
    ]
    truth = {one: list(alone(*one)) for one in asked}
    core = build(
        MODEL,
        Shape(steps_in_flight=steps_in_flight, num_blocks=40, captures=True),
        make_drafter=make_drafter(kind),
        oracle=lambda admitted: truth[admitted.prompt_token_ids, admitted.params.seed],
    )
    ran = run(core, items)
    for item in items:
        assert (
            ran.tokens[item.request_id] == truth[item.prompt_token_ids, item.params.seed][:LONGEST]
        )
    assert_acceptance(kind, ran)


def assert_acceptance(kind: str, ran: Ran) -> None:
    """Oracle 2: what a drafter's kind must give, or the drafter itself is broken."""
    assert ran.offered > 0
    if kind in ("right", "empty"):
        assert ran.accepted == ran.offered
    elif kind == "wrong":
        assert ran.accepted == 0
    elif kind != "ngram":
        assert ran.accepted > 0


@pytest.mark.parametrize("kind", ["right", "wrong", "empty", "mixed", "ngram", "self", "state"])
def test_few_requests(kind, monkeypatch):
    """By the Triton kernels of a step and of choices, which the interpreter runs slowly."""
    monkeypatch.setenv(CHOICE, os.environ.get(CHOICE, "kernels"))
    prompts = ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5), (4,))
    asked = [
        (prompt, params, 5 + params) for prompt, params in zip(prompts, (0, 2, 4), strict=True)
    ]
    truth = {(prompt, params): list(alone(prompt, params)) for prompt, params, _ in asked}
    core = build(
        MODEL,
        Shape(num_drafts=2, max_num_seqs=2, steps_in_flight=2),
        make_drafter=make_drafter(kind),
        oracle=lambda admitted: truth[admitted.prompt_token_ids, admitted.params.seed],
        kernels=DeviceChoices() if chosen_steps() == "kernels" else None,
    )
    items = [
        request(f"r{params}", prompt, max_tokens=count, **PARAMS[params])
        for prompt, params, count in asked
    ]
    ran = run(core, items)
    for prompt, params, count in asked:
        assert ran.tokens[f"r{params}"] == truth[prompt, params][:count]
    assert_acceptance(kind, ran)


@pytest.mark.parametrize(
    ("kind", "steps_in_flight"), [("mixed", 1), ("empty", 3), ("ngram", 3), ("self", 1)]
)
def test_limits_of_drafts_change_no_token(kind, steps_in_flight):
    """Enough requests, on a device that computes so little, that drafts are refused."""
    prompts = [tuple((i * j) % 11 for j in range(1, 3 + 3 * i)) for i in range(8)]
    items = [
        request(f"r{i}", prompt, max_tokens=LONGEST, **PARAMS[i % len(PARAMS)])
        for i, prompt in enumerate(prompts)
    ]
    truth = {
        (prompt, i % len(PARAMS)): list(alone(prompt, i % len(PARAMS)))
        for i, prompt in enumerate(prompts)
    }
    shape = Shape(
        num_drafts=4,
        steps_in_flight=steps_in_flight,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        prefill_chunk_size=48,
        num_blocks=120,
        rows_per_weight_read=12,
        draft_share=0.1,
    )
    core = build(
        MODEL,
        shape,
        make_drafter=make_drafter(kind),
        oracle=lambda admitted: truth[admitted.prompt_token_ids, admitted.params.seed],
    )
    limits, wanted, plan_step = set(), set(), core.scheduler.plan

    def watched():
        plan = plan_step()
        limits.update(row.draft_limit for row in (plan.requests if plan else ()))
        wanted.add(plan.num_wanted if plan else None)
        return plan

    core.scheduler.plan = watched
    ran = run(core, items)
    for i, item in enumerate(items):
        assert ran.tokens[item.request_id] == truth[prompts[i], i % len(PARAMS)][:LONGEST]
    assert min(len(limits), len(wanted - {None})) > 2, "they follow what happens"
    assert ran.offered > 0


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize(
    ("kind", "steps_in_flight"), [("alternating", 1), ("mixed", 2), ("self", 1), ("state", 1)]
)
def test_passes_that_are_left_out_change_no_token(kind, steps_in_flight):
    """And drafts are as right as with all passes: only their number varies."""
    items = [
        request(f"r{i}", tuple((i * j) % 11 for j in range(1, 4 + i)), LONGEST, **PARAMS[i])
        for i in range(4)
    ]
    truth = {item.request_id: list(alone(item.prompt_token_ids, i)) for i, item in enumerate(items)}
    shape = Shape(num_drafts=4, steps_in_flight=steps_in_flight, rows_per_weight_read=8)
    core = build(
        MODEL,
        shape,
        make_drafter=make_drafter(kind),
        oracle=lambda admitted: truth[admitted.request_id],
    )
    turns = itertools.cycle((2, 0, 4, 1, 0, 0, 3))
    core.scheduler._budget.num_wanted = lambda given: next(turns)
    ran = run(core, items)
    assert ran.tokens == {name: tokens[:LONGEST] for name, tokens in truth.items()}
    assert_acceptance(kind, ran)
    if kind in ("self", "state"):
        greedy = PARAMS[0]
        only = build(MODEL, shape, make_drafter=make_drafter(kind))
        only.scheduler._budget.num_wanted = lambda given: next(turns)
        ran = run(only, [request("r", (1, 2, 3), 30, **greedy)])
        assert ran.accepted == ran.offered > 0
