"""Forms of reasoning: how a model parts it from the content of its answer, which is read apart.

Their parsers are as described in ``parsed.py``, made for the prompt, as a template may have begun
or ended the reasoning in it. The same holds for what a grammar of the content waits for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from sametoken.serving.http.harmony import ENDS, MARKS, Harmony, before_final
from sametoken.serving.http.marked_calls import END
from sametoken.serving.http.parsed import (
    Encode,
    FoundText,
    GrowingAnswer,
    NewPart,
    Parsed,
    Parser,
    Rest,
    num_safe,
    parse_nothing,
    parsed_of,
)
from sametoken.text.reasoning_marks import CALL_STARTS, GEMMA, MISTRAL, SEED, THINK
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import Reasoning

if TYPE_CHECKING:
    from sametoken.text.tokenizer import Tokenizer

#: The first may be text of the reasoning, which never holds the others by accident.
START, *_SECTIONS = CALL_STARTS
_SECTION = "|".join(map(re.escape, _SECTIONS))
#: A name in a call, which no section begins within.
_NAME = rf"(?:(?!{_SECTION})[^<>{{}}\s])+"
#: A call's beginning; without parameters, with the function's name.
_CALL = re.compile(rf"{START}\s*(?:<function=|{_NAME}\s*<arg_key>|({_NAME})\s*{END})|{_SECTION}")
#: A text's end that may go on to be a call's beginning.
_BEGUN_CALL = re.compile(rf"{START}\s*(?:[^<>{{}}\s]+\s*)?(?:<[^<>]*)?\Z")


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as its template rendered it.

    Attributes:
        text: all of it.
        token_ids: the same.
        continued: the message at its end that the answer continues; empty if it begins one.
    """

    text: str
    continued: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ComingAnswer:
    """What is known of an answer that is to be parsed.

    Attributes:
        prompt: of the answer.
        content: the parser of its content.
        shows_marks: whether marks without a meaning are shown.
        is_constrained: whether all content is a grammar's, which begins after ``before_content``.
        functions: names of those that it may call.
    """

    prompt: RenderedPrompt
    content: Parser
    shows_marks: bool
    is_constrained: bool = False
    functions: Collection[str] = ()


class ReasoningForm(Protocol):
    """One form of reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What its parsers must see, special tokens or not."""
        ...

    def parser(self, answer: ComingAnswer) -> Parser:
        """The parser of an answer."""
        ...

    def before_content(self, prompt: RenderedPrompt, encode: Encode) -> Reasoning | None:
        """What a grammar of the content waits for.

        Args:
            prompt: of the answers.
            encode: the tokenizer.

        Returns:
            None if it holds from the first token on: the prompt has ended the reasoning, or a mark
            is not one token.
        """
        ...


