"""The requests of a stress test: all kinds with known answers, and malformed ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bombs import CHAT, COMPLETIONS

from sametoken import LLM, SamplingParams
from sametoken.serving.http.logprobs import MIN_LOGPROB
from sametoken.types.outputs import CompletionOutput
from sametoken.types.structured_outputs import StructuredOutputs

NUM_CASES = 96
#: The number of long cases, which come last.
NUM_LONG = 8
LONG_TOKENS = 160
WORDS = ("the", "inner", "other", "either", "a", "their", "thin")

MALFORMED = (
    (COMPLETIONS, b'{"prompt": "the'),
    (COMPLETIONS, b"\xff\xfe"),
    (COMPLETIONS, b'{"prompt": "the", "temperature": -1.0}'),
    (COMPLETIONS, b'{"prompt": "the", "max_tokens": "many"}'),
    (COMPLETIONS, b'{"prompt": "the", "unheard_of": 1}'),
    (COMPLETIONS, b'{"prompt": "the", "model": "another"}'),
    (COMPLETIONS, b'{"prompt": "the", "guided_regex": "((("}'),
    (COMPLETIONS, b'{"prompt": [2147483647], "stream": true}'),
    (COMPLETIONS, b'{"prompt": [], "stream": true}'),
    (COMPLETIONS, json.dumps({"prompt": "the inner " * 5000}).encode()),
    (CHAT, b'{"messages": []}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "half a character: \\ud800"}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "the"}], "top_p": 2}'),
    ("/v1/nothing", b"{}"),
)
#: Structured outputs: the field of a request and its value.
FORMS: tuple[tuple[str, Any], ...] = (
    ("guided_choice", ["the inner", "the other", "a"]),
    ("guided_regex", "[a-f]{2,6}( the)?"),
    ("guided_grammar", 'root ::= "a" tail\ntail ::= "b" tail | "c"'),
    (
        "guided_json",
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    ),
)


@dataclass
class Completion:
    """One completion, or the part received so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    @classmethod
    def of(cls, output: CompletionOutput) -> Completion:
        """Convert an engine's output."""
        token_ids = list(output.token_ids)
        logprobs = [
            max(candidates[token_id].logprob, MIN_LOGPROB)
            for token_id, candidates in zip(token_ids, output.logprobs or (), strict=False)
        ]
        return cls(token_ids, output.text, logprobs, output.finish_reason)

    def begins(self, other: Completion) -> bool:
        """Return whether this is a prefix of the other one."""
        return (
            other.token_ids[: len(self.token_ids)] == self.token_ids
            and other.logprobs[: len(self.logprobs)] == self.logprobs
            and other.text.startswith(self.text)
        )


@dataclass(frozen=True)
class Case:
    """A request without ``stream``, and its expected completions."""

    path: str
    body: dict[str, Any]
    completions: tuple[Completion, ...]

    @cached_property
    def whole_content(self) -> bytes:
        """The request's body."""
        return json.dumps(self.body).encode()

    @cached_property
    def stream_content(self) -> bytes:
        """The body of the streamed request."""
        return json.dumps(self.body | {"stream": True}).encode()

    @property
    def name(self) -> str:
        """A short description."""
        return f"{self.path} {self.whole_content.decode()}"[:300]


