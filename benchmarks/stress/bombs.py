"""Hostile request bodies: bombs, and mutations of valid bodies."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


@dataclass(frozen=True)
class Raw:
    """Verbatim JSON text that no Python value serializes to."""

    text: str


_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "look it up",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string"}, "deep": {"type": "integer"}},
            "required": ["where"],
        },
    },
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_SAMPLING = {
    "max_tokens": 2,
    "n": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "min_tokens": 1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "stop": ["the", "x"],
    "stop_token_ids": [5],
    "bad_words": ["ab"],
    "logit_bias": {"7": 1.5},
    "allowed_token_ids": [7, 8, 9],
    "prompt_logprobs": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "speculative": {"num_speculative_tokens": 2},
    "include_speculation_stats": True,
    "return_token_ids": True,
    "user": "somebody",
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5, "pattern": "[a-z]+"},
        "size": {"type": "integer", "minimum": 1, "maximum": 9},
        "kind": {"enum": ["a", "b"]},
        "more": {"type": "array", "items": {"anyOf": [{"type": "null"}, {"const": 1}]}},
    },
    "required": ["name"],
    "additionalProperties": False,
}
_MESSAGES = [
    {"role": "system", "content": "short"},
    {"role": "user", "content": [{"type": "text", "text": "the inner"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "content": "other", "tool_call_id": "call_1"},
]
#: Valid bodies with as many fields as are compatible.
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "the inner", "logprobs": 2, "echo": True, **_SAMPLING}),
    (COMPLETIONS, {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2}),
    (COMPLETIONS, {"prompt": ["the", "a"], "max_tokens": 2, "guided_json": _SCHEMA}),
    (COMPLETIONS, {"prompt": "the", "max_tokens": 2, "guided_choice": ["a", "b"]}),
    (COMPLETIONS, {"prompt": "the", "max_tokens": 2, "structured_outputs": {"regex": "a*b"}}),
    (CHAT, {"messages": _MESSAGES, "logprobs": True, "top_logprobs": 2, **_SAMPLING}),
    (CHAT, {"messages": _MESSAGES, "max_tokens": 2, "tools": [_TOOL], "tool_choice": "required"}),
    (
        CHAT,
        {
            "messages": _MESSAGES[:2],
            "max_completion_tokens": 2,
            "tools": [_TOOL],
            "tool_choice": "auto",
            "chat_template_kwargs": {"style": "short"},
            "add_generation_prompt": True,
        },
    ),
    (
        CHAT,
        {
            "messages": _MESSAGES[:2],
            "max_tokens": 2,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "form", "schema": _SCHEMA, "strict": True},
            },
        },
    ),
    (TOKENIZE, {"prompt": "the inner", "return_token_strs": True}),
    (TOKENIZE, {"messages": _MESSAGES, "tools": [_TOOL], "add_generation_prompt": False}),
    (DETOKENIZE, {"tokens": [1, 2, 3]}),
)
#: Replacement values for mutations.
ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    2**31,
    2**63,
    -(2**63) - 1,
    Raw("1" + "0" * 400),
    Raw("9" * 5000),
    Raw("1e400"),
    Raw("-1e400"),
    Raw("1e-400"),
    Raw("NaN"),
    Raw("-Infinity"),
    "",
    " 5 ",
    "\0",
    "\ud800",
    "\U0001f600" * 50,
    "e\u0301\u202e\ufeff",
    "a" * 100_000,
    "(" * 500,
    [],
    {},
    [None],
    [[]],
    {"": None},
    {"self": 1, "messages": 2, "tokenize": False},
    [1] * 20_000,
    ["ab"] * 3000,
    {str(index): index for index in range(3000)},
    Raw("[" * 2000 + "]" * 2000),
    Raw("[" * 200_000),
    Raw('{"a":' * 3000 + "1" + "}" * 3000),
    Raw('{"a": 1, "a": [2]}'),
)


def dump(value: Any) -> str:
    """Serialize to JSON, with ``Raw`` verbatim."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return _braced(f"{json.dumps(key)}:{dump(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return f"[{','.join(map(dump, value))}]"
    return json.dumps(value)


def _braced(members: Iterable[str]) -> str:
    return "{" + ",".join(members) + "}"


def mutate(chance: random.Random, value: Any) -> Any:
    """Replace the value at one place, at any depth."""
    if isinstance(value, dict) and value and chance.random() < 0.95:
        key = chance.choice(list(value))
        changed = dict(value)
        change = chance.random()
        if change < 0.05:
            del changed[key]
        elif change < 0.1:
            changed[chance.choice(("", "unheard_of", "__class__", "a" * 10_000, key + " "))] = 1
        elif change < 0.15:
            # A duplicate key with another value: parsers differ in which one wins.
            more = f"{json.dumps(key)}:{dump(chance.choice(ODD))}"
            return Raw(_braced((dump(value)[1:-1], more)))
        else:
            changed[key] = mutate(chance, value[key])
        return changed
    if isinstance(value, list) and value and chance.random() < 0.9:
        index = chance.randrange(len(value))
        if chance.random() < 0.1:
            return value + [value[index]] * chance.choice((1, 200, 5000))
        return [*value[:index], mutate(chance, value[index]), *value[index + 1 :]]
    return chance.choice(ODD)


def mutation(chance: random.Random) -> tuple[str, bytes]:
    """Return path and body of a valid request with one to three mutations, or truncated."""
    path, body = chance.choice(VALID)
    changed: Any = body
    for _ in range(chance.choice((1, 1, 2, 3))):
        changed = mutate(chance, changed)
    content = dump(changed).encode()
    if chance.random() < 0.05:
        content = content[: chance.randrange(len(content) + 1)]
    if chance.random() < 0.05:
        place = chance.randrange(len(content) + 1)
        content = content[:place] + chance.randbytes(3) + content[place:]
    return path, content


def _prompt(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "the", "max_tokens": 64} | fields


def _schema(**schema: Any) -> tuple[str, dict[str, Any]]:
    return _prompt(guided_json=schema)


def _properties(count: int) -> dict[str, Any]:
    return {f"name_{index}": {"type": "string"} for index in range(count)}


def _chained(count: int) -> str:
    rules = [f'rule{index} ::= "a" rule{index + 1}' for index in range(count)]
    return "\n".join(("root ::= rule0", *rules, f'rule{count} ::= "b"'))


def _tools(arguments: str) -> tuple[str, dict[str, Any]]:
    call = {**_CALL, "function": {"name": "look", "arguments": arguments}}
    messages = [*_MESSAGES[:2], {"role": "assistant", "content": None, "tool_calls": [call]}]
    return CHAT, {"messages": messages, "max_tokens": 2}


AMBIGUOUS = 'root ::= root root root | "a" | "b" | ""'
#: Requests that have brought down this server or similar ones, by target.
BOMBS: dict[str, Callable[[], tuple[str, Any]]] = {
    "900 properties": lambda: _schema(type="object", properties=_properties(900)),
    "1,400 properties, all required": lambda: _schema(
        type="object", properties=_properties(1400), required=list(_properties(1400))
    ),
    "3,500 chained rules": lambda: _prompt(guided_grammar=_chained(3500)),
    "ambiguous grammar": lambda: _prompt(guided_grammar=AMBIGUOUS, max_tokens=200),
    "ambiguous grammar, streamed": lambda: _prompt(
        guided_grammar=AMBIGUOUS, max_tokens=200, stream=True, logit_bias={"64": 50, "65": 50}
    ),
    "nested repetition": lambda: _prompt(
        guided_grammar='root ::= (("a"{0,100000} "b"{0,100000}){0,1000})', max_tokens=200
    ),
    "repetition of itself": lambda: _prompt(guided_grammar="root ::= root{2}"),
    "left recursion": lambda: _prompt(guided_grammar='root ::= root "a" | root'),
    "regex of dots": lambda: _prompt(guided_regex="(.*.*)*" * 200),
    "regex of optional letters": lambda: _prompt(guided_regex="a?" * 5000 + "a" * 5000),
    "regex of counts": lambda: _prompt(guided_regex="((a{0,500}){0,500}){0,500}"),
    "regex of 30,000 warnings": lambda: _prompt(guided_regex="a^" * 30_000),
    "regex of brackets": lambda: _prompt(guided_regex="(" * 5000 + "a" + ")" * 5000),
    "oneOf of 3,500 constants": lambda: _schema(
        oneOf=[{"const": f"value {index}"} for index in range(3500)]
    ),
    "minimum of 4,000 nines": lambda: _schema(type="integer", minimum=Raw("9" * 4000)),
    "minimum of 1e400": lambda: _schema(type="number", minimum=Raw("1e400")),
    "no alternative": lambda: _schema(anyOf=[]),
    "schema of itself": lambda: _schema(**{"$ref": "#"}),
    "deep schema": lambda: _prompt(
        guided_json=Raw('{"type":"array","items":' * 3000 + "{}" + "}" * 3000)
    ),
    "deep schema as text": lambda: _prompt(guided_json="[" * 50_000),
    "50,000 choices": lambda: _prompt(guided_choice=[f"choice {n}" for n in range(50_000)]),
    "20,000 bad words": lambda: _prompt(bad_words=[f"word {n}" for n in range(20_000)]),
    "one long bad word": lambda: _prompt(bad_words=["the inner " * 50_000]),
    "1,500 long stops": lambda: _prompt(stop=[f"{n} " + "a" * 1000 for n in range(1500)]),
    "500,000 short stops": lambda: _prompt(stop=[str(n) for n in range(500_000)]),
    "3,000,000 ids": lambda: _prompt(prompt=Raw("[1" + ",1" * 2_999_999 + "]")),
    "100,000 prompts": lambda: _prompt(prompt=["a"] * 100_000),
    "a prompt of 10 MB": lambda: _prompt(prompt="the inner " * 1_000_000),
    "a prompt of one word": lambda: _prompt(prompt="a" * 5_000_000),
    "100,000 messages": lambda: (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}] * 100_000, "max_tokens": 2},
    ),
    "1,000,000 wrong messages": lambda: (CHAT, {"messages": Raw("[1" + ",1" * 999_999 + "]")}),
    "100,000 parts": lambda: (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]},
    ),
    "10,000 tools": lambda: (
        CHAT,
        {"messages": _MESSAGES[:2], "tools": [_TOOL] * 10_000, "max_tokens": 2},
    ),
    "10,000 tools to ids": lambda: (TOKENIZE, {"messages": _MESSAGES, "tools": [_TOOL] * 10_000}),
    "template arguments": lambda: (
        CHAT,
        {"messages": _MESSAGES[:2], "max_tokens": 2, "chat_template_kwargs": {"self": 1}},
    ),
    "deep tool arguments": lambda: _tools("[" * 2000),
    "infinite tool arguments": lambda: _tools('{"a": 1e400}'),
    "many digits in tool arguments": lambda: _tools('{"a": ' + "9" * 5000 + "}"),
    "deep body": lambda: _prompt(metadata=Raw("[" * 100_000 + "]" * 100_000)),
    "unclosed body": lambda: _prompt(metadata=Raw("[" * 1_000_000)),
    "temperature of 1e400": lambda: _prompt(temperature=Raw("1e400")),
    "seed of 5,000 digits": lambda: _prompt(seed=Raw("9" * 5000)),
    "100,000 biases": lambda: _prompt(logit_bias={str(n): 1.0 for n in range(100_000)}),
    "1,000,000 allowed ids": lambda: _prompt(allowed_token_ids=[7] * 1_000_000),
    "1,000,000 stop ids": lambda: _prompt(stop_token_ids=[7] * 1_000_000),
    "100,000 unknown fields": lambda: _prompt(**{f"field_{n}": 1 for n in range(100_000)}),
    "one long unknown field": lambda: _prompt(**{"a" * 1_000_000: 1}),
    "100,000 completions": lambda: _prompt(n=100_000),
    "2,000,000 ids to text": lambda: (DETOKENIZE, {"tokens": [7] * 2_000_000}),
    "a text of 5 MB to ids": lambda: (
        TOKENIZE,
        {"prompt": "the inner " * 500_000, "return_token_strs": True},
    ),
    "a body of 20 MB": lambda: _prompt(user="a" * 20_000_000),
}


def bombs(chance: random.Random, mutations_per_bomb: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield (name, path, body) endlessly: each bomb once per round, with mutations between."""
    while True:
        names = list(BOMBS)
        chance.shuffle(names)
        for name in names:
            path, body = BOMBS[name]()
            yield name, path, dump(body).encode()
            for _ in range(mutations_per_bomb):
                yield "mutation", *mutation(chance)
