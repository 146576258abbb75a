"""Log-probabilities in the formats of completions, chat completions and prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sametoken.serving.http.response_schemas import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from sametoken.types.outputs import Logprob, PositionLogprobs

#: Replaces the -inf of masked tokens, which JSON cannot represent.
MIN_LOGPROB = -9999.0
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Position:
    """A token and the candidates at its position; None for the prompt's first token."""

    token_id: int
    text: str
    candidates: PositionLogprobs | None


@dataclass(frozen=True, slots=True)
class LogprobsForm:
    """What a request wants to see.

    Attributes:
        num_top: likeliest candidates of each position.
        as_ids: whether tokens are written as ``token_id:7``, not as their text.
        part_of_character: the bytes of a token that is not valid text alone, or None.
    """

    num_top: int
    as_ids: bool = False
    part_of_character: Callable[[int], bytes | None] = lambda token_id: None

    def name(self, token_id: int, text: str) -> str:
        """A token as it is written."""
        return f"token_id:{token_id}" if self.as_ids else text


def positions(
    token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs | None], first: str = ""
) -> list[Position]:
    """Tokens with their candidates; ``first`` is the text of a token without candidates."""
    return [
        Position(token_id, _text(candidates[token_id]) if candidates else first, candidates)
        for token_id, candidates in zip(token_ids, logprobs, strict=True)
    ]


def completion_logprobs(
    found: Sequence[Position], form: LogprobsForm, text_offset: list[int]
) -> CompletionLogprobs:
    """The format of completions: the likeliest and the token itself, by name.

    Args:
        found: the tokens.
        form: what is shown of them.
        text_offset: where the text of each token begins.
    """
    return CompletionLogprobs(
        tokens=[form.name(position.token_id, position.text) for position in found],
        token_logprobs=[
            _finite(position.candidates[position.token_id]) if position.candidates else None
            for position in found
        ],
        top_logprobs=[_by_name(position, form) for position in found],
        text_offset=text_offset,
    )


def chat_logprobs(found: Sequence[Position], form: LogprobsForm) -> ChatLogprobs:
    """The format of chat completions."""
    content = []
    for position in found:
        candidates = position.candidates or {}
        chosen = _top_logprob(position.token_id, candidates[position.token_id], form)
        top = [_top_logprob(*candidate, form) for candidate in _top(candidates, form.num_top)]
        content.append(
            TokenLogprob(
                token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top
            )
        )
    return ChatLogprobs(content=content, refusal=None)


def prompt_logprobs(found: Sequence[PositionLogprobs | None] | None) -> PromptLogprobs | None:
    """vLLM's format for prompts: candidates by token id."""
    if found is None:
        return None
    return [None if candidates is None else _by_id(candidates) for candidates in found]


def _by_id(candidates: PositionLogprobs) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {
            "logprob": _finite(candidate),
            "rank": candidate.rank,
            "decoded_token": candidate.decoded_token,
        }
        for token_id, candidate in candidates.items()
    }


def _top(candidates: PositionLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest candidates by rank; of equal ranks the lowest token id comes first."""
    return sorted(candidates.items(), key=lambda item: (item[1].rank, item[0]))[:num_top]


def _by_name(position: Position, form: LogprobsForm) -> dict[str, float] | None:
    if position.candidates is None:
        return None
    shown = _top(position.candidates, form.num_top)
    chosen = position.token_id, position.candidates[position.token_id]
    # Tokens may have the same text, for example incomplete bytes: the likeliest one counts.
    found: dict[str, float] = {}
    for token_id, candidate in (*shown, chosen):
        found.setdefault(form.name(token_id, _text(candidate)), _finite(candidate))
    return found


def _top_logprob(token_id: int, candidate: Logprob, form: LogprobsForm) -> TopLogprob:
    text = _text(candidate)
    found = text.encode("utf-8")
    as_bytes = form.part_of_character(token_id) if _REPLACEMENT in text else found
    return TopLogprob(
        token=form.name(token_id, text),
        logprob=_finite(candidate),
        bytes=None if as_bytes is None else list(as_bytes),
    )


def _text(candidate: Logprob) -> str:
    return candidate.decoded_token or ""


def _finite(candidate: Logprob) -> float:
    return max(candidate.logprob, MIN_LOGPROB)