@dataclass(frozen=True, slots=True)
class ThinkForm:
    """``<think>REASONING</think>CONTENT``, the first mark in the prompt or the text.

    Attributes:
        thinks_first: whether reasoning begins without the first mark. Then all is reasoning
            without the second, unless the prompt has ended it; otherwise all is content without
            the first.
        start: the first mark.
        end: the second.
        label: what may follow the first, and is not shown.
        answer: marks that may be around the content, each on a line of its own.
    """

    thinks_first: bool
    start: str = THINK[0]
    end: str = THINK[1]
    label: str = ""
    answer: tuple[str, str] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """See ``ReasoningForm``."""
        return (self.start, self.end, *(self.answer or ()))

    def parser(self, answer: ComingAnswer) -> Parser:
        """See ``ReasoningForm``."""
        newest, content = self._newest_mark(answer.prompt), answer.content
        if self.answer is not None and not answer.is_constrained:
            content = _between(self.answer, content)
        if newest == self.end:
            return content
        has_begun = self.thinks_first or newest == self.start
        # A grammar begins at the mark alone.
        ending = None if answer.is_constrained else answer.functions

        def think(text: str, finished: bool, start: int = 0) -> Parsed:
            end, rest = self._end_of_reasoning(text, start, ending)
            if end < 0:
                known = len(text) if finished else self._num_safe(text, ending)
                return Parsed("", reasoning=text[start:known], rest=Rest(known, think))
            return _then(text[start:end], content(text[rest:], finished), rest, content)

        def parse(text: str, finished: bool) -> Parsed:
            begin = _after_mark(text, self.start, self.label, finished=finished)
            if begin is None:
                return Parsed("")
            if not begin and not has_begun:
                return content(text, finished)
            return think(text, finished, begin)

        return parse

    def before_content(self, prompt: RenderedPrompt, encode: Encode) -> Reasoning | None:
        """See ``ReasoningForm``."""
        start, end = encode(self.start), encode(self.end)
        newest = self._newest_mark(prompt)
        if len(start) != 1 or len(end) != 1 or newest == self.end:
            return None
        return Reasoning(end, begins=() if self.thinks_first or newest == self.start else start)

    def _newest_mark(self, prompt: RenderedPrompt) -> str | None:
        """The last mark in the message that the answer belongs to; None without one.

        It is in the continued text, or the template wrote it right before: marks further back
        belong to other messages.
        """
        newest = max(self.start, self.end, key=prompt.continued.rfind)
        if newest in prompt.continued:
            return newest
        before = prompt.text.rstrip().removesuffix(prompt.continued.strip()).rstrip()
        return next((mark for mark in (self.start, self.end) if before.endswith(mark)), None)

    def _end_of_reasoning(
        self, text: str, start: int, functions: Collection[str] | None
    ) -> tuple[int, int]:
        """Where reasoning ends and what follows begins; -1 twice if there is no end.

        Qwen3.5, GLM and Kimi may call one of the functions without ending their reasoning; with
        None no call ends it.
        """
        end = text.find(self.end, start)
        if functions is not None:
            for call in _CALL.finditer(text, start, len(text) if end < 0 else end):
                if call[1] is None or call[1] in functions:
                    return call.start(), call.start()
        return (end, end + len(self.end)) if end >= 0 else (-1, -1)

    def _num_safe(self, text: str, functions: Collection[str] | None) -> int:
        """Number of leading characters that cannot be part of an end of reasoning."""
        if functions is None:
            return num_safe(text, self.end)
        begun = _BEGUN_CALL.search(text)
        return num_safe(text, self.end, START, *_SECTIONS) if begun is None else begun.start()


def _after_mark(text: str, mark: str, label: str, *, finished: bool) -> int | None:
    """Where a text goes on after a mark at its beginning, and its label if that follows.

    0 without the mark; None while that is not known.
    """
    first = len(text) - len(text.lstrip())
    begun, labelled = text[first:], mark + label
    if not finished and begun != labelled and labelled.startswith(begun):
        return None
    if not begun.startswith(mark):
        return 0
    return first + len(labelled if begun.startswith(labelled) else mark)


def _then(reasoning: str, found: Parsed, start: int, content: Parser) -> Parsed:
    """Reasoning, and what its parser found in the content from ``start`` on."""
    own = found.rest_for(content)
    parts = (FoundText("reasoning", reasoning), *found.parts)
    return parsed_of(parts, replace(own, start=start + own.start))


def _between(marks: tuple[str, str], content: Parser) -> Parser:
    """The parser of a content that may have marks around it."""
    start, end = marks
    inside = _before(end, content)

    def parse(text: str, finished: bool) -> Parsed:
        begin = _after_mark(text, start, "\n", finished=finished)
        if begin is None:
            return Parsed("")
        if not begin:
            return content(text, finished)
        return _then("", inside(text[begin:], finished), begin, inside)

    return parse


