"""What ``soak.py`` asks: requests whose answers are known, and some that are none."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from sametoken import LLM, SamplingParams

NUM_CASES = 64
#: The last cases, which are long.
NUM_LONG = 8
WORDS = ("the", "inner", "other", "either", "a", "their", "thin")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
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


@dataclass(frozen=True)
class Case:
    """A request without ``stream``, and the answer that it has to get."""

    path: str
    body: dict[str, Any]
    token_ids: tuple[int, ...]
    text: str


@dataclass
class Answer:
    """As much of an answer as its client has stayed for."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    is_whole: bool = False

    def take(self, message: dict[str, Any]) -> None:
        """Add a whole answer or an event."""
        for choice in message["choices"]:
            said = choice.get("message") or choice.get("delta") or choice
            self.text += said.get("content") or said.get("text") or ""
            self.token_ids += choice.get("token_ids") or ()


def make_cases(llm: LLM, max_tokens: int, seed: int = 0) -> list[Case]:
    """Requests that repeat themselves, so that drafts are accepted, and a plain engine's answers.

    The last ones are long.
    """
    chance = random.Random(seed)
    cases = []
    for i in range(NUM_CASES + NUM_LONG):
        params = {
            "temperature": 0.0 if i % 2 else 0.8,
            "top_p": 0.9 if i % 6 == 0 else 1.0,
            "seed": i,
            "max_tokens": chance.randint(1, max_tokens) if i < NUM_CASES else 160,
            "ignore_eos": i % 3 > 0 or i >= NUM_CASES,
        }
        if chance.random() < 0.5:
            phrase = chance.choices(range(llm.resolved.model.vocab_size), k=chance.randint(2, 9))
            ids = phrase * chance.randint(1, 4)
            path, body = COMPLETIONS, {"prompt": ids}
            (output,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(**params))
        else:
            text = " ".join(chance.choices(WORDS, k=2) * chance.randint(1, 3))
            messages = [{"role": "user", "content": text}]
            path, body = CHAT, {"messages": messages}
            (output,) = llm.chat(messages, SamplingParams(**params))
        max_drafts = chance.choice((None, None, 0, 2))
        if max_drafts is not None:
            body["speculative"] = {"num_speculative_tokens": max_drafts}
        found = output.outputs[0]
        body |= params | {"return_token_ids": True}
        cases.append(Case(path, body, tuple(found.token_ids), found.text))
    return cases
