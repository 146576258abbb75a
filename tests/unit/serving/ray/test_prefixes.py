from __future__ import annotations

import json

import pytest

from sametoken.serving.ray.router import BLOCK_CHARS, MAX_KEYS, Homes, prefix_keys

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
    homes: Homes[str] = Homes(10)
    homes.note((1, 2), "a")
    homes.note((1, 3), "b")
    assert homes.find((1, 2, 4), {"a", "b"}) == "a"
    assert homes.find((1, 5), {"a", "b"}) == "b", "the last one to see key 1"
    assert homes.find((1, 2), {"b"}) == "b", "who is gone is passed over"
    assert homes.find((7,), {"a", "b"}) is None
    assert homes.find((), {"a"}) is None


def test_what_was_unused_for_longest_is_forgotten():
    homes: Homes[str] = Homes(2)
    homes.note((1,), "a")
    homes.note((2,), "a")
    homes.note((1,), "a")
    homes.note((3,), "a")
    assert [homes.find((key,), {"a"}) for key in (1, 2, 3)] == ["a", None, "a"]
