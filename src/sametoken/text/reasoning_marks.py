"""Special tokens around reasoning, by which a budget finds and ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sametoken.errors import RequestError
from sametoken.types.structured_outputs import Reasoning

if TYPE_CHECKING:
    # Command lines that name a form of reasoning load no tokenizer.
    from sametoken.text.tokenizer import Tokenizer

#: The sampling parameter that a budget is.
BUDGET = "thinking_token_budget"
THINK = ("<think>", "</think>")
MISTRAL = ("[THINK]", "[/THINK]")
GEMMA = ("<|channel>", "<channel|>")
SEED = ("<seed:think>", "</seed:think>")
_EVERY = (THINK, MISTRAL, GEMMA, SEED)
#: What begins the calls of models that may call a function without ending their reasoning.
CALL_STARTS = (
    "<tool_call>",
    # Wide bars, and the sign that SentencePiece writes for a space.
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<|tool_calls_section_begin|>",
    "[TOOL_CALLS]",
    "<|tool_call>",
    "<seed:tool_call>",
    "<minimax:tool_call>",
)


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The tokens of one tokenizer.

    Attributes:
        start: begins reasoning.
        end: ends it.
        calls: begin calls.
        turn_ends: end a message: what a user wrote before is no reasoning of the answer.
    """

    start: int
    end: int
    calls: tuple[int, ...]
    turn_ends: tuple[int, ...]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, turn_ends: Sequence[int], end: tuple[int, ...] | None = None
    ) -> ReasoningMarks | None:
        """The first known marks that are a token each; None without any.

        ``end`` is what ends the reasoning, if that is known.
        """
        token_id = tokenizer.backend.token_to_id
        calls = tuple(one for one in map(token_id, CALL_STARTS) if one is not None)
        for first, last in ((token_id(a), token_id(b)) for a, b in _EVERY):
            if first is not None and last is not None and end in (None, (last,)):
                return cls(first, last, calls, tuple(turn_ends))
        return None

    def bounded(
        self,
        budget: int,
        prompt_ids: Sequence[int],
        known: Reasoning | None = None,
        *,
        has_any_text: bool = True,
    ) -> Reasoning:
        """The reasoning of a completion, with a budget.

        Tokens of it that the prompt holds count too, as in vLLM.

        Args:
            budget: tokens between the marks.
            prompt_ids: of the completion.
            known: the reasoning without a budget, if the form of the answer tells it; otherwise the
                newest mark in the prompt does.
            has_any_text: whether the text after it may be a call, which can end it.
        """
        said = self._num_said(prompt_ids)
        if known is None:
            known = Reasoning((self.end,), begins=(self.start,) if said is None else ())
        if not known.begins and said is None:
            # It begins without a mark, which may still come.
            known = replace(known, begins=(self.start,), has_begun=True)
        left = budget if known.begins else max(budget - (said or 0), 0)
        return replace(known, budget=left, also_ends=self.calls if has_any_text else ())

    def _num_said(self, prompt_ids: Sequence[int]) -> int | None:
        """Tokens of the reasoning that a prompt leaves open; None if it leaves none open."""
        for count, token_id in enumerate(reversed(prompt_ids)):
            if token_id == self.start:
                return count
            if token_id == self.end or token_id in self.turn_ends:
                return None
        return None


def no_marks() -> RequestError:
    """The refusal of a budget where reasoning has no known end of one token."""
    known = ", ".join(last for _, last in _EVERY)
    return RequestError(
        f"{BUDGET} needs a token that ends the reasoning, and the model has none of {known}",
        "leave it out; reasoning_effort asks for less reasoning where the chat template knows it, "
        "and max_tokens bounds all",
        param=BUDGET,
    )
