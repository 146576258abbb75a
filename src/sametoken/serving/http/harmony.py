"""A parser of harmony, the format of gpt-oss.

An answer is a sequence of messages, the first of which the prompt has begun::

    <|start|>assistant<|channel|>analysis<|message|>TEXT<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME json<|message|>TEXT<|call|>
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

The channel, and the recipient on either side of it, tell what a message is. What does not follow
the format is content, so that no text is lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from sametoken.serving.http.parsed import (
    NO_ARGUMENTS,
    Encode,
    FoundCall,
    FoundText,
    Kind,
    MoreArguments,
    NewPart,
    Parsed,
    Parser,
    Rest,
    num_safe,
    parsed_of,
)
from sametoken.types.structured_outputs import Reasoning

_START, CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
#: Marks that end an answer.
ENDS = ("<|return|>", "<|call|>")
_ENDS = ("<|end|>", *ENDS)
MARKS = (_START, CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
#: A chat template with this text writes harmony.
TEMPLATE_MARK = "<|channel|>analysis"

_MARK = re.compile("|".join(map(re.escape, MARKS)))
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTION = "functions."
_ANALYSIS, _FINAL = "analysis", "final"
#: A longer header is text.
_MAX_HEADER = 256


def _header(channel: str, kind: str) -> re.Pattern[str]:
    """The form of a header with such a channel and kind of text, spaces allowed in between."""
    # Possessive quantifiers do not backtrack, so the time is linear in the text. Their groups are
    # atomic: before Python 3.11.5 others go on from where they failed.
    role = r"(?>assistant|user|system|developer|tool|functions\.[^\s<]++)?+"
    recipient = r"(?>to(?>=[^\s<]*+)?+)?+"
    of_channel = rf"(?><\|channel\|> {channel} {recipient} (?>json|code|text)?+ )?+"
    form = rf" {role} {recipient} {of_channel}(?><\|constrain\|> {kind} )?+"
    return re.compile(form.replace(" ", r"\s*+"))


#: Headers of messages, and those that end before a message begins.
_WHOLE = _header(r"\w*+", r"[^\s<]*+")
_CUT = _header("(?>analysis|commentary|final)?+", "(?>json)?+")


@dataclass(frozen=True, slots=True)
class _Message:
    """The message that is being read, outside of its header.

    Attributes:
        destination: where its text goes; a call's is told by its function.
        is_new: whether it has no text yet.
        shown: the kinds of the texts before it.
    """

    destination: Kind | FoundCall = "content"
    is_new: bool = True
    shown: frozenset[Kind] = frozenset()


@dataclass(frozen=True, slots=True)
class Harmony:
    """How answers are read.

    Attributes:
        finds_calls: otherwise messages to functions are content.
        shows_marks: whether marks without a meaning where they stand are shown.
        is_constrained: whether a grammar holds in channel final, or from the first token on, so
            that all else is reasoning.
        functions: names that are those of functions without their prefix too.
    """

    finds_calls: bool
    shows_marks: bool
    is_constrained: bool = False
    functions: Collection[str] = ()

    def parser(self, prompt: str) -> Parser:
        """The parser for answers to a rendered prompt, whose last message they continue."""
        return self.parser_in(_Message(), _begun(prompt))

    def parser_in(self, message: _Message, begun: str = "") -> Parser:
        """The parser of a text that goes on in a message, or after a begun header."""

        def parse(text: str, finished: bool) -> Parsed:
            whole = begun + text
            known = len(whole) if finished else num_safe(whole, *MARKS)
            reader = _Reader(self, message, whole, len(begun))
            place = 0
            for found in _MARK.finditer(whole, 0, known):
                reader.read_text(place, found.start())
                reader.read_mark(found)
                place = found.end()
            reader.read_text(place, known)
            reader.stop(known, finished=finished)
            return reader.parsed(known)

        return parse


def _begun(prompt: str) -> str:
    """The header of the message that a prompt leaves open, with its end; empty if none is."""
    _, start, message = prompt.rpartition(_START)
    header, end, _ = message.partition(_MESSAGE)
    is_open = start and len(header) <= _MAX_HEADER and not any(end in message for end in _ENDS)
    return start + header + end if is_open else ""


def _channel_in(header: str) -> str:
    """The channel that a header names, empty without one."""
    named = _NAMED_CHANNEL.search(header)
    return "" if named is None else named[1]


def before_final(prompt: str, encode: Encode) -> Reasoning | None:
    """What comes before a message in channel final, as ``ReasoningForm.before_content``."""
    begun = _begun(prompt)
    is_message = begun.endswith(_MESSAGE)
    ids = [encode(mark) for mark in (_START, CHANNEL, _MESSAGE)]
    if any(len(one) != 1 for one in ids) or (is_message and _channel_in(begun) == _FINAL):
        return None
    start, channel, (message,) = ids
    begins = () if is_message else (*start, *channel)
    return Reasoning((*channel, *encode(_FINAL)), header_end=message, begins=begins)


class _Reader:
    """Reads the texts and marks of an answer in order.

    Args:
        form: how they are read.
        message: what the text begins in.
        whole: the begun message and the answer.
        num_begun: number of leading characters that are not shown.
    """

    def __init__(self, form: Harmony, message: _Message, whole: str, num_begun: int) -> None:
        self._form = form
        self._whole = whole
        self._num_begun = num_begun
        self._message = message
        self._parts: list[NewPart] = []
        #: Where the arguments of the newest call begin, if it is the newest message.
        self._arguments = 0
        #: Where a header begins, in a header.
        self._header: int | None = None
        if isinstance(message.destination, FoundCall):
            self._parts.append(message.destination)

    def read_text(self, start: int, end: int) -> None:
        """Read the text between two marks."""
        if self._header is None:
            self._add(start, end)

    def read_mark(self, found: re.Match[str]) -> None:
        """Read a mark."""
        mark, header = found[0], self._header
        # Under a grammar from the first token on, an answer has no marks.
        is_before_grammar = self._form.is_constrained and found.start() >= self._num_begun
        aside: Kind = "reasoning" if is_before_grammar else "content"
        if header is not None:
            self._turn_to(aside)
        begins = mark == _START or (mark == CHANNEL and not self._takes_channel(found.start()))
        if begins or mark in _ENDS:
            if header is not None:
                self._end_header(header, found.start(), _CUT)
            self._turn_to(aside)
            # A channel belongs to its header; the other marks do not.
            self._header = found.start() if mark == CHANNEL else found.end() if begins else None
        elif mark == _MESSAGE and header is not None:
            self._end_header(header, found.start(), _WHOLE)
            self._turn_to(self._destination(self._whole[header : found.start()]))
            self._header, self._arguments = None, found.end()
        elif header is None and self._form.shows_marks:
            self._add(found.start(), found.end())

    def stop(self, end: int, *, finished: bool) -> None:
        """Read the end of what is known; a header there may still become one of a message."""
        if self._header is not None and (finished or end - self._header > _MAX_HEADER):
            self._end_header(self._header, end, _CUT)
        if finished:
            self._end_call()

    def parsed(self, end: int) -> Parsed:
        """What was found up to ``end``."""
        message, num_parts = self._message, 0
        if isinstance(message.destination, FoundCall):
            end, num_parts = self._arguments, 1
        if self._header is not None or end < self._num_begun:
            return parsed_of(self._parts)
        rest = Rest(end - self._num_begun, self._form.parser_in(message), num_parts)
        return parsed_of(self._parts, rest)

    def _takes_channel(self, end: int) -> bool:
        """Whether a channel at ``end`` belongs to the header before it."""
        start = self._header
        is_header = start is not None and self._fits(start, end, _CUT)
        return is_header and self._whole.find(CHANNEL, start, end) < 0

    def _fits(self, start: int, end: int, form: re.Pattern[str]) -> bool:
        return end - start <= _MAX_HEADER and bool(form.fullmatch(self._whole, start, end))

    def _end_header(self, start: int, end: int, form: re.Pattern[str]) -> None:
        """Show a header that has not the form of one."""
        if self._fits(start, end, form):
            return
        for found in _MARK.finditer(self._whole, start, end):
            self._add(start, found.start())
            if self._form.shows_marks:
                self._add(found.start(), found.end())
            start = found.end()
        self._add(start, end)

    def _destination(self, header: str) -> Kind | FoundCall:
        """Where the text of a message with this header goes."""
        of, recipient = _channel_in(header), _RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1]
        # gpt-oss may leave the prefix out (vllm#42454).
        is_function = name.startswith(_FUNCTION) and name != _FUNCTION
        if is_function or name in self._form.functions:
            is_call = self._form.finds_calls
            return FoundCall(name.removeprefix(_FUNCTION), "") if is_call else "content"
        reasons = of == _ANALYSIS or name or self._form.is_constrained
        return "reasoning" if reasons and of != _FINAL else "content"

    def _end_call(self) -> None:
        """End the message; a call whose text is empty has no arguments."""
        if isinstance(self._message.destination, FoundCall) and self._message.is_new:
            self._parts.append(MoreArguments(NO_ARGUMENTS))

    def _turn_to(self, destination: Kind | FoundCall) -> None:
        self._end_call()
        self._message = replace(self._message, destination=destination, is_new=True)
        if isinstance(destination, FoundCall):
            self._parts.append(destination)

    def _add(self, start: int, end: int) -> None:
        """Show a text; messages are parted by a line break."""
        piece = self._whole[max(start, self._num_begun) : end]
        if not piece:
            return
        kind, shown = self._message.destination, self._message.shown
        if isinstance(kind, FoundCall):
            self._parts.append(MoreArguments(piece))
            self._message = replace(self._message, is_new=False)
            return
        parted = "\n" if self._message.is_new and kind in shown else ""
        self._parts.append(FoundText(kind, parted + piece))
        self._message = replace(self._message, is_new=False, shown=shown | {kind})


#: For calls in answers to prompts that end where the assistant's message begins.
parse_harmony = Harmony(finds_calls=True, shows_marks=False).parser(f"{_START}assistant")
