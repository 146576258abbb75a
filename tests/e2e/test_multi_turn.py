"""A chat of several turns starts each from the KV of all former ones, answers included.

Its tokens and logits must be those of an engine that has never heard of it, and so must
what its drafter gets accepted: that says whether the drafter's KV in those blocks is right.
"""

from __future__ import annotations

import random

import pytest

from helpers.harness import Shape, build, draft_model, request
from helpers.small_drafters import SMALL, write_drafters, write_target
from helpers.toy import ToyModel
from helpers.turns import Talk, check_turns, start
from sametoken.runner.stream import LaggingStream

BLOCK_SIZE = 4
MAX_TOKENS = 8
OPENING = (3, 5, 1, 8, 2, 9, 4)
REPLIES = ((5, 6, 7), (1, 2, 3, 4))
K = 3
OPTIONS = SMALL | {"block_size": BLOCK_SIZE}
TOY = ToyModel()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory):
    return {"none": None} | write_drafters(target, tmp_path_factory.mktemp("drafters"))


@pytest.mark.parametrize(
    ("method", "steps_in_flight", "steps", "temperature"),
    [
        (method, *how, 0.8 * ((first + second) % 2))
        for first, method in enumerate(("none", "ngram", "self", "other", "eagle3"))
        for second, how in enumerate(((1, "static"), (3, "compact")))
    ],
)
def test_every_turn_is_that_of_a_cold_engine(
    target, drafters, method, steps_in_flight, steps, temperature
):
    options = {"speculative_config": drafters[method], "steps_in_flight": steps_in_flight}
    options |= OPTIONS
    turns = check_turns(
        Talk(OPENING, REPLIES, MAX_TOKENS, BLOCK_SIZE, temperature),
        hot=start(target, steps, **options),
        cold=lambda: start(target, steps, enable_prefix_caching=False, **options),
        plain=lambda: start(target, enable_prefix_caching=False, **OPTIONS),
    )
    for turn in turns:
        hot, fresh = turn.hot.metrics.speculation, turn.cold.metrics.speculation
        if method == "self":
            assert hot.accepted_per_position == hot.offered_per_position
        if steps_in_flight == 1:
            assert hot == fresh
    assert any(turn.hot.outputs[0].finish_reason == "stop" for turn in turns)


class Chat:
    """A conversation on the toy target: an answer of some length, a reply, and so on."""

    def __init__(self, name: str, prompt: tuple[int, ...], chance: random.Random) -> None:
        self.name, self.tokens, self.chance = name, list(prompt), chance
        self.turns_left = 4

    def next_turn(self, core) -> None:
        self.turns_left -= 1
        self.wanted = len(self.tokens) + self.chance.randint(3, 9)
        # The engine would go on: the output processor stops it within a window.
        core.add_request(request(self.name, self.tokens, max_tokens=24))

    def take(self, core, update) -> None:
        for token in update.token_ids:
            assert token == TOY.next_token(self.tokens)
            self.tokens.append(token)
            if len(self.tokens) == self.wanted:
                core.release(self.name, self.wanted)
                if self.turns_left:
                    self.tokens += [self.chance.randrange(11) for _ in range(3)]
                    self.next_turn(core)
                return


def self_drafter(parts):
    return draft_model(parts, TOY)


@pytest.mark.parametrize(("steps_in_flight", "num_blocks"), [(1, 60), (2, 30), (3, 60), (3, 30)])
def test_the_next_turn_comes_while_the_last_one_is_still_in_flight(steps_in_flight, num_blocks):
    """Windows are cut at random, blocks are scarce, and KV that nobody wrote is NaN."""
    chance = random.Random(steps_in_flight)
    core = build(
        TOY,
        Shape(num_drafts=K, steps_in_flight=steps_in_flight, num_blocks=num_blocks),
        make_drafter=self_drafter,
        stream=LaggingStream(lambda queued: chance.randint(0, queued)),
    )
    prompts = ((1, 2, 3), (1, 2, 3, 4, 5), tuple(range(10)), (7,) * 6)
    chats = {f"r{i}": Chat(f"r{i}", prompt, chance) for i, prompt in enumerate(prompts)}
    for chat in chats.values():
        chat.next_turn(core)
    offered = accepted = most_cached = 0
    while core.has_unfinished:
        for update in core.step():
            offered, accepted = offered + update.num_drafts, accepted + update.num_accepted
            most_cached = max(most_cached, update.num_cached)
            chats[update.request_id].take(core, update)
        core.scheduler.check_integrity()
    assert not any(chat.turns_left for chat in chats.values())
    assert accepted == offered > 0
    assert most_cached >= 20