def _before(end: str, content: Parser) -> Parser:
    """The parser of a content that may have a mark after it, and then nothing more."""

    def parse(text: str, finished: bool) -> Parsed:
        trimmed = text.rstrip()
        if trimmed.endswith(end):
            known = len(trimmed.removesuffix(end).rstrip())
        else:
            known = len(text) if finished else len(text[: num_safe(trimmed, end)].rstrip())
        found = content(text[:known], finished)
        own = found.rest_for(content)
        return parsed_of(found.parts, replace(own, parser=_before(end, own.parser)))

    return parse


@dataclass(frozen=True, slots=True)
class HarmonyForm:
    """Harmony, with calls if there is a parser for calls."""

    @property
    def marks(self) -> tuple[str, ...]:
        """See ``ReasoningForm``."""
        return MARKS

    def parser(self, answer: ComingAnswer) -> Parser:
        """See ``ReasoningForm``."""
        finds_calls = answer.content is not parse_nothing
        form = Harmony(finds_calls, answer.shows_marks, answer.is_constrained, answer.functions)
        parse = form.parser(answer.prompt.text)
        return _with_content(parse, answer.content) if answer.is_constrained else parse

    def before_content(self, prompt: RenderedPrompt, encode: Encode) -> Reasoning | None:
        """See ``ReasoningForm``."""
        return before_final(prompt.text, encode)


def _with_content(parser: Parser, content: Parser) -> Parser:
    """The parser, with another one that reads the content that it finds."""
    if content is parse_nothing:
        return parser

    def parse(text: str, finished: bool) -> Parsed:
        found = parser(text, finished)
        if not found.content:
            rest = found.rest_for(parser)
            rest = replace(rest, parser=_with_content(rest.parser, content))
            return replace(found, rest=rest)
        answer, parts = GrowingAnswer(content), list[NewPart]()
        for part in found.parts:
            if isinstance(part, FoundText) and part.kind == "content":
                parts += answer.read(part.text, finished=False)
            else:
                parts.append(part)
        return parsed_of((*parts, *(answer.read("", finished=True) if finished else ())))

    return parse


#: By the values of ``--reasoning-parser``.
REASONING_FORMS: Mapping[str, ReasoningForm] = {
    "mistral": ThinkForm(False, *MISTRAL),
    "gemma4": ThinkForm(False, *GEMMA, label="thought\n"),
    "seed_oss": ThinkForm(True, *SEED),
    "ernie45": ThinkForm(True, answer=("<response>", "</response>")),
    "hunyuan_a13b": ThinkForm(False, label="\n", answer=("<answer>", "</answer>")),
    "openai_gptoss": HarmonyForm(),
    **dict.fromkeys(
        ("deepseek_r1", "kimi_k2", "minimax_m2", "olmo3"), ThinkForm(thinks_first=True)
    ),
    # Their templates tell in the prompt whether the model thinks, or it does.
    **dict.fromkeys(("deepseek_v3", "glm45", "glm47", "qwen3"), ThinkForm(thinks_first=False)),
}


def with_marks(
    params: SamplingParams, form: ReasoningForm, tokenizer: Tokenizer, eos_token_ids: Sequence[int]
) -> SamplingParams:
    """Parameters whose text has the marks that the parsers of a form must see.

    An answer also ends with harmony's marks for that, which some copies of gpt-oss do not name as
    its ends.
    """
    ids = {mark: tokenizer.backend.token_to_id(mark) for mark in ENDS}
    stops = tuple(params.stop_token_ids or ())
    known = {*eos_token_ids, *stops}
    ends = [] if params.ignore_eos else [ids[mark] for mark in ENDS if mark in form.marks]
    params = replace(
        params,
        stop_token_ids=(*stops, *(end for end in ends if end is not None and end not in known)),
    )
    return showing(params, form.marks, tokenizer)


def showing(params: SamplingParams, marks: Iterable[str], tokenizer: Tokenizer) -> SamplingParams:
    """Parameters whose text has these marks; if one is a special token, it has all of these."""
    is_special = not tokenizer.special_ids.isdisjoint(map(tokenizer.backend.token_to_id, marks))
    return replace(params, skip_special_tokens=params.skip_special_tokens and not is_special)