@dataclass
class Answer:
    """An answer, or the part received before the client left."""

    completions: dict[int, Completion] = field(default_factory=dict)
    is_whole: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether a token has arrived."""
        return any(one.token_ids for one in self.completions.values())

    def take(self, message: dict[str, Any]) -> None:
        """Add a whole answer or an event."""
        for choice in message["choices"]:
            one = self.completions.setdefault(choice["index"], Completion())
            text = choice.get("message") or choice.get("delta") or choice
            one.text += text.get("content") or text.get("text") or ""
            one.token_ids += choice.get("token_ids") or ()
            one.logprobs += _logprobs(choice.get("logprobs") or {})
            one.finish_reason = choice.get("finish_reason") or one.finish_reason

    def begins(self, case: Case) -> bool:
        """Return whether this is a prefix of the expected completions."""
        num = len(case.completions)
        return all(
            index < num and one.begins(case.completions[index])
            for index, one in self.completions.items()
        )

    def equals(self, case: Case) -> bool:
        """Return whether this equals the expected completions."""
        return self.completions == dict(enumerate(case.completions))


def _logprobs(found: dict[str, Any]) -> list[float]:
    """Return the chosen tokens' log-probabilities, in either endpoint's format."""
    if "content" in found:
        return [one["logprob"] for one in found["content"] or ()]
    return found.get("token_logprobs") or []


def make_cases(llm: LLM, max_tokens: int, seed: int = 0) -> list[Case]:
    """Make repetitive requests, so that drafts are accepted, with a plain engine's answers.

    The last ``NUM_LONG`` cases are long.
    """
    chance = random.Random(seed)
    cases = []
    for i in range(NUM_CASES):
        inputs = _inputs(llm, chance, chance.choice((COMPLETIONS, CHAT)))
        params = _sampling(chance, i, chance.randint(1, max_tokens))
        for name, value in _more(llm, chance, inputs, params):
            params[name] = value
        cases.append(_make_case(llm, chance, inputs, params))
    for i in range(NUM_LONG):
        inputs = _inputs(llm, chance, COMPLETIONS if i % 2 else CHAT)
        params = _sampling(chance, i, LONG_TOKENS) | {"ignore_eos": True}
        cases.append(_make_case(llm, chance, inputs, params))
    return cases


def _inputs(llm: LLM, chance: random.Random, path: str) -> dict[str, Any]:
    """Draw a prompt or a conversation."""
    if path == COMPLETIONS:
        phrase = chance.choices(range(llm.resolved.model.vocab_size), k=chance.randint(2, 9))
        return {"prompt": phrase * chance.randint(1, 4)}
    text = " ".join(chance.choices(WORDS, k=2) * chance.randint(1, 3))
    return {"messages": [{"role": "user", "content": text}]}


def _sampling(chance: random.Random, seed: int, max_tokens: int) -> dict[str, Any]:
    """Draw greedy or sampled parameters, with at most one truncation."""
    params: dict[str, Any] = {
        "seed": seed,
        "max_tokens": max_tokens,
        "ignore_eos": chance.random() < 0.7,
        "temperature": chance.choice((0.0, 0.8, 1.2)),
    }
    cut = chance.choice((None, ("top_p", 0.9), ("top_k", 8), ("min_p", 0.02)))
    return params if cut is None else params | {cut[0]: cut[1]}


def _make_case(
    llm: LLM, chance: random.Random, inputs: dict[str, Any], params: dict[str, Any]
) -> Case:
    path = CHAT if "messages" in inputs else COMPLETIONS
    fields = params | {"return_token_ids": True}
    if "logprobs" in fields and path == CHAT:
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    max_drafts = chance.choice((None, None, 0, 2))
    if max_drafts is not None:
        fields["speculative"] = {"num_speculative_tokens": max_drafts}
    completions = tuple(Completion.of(output) for output in _generate(llm, inputs, params))
    return Case(path, inputs | fields, completions)


def _more(
    llm: LLM, chance: random.Random, inputs: dict[str, Any], params: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield further fields; most requests have none."""
    vocab_size = llm.resolved.model.vocab_size
    if chance.random() < 0.2:
        yield chance.choice(FORMS)
        # Room to complete the structured output.
        yield "max_tokens", params["max_tokens"] + 12
        return
    if chance.random() < 0.2:
        # A piece of the answer without it, so that the stop string occurs.
        text = _generate(llm, inputs, params)[0].text
        start = chance.randrange(max(1, len(text) - 1))
        yield "stop", [text[start : start + 2] or "the", "inner the inner"]
    if chance.random() < 0.2:
        yield "logprobs", chance.choice((0, 2, 5))
    if chance.random() < 0.15:
        yield "n", chance.choice((2, 3))
    if chance.random() < 0.15:
        yield "repetition_penalty", 1.3
        yield "presence_penalty", 0.5
        yield "frequency_penalty", -0.5
    if chance.random() < 0.1:
        yield "logit_bias", {str(chance.randrange(vocab_size)): 4.0}
    if chance.random() < 0.1:
        yield "bad_words", ["the", "a"]
        yield "min_tokens", params["max_tokens"] // 2
    if chance.random() < 0.1:
        yield "stop_token_ids", chance.choices(range(vocab_size), k=40)


def _generate(
    llm: LLM, inputs: dict[str, Any], given: dict[str, Any]
) -> tuple[CompletionOutput, ...]:
    """Run a request's fields on the engine."""
    params = dict(given)
    for name, _ in FORMS:
        if name in params:
            form, kind = params.pop(name), name.removeprefix("guided_")
            made = {"json_schema": json.dumps(form)} if kind == "json" else {kind: form}
            params["structured_outputs"] = StructuredOutputs(**made)
    if "logit_bias" in params:
        params["logit_bias"] = {int(key): bias for key, bias in params["logit_bias"].items()}
    sampling = SamplingParams(**params)
    if "messages" in inputs:
        (output,) = llm.chat(inputs["messages"], sampling)
    else:
        (output,) = llm.generate({"prompt_token_ids": inputs["prompt"]}, sampling)
    return output.outputs
