"""Incremental parsers of tool calls that name the function before the JSON of its arguments.

With MARK for a token of each model::

    DeepSeek-V3 and R1      MARK function MARK NAME ```json JSON ``` MARK
    DeepSeek-V3.1           MARK NAME MARK JSON MARK
    Kimi-K2                 MARK functions.NAME:0 MARK JSON MARK
    Mistral from v11 on     MARK NAME MARK JSON

DeepSeek's and Kimi's calls are in a section with two more marks. Mistral's templates before v11
write one list of calls after their mark, and between name and JSON there may be an id or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from sametoken.serving.http.json_calls import FENCE, arguments_at, calls_in
from sametoken.serving.http.json_spans import find_outside_strings, skip_space
from sametoken.serving.http.marked_calls import marked_parser
from sametoken.serving.http.parsed import FoundCall, num_safe

#: Begin and end of the section, and of a call; and what comes before the name or the arguments.
DEEPSEEK_MARKS = tuple(
    # Wide bars, and the sign that SentencePiece writes for a space.
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
KIMI_MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
#: The first begins a call.
MISTRAL_MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")


class _NamedSyntax(NamedTuple):
    """How the function and the arguments of a call are written.

    Attributes:
        opening: what begins a call.
        begun: a text's end that may go on to be one; and marks that may be begun there.
        head: what comes before the JSON. Without a name the JSON is a list of calls.
        stop: where a call ends whose JSON does not.
        tail: what belongs to a call after its JSON.
        closing: what the tail consists of.
    """

    opening: re.Pattern[str]
    begun: tuple[re.Pattern[str], Sequence[str]]
    head: re.Pattern[str]
    stop: str
    tail: re.Pattern[str]
    closing: Sequence[str] = ()

    @classmethod
    def in_section(cls, marks: Sequence[str], head: str) -> _NamedSyntax:
        """A syntax with marks in the order of ``DEEPSEEK_MARKS``."""
        section, section_end, begin, end, _ = map(re.escape, marks)
        return cls(
            re.compile(rf"(?:{section}\s*)?{begin}"),
            (re.compile(rf"{section}\s*(?:<[^<>]*)?\Z"), (marks[0], marks[2])),
            re.compile(head),
            marks[3],
            re.compile(rf"(?:\s*{FENCE})?(?:\s*{end})?(?:\s*{section_end})?"),
            (FENCE, marks[3], marks[1]),
        )

    def find_opening(self, text: str, place: int) -> tuple[int, int] | None:
        """See ``Syntax``."""
        found = self.opening.search(text, place)
        return None if found is None else found.span()

    def find_end(self, text: str, begun: tuple[int, int]) -> tuple[int, int, bool]:
        """See ``Syntax``."""
        _, body = begun
        head = self.head.match(text, body)
        place = body if head is None else head.end()
        is_json = head is not None and text[place : place + 1] in ("{", "[")
        end, is_final = find_outside_strings(text, self.stop, place, ends=is_json)
        if end < 0:
            return -1, -1, False
        tail = self.tail.match(text, end)
        after = end if tail is None else tail.end()
        place = skip_space(text, after)
        follows = text[place : place + max(map(len, self.closing), default=0)]
        may_grow = any(mark != follows and mark.startswith(follows) for mark in self.closing)
        return end, after, is_final and not may_grow

    def calls_in(self, body: str, is_whole: bool) -> Sequence[FoundCall]:
        """See ``Syntax``."""
        head = self.head.match(body)
        if head is None:
            return ()
        if head["name"] is None:
            return calls_in(body[head.end() :], is_whole)
        return (FoundCall(head["name"], arguments_at(body, head.end(), is_whole)),)

    def num_inside(self, text: str) -> int:
        """See ``Syntax``."""
        return num_safe(text, self.stop)

    def num_outside(self, text: str) -> int:
        """See ``Syntax``."""
        pattern, marks = self.begun
        found = pattern.search(text)
        return num_safe(text, *marks) if found is None else found.start()


parse_deepseek_v3 = marked_parser(
    _NamedSyntax.in_section(
        DEEPSEEK_MARKS,
        rf"\s*\w*{DEEPSEEK_MARKS[-1]}\s*(?P<name>[^\s`<{{]+)\s*(?:{FENCE}json\s*|(?={{))",
    )
)
parse_deepseek_v31 = marked_parser(
    _NamedSyntax.in_section(DEEPSEEK_MARKS, rf"\s*(?P<name>[^\s<]+)\s*{DEEPSEEK_MARKS[-1]}\s*")
)
parse_kimi_k2 = marked_parser(
    _NamedSyntax.in_section(
        KIMI_MARKS,
        rf"\s*(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?\s*{re.escape(KIMI_MARKS[-1])}\s*",
    )
)
_CALLS, _ID, _ARGS = map(re.escape, MISTRAL_MARKS)
parse_mistral = marked_parser(
    _NamedSyntax(
        re.compile(_CALLS),
        (re.compile(rf"{_CALLS}\Z"), MISTRAL_MARKS[:1]),
        re.compile(
            rf"\s*(?:(?P<name>[^\s\[\]{{}}]+)\s*(?:{_ID}[^\[\]{{}}]*)?(?:{_ARGS}\s*|(?={{))"
            r"|(?=\[\s*{))"
        ),
        MISTRAL_MARKS[0],
        re.compile(""),
    )
)
