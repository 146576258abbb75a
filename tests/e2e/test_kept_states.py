"""Hybrids start from states that earlier requests left: chats, shared prefixes, preemption.

Tokens must be those of an engine that has never run another request.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from helpers.decaying_sum import MixedToy
from helpers.harness import ScriptedDrafter, Shape, build, replayed_by, request, run
from helpers.hybrid_toy import HybridToy
from helpers.hybrids import write_hybrid
from helpers.turns import Talk, check_turns, start
from sametoken import LLM, SamplingParams
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.models.names import HYBRID_NAME
from sametoken.ops.native.backend import NativeKernels
from sametoken.runner.stream import LaggingStream
from sametoken.scheduler import kept_states

NATIVE = NativeKernels()
TOYS = {"hybrid": HybridToy(kernels=NATIVE), "mixed": MixedToy(kernels=NATIVE)}
COLD = Shape(max_num_seqs=1, prefix_caching=False, cache_emitted=False)
HOT = Shape(num_kept_states=8, num_blocks=90)
MAX_TOKENS = 20
BEGINNING = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
MTP = {"method": "mtp", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}


@pytest.fixture(autouse=True)
def short_interval(monkeypatch):
    """States of short prompts and answers are kept too."""
    monkeypatch.setattr(kept_states, "INTERVAL", 2)


@lru_cache
def continuation(toy: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    core = build(TOYS[toy], COLD, kernels=NATIVE, steps="compact")
    return tuple(run(core, [request("x", prompt, max_tokens=MAX_TOKENS)]).tokens["x"])


def engine(toy: str, shape: Shape, script: str = "mixed", **options):
    return build(
        TOYS[toy],
        shape,
        make_drafter=lambda parts: ScriptedDrafter(parts, script),
        oracle=lambda admitted: list(continuation(toy, admitted.prompt_token_ids)),
        kernels=NATIVE,
        **options,
    )


class Chat:
    """Some turns: an answer of some length, cut by whoever reads it, then a reply."""

    def __init__(self, toy: str, name: str, prompt, chance: random.Random, turns: int = 3) -> None:
        self.toy, self.name, self.chance = toy, name, chance
        self.prompt, self.turns_left, self.cached = tuple(prompt), turns, []

    def ask(self, core) -> None:
        self.turns_left -= 1
        expected = continuation(self.toy, self.prompt)
        self.expected, self.answer = expected[: self.chance.randint(9, 15)], ()
        core.add_request(request(self.name, self.prompt, max_tokens=MAX_TOKENS))

    def take(self, core, update) -> None:
        self.answer += update.token_ids
        if len(self.answer) < len(self.expected):
            return
        assert self.answer[: len(self.expected)] == self.expected
        self.cached.append(update.num_cached)
        self.prompt += self.expected
        core.release(self.name, len(self.prompt))
        if self.turns_left:
            self.prompt += tuple(self.chance.randrange(11) for _ in range(3))
            self.ask(core)


def converse(core, chats: list[Chat]) -> int:
    """Returns how many requests were preempted at once at most."""
    most_swapped = 0
    by_name = {chat.name: chat for chat in chats}
    for chat in chats:
        chat.ask(core)
    while core.has_unfinished:
        for update in core.step():
            by_name[update.request_id].take(core, update)
        core.scheduler.check_integrity()
        most_swapped = max(most_swapped, core.scheduler.num_swapped)
    return most_swapped


@pytest.mark.parametrize("script", ["right", "mixed"])
def test_a_chat_goes_on_from_its_last_answer(script):
    """The state was kept inside windows whose drafts were accepted."""
    chat = Chat("hybrid", "chat", BEGINNING, random.Random(1))
    converse(engine("hybrid", HOT, script), [chat])
    first, second, third = chat.cached
    assert first == 0
    assert len(BEGINNING) < second < third


@pytest.mark.parametrize(
    ("toy", "steps_in_flight", "num_blocks"),
    [("mixed", 1, 90), ("hybrid", 2, 30), ("mixed", 3, 40)],
)
def test_many_chats_with_steps_in_flight_and_little_memory(toy, steps_in_flight, num_blocks):
    chance = random.Random(steps_in_flight)
    shape = replace(HOT, steps_in_flight=steps_in_flight, num_blocks=num_blocks)
    stream = LaggingStream(lambda queued: chance.randint(0, queued))
    core = engine(toy, replace(shape, num_kept_states=6), stream=stream)
    prompts = (BEGINNING, BEGINNING[:13], [*BEGINNING[:9], 1, 1], [7] * 6)
    chats = [Chat(toy, f"r{i}", prompt, chance) for i, prompt in enumerate(prompts)]
    most_swapped = converse(core, chats)
    assert not any(chat.turns_left for chat in chats)
    assert core.scheduler.prefix_cache_hits >= 40
    assert bool(most_swapped) == (num_blocks < 90)


def test_prompts_that_share_a_beginning_start_after_it():
    """The first computes it, the second keeps the state where it diverges, others start there."""
    core = engine("mixed", HOT)
    prompts = [[*BEGINNING, *[i] * 6] for i in range(4)]
    for i, prompt in enumerate(prompts):
        ran = run(core, [request(f"r{i}", prompt, max_tokens=MAX_TOKENS)])
        assert tuple(ran.tokens[f"r{i}"]) == continuation("mixed", tuple(prompt))
    assert core.scheduler.prefix_cache_hits == 2 * len(BEGINNING)


def test_a_kept_state_is_that_of_a_run_from_scratch():
    """Bit for bit, at prompts' ends and inside answers, once the first row has folded it."""
    toy = TOYS["mixed"]
    core = engine("mixed", HOT, "right")
    converse(core, [Chat("mixed", "chat", BEGINNING, random.Random(2))])
    truth = BEGINNING + list(continuation("mixed", tuple(BEGINNING)))
    found = []
    for length in range(5, len(truth), 7):
        prompt = truth[:length]
        cold = build(toy, COLD, make_drafter=lambda parts: ScriptedDrafter(parts, "right"),
                     oracle=lambda admitted: [0], kernels=NATIVE)  # fmt: skip
        states = []
        for one in (core, cold):
            hits = one.scheduler.prefix_cache_hits
            run(one, [request("again", prompt, max_tokens=1)])
            if one is core:
                found.append(one.scheduler.prefix_cache_hits - hits)
            step = one._runner.step
            slot = int(step.kv.folded.position.eq(length).nonzero()[0])
            states.append([memory[:, slot] for memory in step.kv.slots])
        for position, (ours, theirs) in enumerate(zip(*states, strict=True)):
            # States and histories; rows that are pending are nobody's.
            assert position % 4 > 1 or torch.equal(ours, theirs)
    assert len(set(found)) > 2, found


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_hybrid(tmp_path_factory.mktemp("hybrid"), max_position_embeddings=160)


