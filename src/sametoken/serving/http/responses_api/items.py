"""The items of a response, and the events that tell of them as they grow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sametoken.serving.http.parsed import FoundCall, GrowingAnswer, MoreArguments, Parser
from sametoken.serving.http.response_schemas import TokenLogprob
from sametoken.serving.http.responses_api.objects import (
    CallItem,
    CustomCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    Status,
)
from sametoken.serving.http.responses_api.tools import CalledName

Events = Iterator[ResponseEvent]
Logprobs = list[TokenLogprob]


def event(kind: str, /, **fields: Any) -> ResponseEvent:
    """An event of a response."""
    return ResponseEvent(type=f"response.{kind}", **fields)


@dataclass(slots=True)
class _Item:
    """An item that grows.

    Attributes:
        pieces: of its text; joined once it is read, as a long text has many.
    """

    item_id: str
    pieces: list[str] = field(default_factory=list, kw_only=True)

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self.pieces)


@dataclass(slots=True)
class _Reasoning(_Item):
    """An item of reasoning that grows."""

    name: ClassVar[str] = "reasoning_text"

    def object(self, status: Status) -> ReasoningItem:
        """The item; one in progress has no content yet."""
        content = [] if status == "in_progress" else [self.part()]
        return ReasoningItem(id=self.item_id, summary=[], content=content, status=status)

    def part(self) -> ReasoningText:
        """Its content so far."""
        return ReasoningText(text=self.text)

    def done(self) -> dict[str, Any]:
        """The fields of the event that ends it."""
        return {"content_index": 0, "text": self.text}


@dataclass(slots=True)
class _Message(_Item):
    """An item of text that grows.

    Attributes:
        logprobs: of the tokens of the steps that wrote it.
        with_logprobs: whether they were asked for.
    """

    with_logprobs: bool
    logprobs: Logprobs = field(default_factory=list)
    name: ClassVar[str] = "output_text"

    def object(self, status: Status) -> MessageItem:
        """The item; one in progress has no content yet."""
        content = [] if status == "in_progress" else [self.part()]
        return MessageItem(id=self.item_id, content=content, status=status)

    def part(self) -> OutputText:
        """Its content so far."""
        part = OutputText(text=self.text, annotations=[])
        if self.with_logprobs:
            part.logprobs = list(self.logprobs)
        return part

    def done(self) -> dict[str, Any]:
        """The fields of the event that ends it."""
        return {"content_index": 0, "text": self.text, "logprobs": list(self.logprobs)}


@dataclass(slots=True)
class _Call(_Item):
    """A call whose arguments grow."""

    call_id: str
    function: CalledName
    name: ClassVar[str] = "function_call_arguments"

    def object(self, status: Status) -> CallItem | CustomCallItem:
        """The item; one in progress has no arguments yet."""
        return CallItem(arguments=self.text_in(status), **self.fields(status))

    def text_in(self, status: Status) -> str:
        """The text that an item shows."""
        return "" if status == "in_progress" else self.text

    def fields(self, status: Status) -> dict[str, Any]:
        """The fields of an item that functions and custom tools have."""
        return {
            "id": self.item_id,
            "call_id": self.call_id,
            "name": self.function.name,
            "namespace": self.function.namespace,
            "status": status,
        }

    def done(self) -> dict[str, str]:
        """The fields of the event that ends it."""
        return {"name": self.function.name, "arguments": self.text}


@dataclass(slots=True)
class _CustomCall(_Call):
    """A call of a custom tool whose text grows."""

    name: ClassVar[str] = "custom_tool_call_input"

    def object(self, status: Status) -> CustomCallItem:
        """The item; one in progress has no text yet."""
        return CustomCallItem(input=self.text_in(status), **self.fields(status))

    def done(self) -> dict[str, str]:
        """The fields of the event that ends it."""
        return {"input": self.text}


class ItemWriter:
    """Writes a growing answer as items, one after the other: reasoning, texts and calls.

    Args:
        parser: of the answer.
        key: a unique part of the items' ids.
        names: of functions, by those that the model sees.
        with_logprobs: whether texts have the log-probabilities of their tokens.

    Attributes:
        items: those that are done.
    """

    def __init__(
        self, parser: Parser, key: str, names: Mapping[str, CalledName], *, with_logprobs: bool
    ) -> None:
        self.items: list[OutputItem] = []
        self._names = names
        self._answer, self._key, self._with_logprobs = GrowingAnswer(parser), key, with_logprobs
        self._open: _Reasoning | _Message | _Call | None = None
        self._num_calls = 0
        self._logprobs: Logprobs = []

    def write(self, piece: str, logprobs: Logprobs) -> Events:
        """Events of what is new in the answer.

        Args:
            piece: the text that is new.
            logprobs: of the tokens that are new.
        """
        return self._write(piece, logprobs, finished=False)

    def finish(self, piece: str, logprobs: Logprobs, *, is_cut: bool) -> Events:
        """The last events of an answer; with ``is_cut`` its last item is incomplete."""
        yield from self._write(piece, logprobs, finished=True)
        if self._open is None:
            yield from self._begin(self._new_message())
        if isinstance(self._open, _Message):
            self._open.logprobs += self._logprobs
        yield from self._end("incomplete" if is_cut else "completed")

    def _write(self, piece: str, logprobs: Logprobs, *, finished: bool) -> Events:
        self._logprobs += logprobs
        parts = self._answer.read(piece, finished=finished)
        for part in parts:
            if isinstance(part, FoundCall):
                yield from self._add_call(part)
            elif isinstance(part, MoreArguments):
                yield from self._grow(part.text)
            elif part.kind == "content":
                yield from self._grow_message(part.text)
            else:
                yield from self._grow_reasoning(part.text)
        if parts and not isinstance(self._open, _Message):
            # They were of the other items.
            self._logprobs = []

    def _grow_reasoning(self, added: str) -> Events:
        if not isinstance(self._open, _Reasoning):
            yield from self._begin(_Reasoning(f"rs_{self._key}_{self._next_number}"))
        yield from self._grow(added, content_index=0)

    def _grow_message(self, added: str) -> Events:
        if not isinstance(self._open, _Message):
            yield from self._begin(self._new_message())
        logprobs, self._logprobs = self._logprobs, []
        yield from self._grow(added, content_index=0, logprobs=logprobs)
        assert isinstance(self._open, _Message)
        self._open.logprobs += logprobs

    def _add_call(self, call: FoundCall) -> Events:
        number = f"{self._key}_{self._num_calls}"
        self._num_calls += 1
        name = self._names.get(call.name, CalledName(call.name))
        kind, prefix = (_CustomCall, "ctc") if name.is_custom else (_Call, "fc")
        yield from self._begin(kind(f"{prefix}_{number}", f"call_{number}", name))
        yield from self._grow(call.arguments)

    def _grow(self, added: str, **fields: Any) -> Events:
        if added:
            assert self._open is not None
            self._open.pieces.append(added)
            yield self._placed(f"{self._open.name}.delta", delta=added, **fields)

    def _begin(self, item: _Reasoning | _Message | _Call) -> Events:
        if self._open is not None:
            yield from self._end("completed")
        self._open = item
        yield self._of_item("added", "in_progress")
        if not isinstance(item, _Call):
            yield self._placed("content_part.added", content_index=0, part=item.part())

    def _end(self, status: Status) -> Events:
        item = self._open
        assert item is not None
        yield self._placed(f"{item.name}.done", **item.done())
        if not isinstance(item, _Call):
            yield self._placed("content_part.done", content_index=0, part=item.part())
        yield self._of_item("done", status)
        self.items.append(item.object(status))
        self._open = None

    def _new_message(self) -> _Message:
        return _Message(f"msg_{self._key}_{self._next_number}", self._with_logprobs)

    @property
    def _next_number(self) -> int:
        return len(self.items) + (self._open is not None)

    def _of_item(self, what: str, status: Status) -> ResponseEvent:
        assert self._open is not None
        index, item = len(self.items), self._open.object(status)
        return event(f"output_item.{what}", output_index=index, item=item)

    def _placed(self, kind: str, /, **fields: Any) -> ResponseEvent:
        assert self._open is not None
        place = {"output_index": len(self.items), "item_id": self._open.item_id}
        return event(kind, **place, **fields)
