"""What is asked, and what one run answered."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.bench.trace import Window

#: The two most likely tokens of a position with their log-probabilities, best first.
TopTwo = tuple[tuple[int | str, float], ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of an audit.

    Attributes:
        name: unique in the audit.
        prompt_token_ids: the prompt, for this engine.
        text: the prompt, for servers and reports.
        temperature, seed, max_tokens: how it is to be answered.
    """

    name: str
    prompt_token_ids: tuple[int, ...]
    text: str
    temperature: float
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one ask.

    Attributes:
        tokens: token ids, or a server's token texts.
        windows: the verify steps, in order; empty where they are not known.
        top: the two best candidates of every position; empty if nobody asked for them.
        finish_reason: "stop", "length", or "error".
        text: the whole text; "" if it was not decoded.
    """

    tokens: tuple[int | str, ...]
    windows: tuple[Window, ...] = ()
    top: tuple[TopTwo, ...] = ()
    finish_reason: str = "length"
    text: str = ""

    def window_at(self, position: int) -> Window | None:
        """The verify step that emitted the token at ``position``, if known."""
        return next((w for w in self.windows if w.first <= position < w.end), None)


#: The answers of one run by the name of their ask.
Answers = dict[str, Answer]
