"""Parsers that part a model's text into reasoning and an answer, which another parser reads.

They are parsers as described in ``parsed.py``, made for the prompt, as a template may have begun
or ended the reasoning in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from sametoken.serving.http.harmony import MARKS, harmony_parser
from sametoken.serving.http.parsed import Parsed, Parser, num_safe, parse_nothing

#: Makes a parser of the rendered prompt, the parser of the content, and whether marks without
#: a meaning are shown.
MakeParser = Callable[[str, Parser, bool], Parser]

_THINK, _END, _CALL = "<think>", "</think>", "<tool_call>"
_FUNCTION = "<function="
_FUNCTION_CALL = re.compile(rf"{_CALL}\s*{_FUNCTION}")


def qwen3_parser(prompt: str, content: Parser, shows_marks: bool) -> Parser:
    """``<think>REASONING</think>CONTENT``, the first mark in the prompt or the text.

    Without the first mark all is content.
    """
    return _think_parser(prompt, content, thinks_first=False)


def deepseek_r1_parser(prompt: str, content: Parser, shows_marks: bool) -> Parser:
    """``REASONING</think>CONTENT``, after ``<think>`` or without it.

    Without ``</think>`` all is reasoning, unless the prompt ends with it.
    """
    return _think_parser(prompt, content, thinks_first=True)


def gptoss_parser(prompt: str, content: Parser, shows_marks: bool) -> Parser:
    """Harmony, with calls if there is a parser for calls."""
    return harmony_parser(prompt, finds_calls=content is not parse_nothing, shows_marks=shows_marks)


#: By the values of ``--reasoning-parser``.
REASONING_PARSERS: Mapping[str, MakeParser] = {
    "deepseek_r1": deepseek_r1_parser,
    "openai_gptoss": gptoss_parser,
    "qwen3": qwen3_parser,
}
#: The marks that each must see, special tokens or not.
PARSER_MARKS: Mapping[str, tuple[str, ...]] = {
    "deepseek_r1": (_THINK, _END),
    "openai_gptoss": MARKS,
    "qwen3": (_THINK, _END),
}


def _think_parser(prompt: str, content: Parser, *, thinks_first: bool) -> Parser:
    before = prompt.rstrip()
    if before.endswith(_END):
        return content
    thinks_first = thinks_first or before.endswith(_THINK)

    def parse(text: str, finished: bool) -> Parsed:
        first = len(text) - len(text.lstrip())
        if not finished and _THINK.startswith(text[first:]):
            return Parsed("")
        is_marked = text.startswith(_THINK, first)
        if not is_marked and not thinks_first:
            return content(text, finished)
        start = first + len(_THINK) if is_marked else 0
        end, rest = _end_of_reasoning(text, start)
        if end < 0:
            return Parsed("", reasoning=text[start : len(text) if finished else _num_safe(text)])
        return replace(content(text[rest:], finished), reasoning=text[start:end])

    return parse


def _end_of_reasoning(text: str, start: int) -> tuple[int, int]:
    """Where reasoning ends and what follows begins; -1 twice if there is no end.

    Qwen3.5 may call a function without ending its reasoning.
    """
    end = text.find(_END, start)
    call = _FUNCTION_CALL.search(text, start, len(text) if end < 0 else end)
    if call is not None:
        return call.start(), call.start()
    return (end, end + len(_END)) if end >= 0 else (-1, -1)


def _num_safe(text: str) -> int:
    """Number of leading characters that cannot be part of an end of reasoning."""
    call = text.rfind(_CALL)
    if call >= 0 and _FUNCTION.startswith(text[call + len(_CALL) :].lstrip()):
        return call
    return num_safe(text, _END, _CALL)