OPTIONS = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 4, "max_num_batched_tokens": 32}


@pytest.mark.parametrize(
    ("spec", "steps_in_flight", "steps", "chunk", "temperature"),
    [
        (None, 2, "compact", 16, 0.0),
        (NGRAM, 1, "static", 5, 0.8),
        (MTP, 3, "compact", 16, 0.8),
        (MTP, 1, "static", 7, 0.0),
    ],
    ids=["plain", "ngram", "mtp-late", "mtp-static"],
)
def test_every_turn_is_that_of_a_cold_engine(
    small, spec, steps_in_flight, steps, chunk, temperature
):
    options = OPTIONS | {
        "speculative_config": spec,
        "steps_in_flight": steps_in_flight,
        "prefill_chunk_size": chunk,
    }
    off = {"enable_prefix_caching": False}
    replies = ((5, 6, 7), (1, 2, 3, 4))
    check_turns(
        Talk((3, 5, 1, 8, 2, 9, 4), replies, 18, 4, temperature, kept_every=8),
        hot=start(small, steps, **options),
        cold=lambda: start(small, steps, **options | off),
        plain=lambda: start(small, **OPTIONS | off),
    )


def turns_of_three(small, **options):
    """Three chats side by side.

    Returns the scheduler, the positions that were computed again by plan, all tokens, and the
    accepted drafts.
    """
    core = build_engine(EngineConfig.from_options(model=str(small), **OPTIONS | options))
    replayed = replayed_by(core)
    llm, prompts, accepted = LLM.from_engine(core, None), [[*BEGINNING, i] for i in range(3)], 0
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    for _ in range(3):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        accepted += sum(output.metrics.speculation.num_accepted_tokens for output in outputs)
        answers = [output.outputs[0].token_ids for output in outputs]
        prompts = [[*prompt, *said, 5, 6] for prompt, said in zip(prompts, answers, strict=True)]
        core.scheduler.check_integrity()
    return core.scheduler, replayed, prompts, accepted


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_chats_that_lose_their_blocks_go_on_as_undisturbed(small, steps_in_flight):
    """Preempted without swap space they replay from position 0, beside states that were kept."""
    *_, calm, _ = turns_of_three(small, enable_prefix_caching=False)
    scheduler, replayed, tight, accepted = turns_of_three(
        small,
        speculative_config=NGRAM,
        steps_in_flight=steps_in_flight,
        num_kv_blocks=26,
        swap_space=0,
        kept_states_memory_bytes=2**20,
    )
    assert tight == calm
    assert any(replayed)
    assert scheduler.prefix_cache_hits
    assert accepted


def test_a_hybrid_draft_model_has_its_own_states(small):
    """Of prompts alone: its windows pass no position that is not their end."""
    spec = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 3}
    options = OPTIONS | {"speculative_config": spec, "skip_tokenizer_init": True}
    hot, cold = LLM(str(small), **options), LLM(str(small), enable_prefix_caching=False, **options)
    prompt, params = [*BEGINNING, 7], SamplingParams(max_tokens=12, temperature=0.0)
    for expected in (0, 16, 28):
        (warm,), (fresh,) = (
            llm.generate([{"prompt_token_ids": prompt}], params) for llm in (hot, cold)
        )
        assert warm.outputs[0].token_ids == fresh.outputs[0].token_ids
        assert warm.metrics.num_cached_tokens == expected
        speculation = warm.metrics.speculation
        assert speculation.num_accepted_tokens == speculation.num_draft_tokens > 0
        prompt = [*prompt, *warm.outputs[0].token_ids]


def test_a_chat_with_the_trained_hybrid():
    options = {"device": "cpu", "max_model_len": 384, "max_num_seqs": 2, "speculative_config": MTP}
    hot, cold = (
        LLM(HYBRID_NAME, **options),
        LLM(HYBRID_NAME, enable_prefix_caching=False, **options),
    )
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    chat = [{"role": "user", "content": "Repeat this code: def add(a, b): return a + b"}]
    prompt, cached = hot.render_chat(chat).token_ids, []
    for _ in range(3):
        (warm,), (fresh,) = (
            llm.generate([{"prompt_token_ids": list(prompt)}], params) for llm in (hot, cold)
        )
        assert warm.outputs[0].token_ids == fresh.outputs[0].token_ids
        assert warm.metrics.speculation == fresh.metrics.speculation
        cached.append(warm.metrics.num_cached_tokens)
        prompt = (*prompt, *warm.outputs[0].token_ids, *prompt[:12])
    assert 0 == cached[0] < cached[1] < cached[2]
