"""Prefix keys, and where requests are sent by them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from ray.serve.request_router import PendingRequest, ReplicaID

from sametoken.serving.http.in_process import AppRequest
from sametoken.serving.ray.deployments import Forwarded
from sametoken.serving.ray.router import BLOCK_CHARS, MAX_KEYS, PrefixMap, PrefixRouter, prefix_keys

REQUEST = AppRequest("POST", "/v1/completions")


@dataclass(frozen=True)
class Replica:
    replica_id: ReplicaID


A, B, C = (Replica(ReplicaID(name, "deployment")) for name in "abc")


@pytest.fixture
def router() -> PrefixRouter:
    """A router without the rest of Serve: nobody is busy."""
    made = object.__new__(PrefixRouter)
    made._replica_queue_len_cache = {}
    made.initialize_state(max_lead=2)
    return made


def pending(*keys: int, avoided: tuple[str, ...] = ()) -> PendingRequest:
    async def make() -> PendingRequest:
        forwarded = Forwarded(REQUEST, keys, frozenset(avoided))
        return PendingRequest(args=[forwarded], kwargs={}, metadata=SimpleNamespace())

    return asyncio.run(make())


def choose(router: PrefixRouter, request: PendingRequest) -> list[list[Replica]]:
    return asyncio.run(router.choose_replicas([A, B, C], request))


def test_an_unknown_prompt_may_go_anywhere(router):
    assert choose(router, pending(1, 2))[0] == [A, B, C]
    assert choose(router, pending())[0] == [A, B, C]


def test_a_prompt_goes_where_its_beginning_went(router):
    router.on_request_routed(pending(1, 2), B.replica_id, None)
    request = pending(1, 2, 3)
    assert choose(router, request) == [[B], [A, B, C]]
    assert request.routing_context.should_backoff
    assert choose(router, pending(4))[0] == [A, B, C]


@pytest.mark.parametrize(("queue", "first"), [(3, [B]), (4, [A, B, C])])
def test_not_to_a_replica_that_is_far_busier(router, queue, first):
    router.on_request_routed(pending(1), B.replica_id, None)
    router._replica_queue_len_cache = {A.replica_id: 1, B.replica_id: queue, C.replica_id: 1}
    assert choose(router, pending(1))[0] == first


def test_a_replica_that_was_unable_is_the_last_choice(router):
    router.on_request_routed(pending(1), B.replica_id, None)
    assert choose(router, pending(1, avoided=("b",))) == [[A, C], [A, B, C]]
    assert choose(router, pending(1, avoided=("a", "b", "c"))) == [[], [A, B, C]]


SYSTEM = {"role": "system", "content": "a" * (2 * BLOCK_CHARS)}


def keys_of(**body) -> tuple[int, ...]:
    return prefix_keys(json.dumps(body).encode())


def chat(*contents: str, **more) -> tuple[int, ...]:
    users = [{"role": "user", "content": content} for content in contents]
    return keys_of(messages=[SYSTEM, *users], **more)


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=False))


def test_keys_agree_exactly_as_far_as_the_prompts_do():
    one = keys_of(prompt="a" * 3 * BLOCK_CHARS)
    other = keys_of(prompt="a" * 2 * BLOCK_CHARS + "b" + "a" * BLOCK_CHARS)
    assert (len(one), len(other), common(one, other)) == (3, 3, 2)
    early = keys_of(prompt="b" + "a" * (3 * BLOCK_CHARS - 1))
    assert common(one, early) == 0, "a key stands for all before it"


def test_a_conversation_goes_on_with_the_keys_that_it_had():
    first = chat("x" * BLOCK_CHARS)
    later = chat("x" * BLOCK_CHARS, "y" * BLOCK_CHARS)
    assert later[: len(first)] == first
    assert len(later) > len(first)
    assert common(first, chat("z" * BLOCK_CHARS)) == 2
    assert common(first, chat("x" * BLOCK_CHARS, tools=[{"name": "t"}])) == 0


def test_a_conversation_of_items_goes_on_with_the_keys_that_it_had():
    question = {"role": "user", "content": "x" * BLOCK_CHARS}
    asked = {"instructions": "a" * BLOCK_CHARS}
    first = keys_of(input=[question], **asked)
    later = keys_of(input=[question, {"type": "reasoning", "summary": []}, question], **asked)
    assert later[: len(first)] == first
    assert len(later) > len(first)
    text = keys_of(input="x" * BLOCK_CHARS, **asked)
    assert common(text, keys_of(input="y" * BLOCK_CHARS, **asked)) == 1
    assert common(text, keys_of(input="x" * BLOCK_CHARS)) == 0


def test_adapters_and_instructions_in_anthropic_s_form_have_keys_of_their_own():
    prompt = "a" * 2 * BLOCK_CHARS
    assert common(keys_of(prompt=prompt, model="a"), keys_of(prompt=prompt, model="b")) == 0
    first, other = (chat(one, system="a" * BLOCK_CHARS) for one in "xy")
    assert common(first, other) == len(first) > 0
    assert common(first, chat("x", system="b" * BLOCK_CHARS)) == 0


def test_the_rest_of_a_request_is_no_part_of_its_prompt():
    prompt = "a" * BLOCK_CHARS
    assert keys_of(prompt=prompt, seed=1) == keys_of(prompt=prompt, max_tokens=2)
    assert keys_of(prompt=[prompt, "b"]) == keys_of(prompt=prompt)
    ids = list(range(BLOCK_CHARS))
    assert keys_of(prompt=ids)
    assert keys_of(prompt=[ids]) == keys_of(prompt=ids)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"3", b"\xff", b"{}", b'{"messages": 3}', b'{"prompt": "short"}']
)
def test_a_body_without_a_long_prompt_has_no_keys(body):
    assert prefix_keys(body) == ()


def test_half_of_a_character_is_left_to_the_replica_that_refuses_it():
    assert keys_of(prompt="\ud800" * BLOCK_CHARS) == ()


def test_keys_are_bounded():
    assert len(keys_of(prompt="a" * BLOCK_CHARS * (MAX_KEYS + 5))) == MAX_KEYS


def test_the_longest_prefix_decides_among_those_present():
    prefixes: PrefixMap[str] = PrefixMap(10)
    prefixes.note((1, 2), "a")
    prefixes.note((1, 3), "b")
    assert prefixes.find((1, 2, 4), {"a", "b"}) == "a"
    assert prefixes.find((1, 5), {"a", "b"}) == "b", "the last one to see key 1"
    assert prefixes.find((1, 2), {"b"}) == "b", "who is gone is passed over"
    assert prefixes.find((7,), {"a", "b"}) is None
    assert prefixes.find((), {"a"}) is None


def test_what_was_unused_for_longest_is_forgotten():
    prefixes: PrefixMap[str] = PrefixMap(2)
    prefixes.note((1,), "a")
    prefixes.note((2,), "a")
    prefixes.note((1,), "a")
    prefixes.note((3,), "a")
    assert [prefixes.find((key,), {"a"}) for key in (1, 2, 3)] == ["a", None, "a"]
