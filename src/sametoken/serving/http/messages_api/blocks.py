"""The content blocks of a message, and the events that tell of them as they grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic_core import from_json

from sametoken.serving.http.messages_api.objects import (
    ContentBlock,
    MessageEvent,
    Text,
    Thinking,
    ToolUse,
)
from sametoken.serving.http.parsed import (
    NO_ARGUMENTS,
    FoundCall,
    GrowingAnswer,
    MoreArguments,
    Parser,
)

Events = Iterator[MessageEvent]


@dataclass(slots=True)
class _Text:
    """A block of text that grows.

    Attributes:
        pieces: of its text; joined once it is read, as a long text has many.
    """

    pieces: list[str] = field(default_factory=list)
    delta: ClassVar[tuple[str, str]] = ("text_delta", "text")

    def object(self) -> ContentBlock:
        """The block so far."""
        return Text(text="".join(self.pieces))


@dataclass(slots=True)
class _Thinking(_Text):
    """A block of reasoning that grows.

    Attributes:
        signature: of the whole block, empty until it ends.
    """

    signature: str = ""
    delta: ClassVar[tuple[str, str]] = ("thinking_delta", "thinking")

    def object(self) -> ContentBlock:
        """The block so far."""
        return Thinking(thinking="".join(self.pieces), signature=self.signature)


@dataclass(slots=True)
class _Call(_Text):
    """A call whose arguments grow."""

    id: str = ""
    name: str = ""
    delta: ClassVar[tuple[str, str]] = ("input_json_delta", "partial_json")

    def object(self) -> ContentBlock:
        """The call so far."""
        return ToolUse(id=self.id, name=self.name, input=_read("".join(self.pieces)))


def _read(arguments: str) -> dict[str, Any]:
    """Arguments as clients read those of a stream: cut off where the answer is, or none."""
    try:
        read = from_json(arguments or NO_ARGUMENTS, allow_partial=True)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


class BlockWriter:
    """Writes a growing answer as blocks, one after the other: reasoning, texts and calls.

    Args:
        parser: of the answer.
        key: a unique part of the calls' ids, and the signature of reasoning.
    """

    def __init__(self, parser: Parser, key: str) -> None:
        self._answer, self._key = GrowingAnswer(parser), key
        self._blocks: list[_Text] = []

    @property
    def content(self) -> list[ContentBlock]:
        """The blocks so far."""
        return [block.object() for block in self._blocks]

    @property
    def has_calls(self) -> bool:
        """Whether a block is a call."""
        return any(isinstance(block, _Call) for block in self._blocks)

    def write(self, piece: str) -> Events:
        """Events of what is new in the answer with one more piece of its text."""
        return self._write(piece, finished=False)

    def finish(self, piece: str) -> Events:
        """The events of the last piece."""
        yield from self._write(piece, finished=True)
        yield from self._end()

    def _write(self, piece: str, *, finished: bool) -> Events:
        for part in self._answer.read(piece, finished=finished):
            if isinstance(part, FoundCall):
                call = _Call(id=f"toolu_{self._key}_{len(self._blocks)}", name=part.name)
                yield from self._begin(call)
                yield from self._grow(part.arguments)
            elif isinstance(part, MoreArguments):
                yield from self._grow(part.text)
            else:
                kind = _Text if part.kind == "content" else _Thinking
                if not self._blocks or type(self._blocks[-1]) is not kind:
                    yield from self._begin(kind())
                yield from self._grow(part.text)

    def _grow(self, added: str) -> Events:
        if added:
            block = self._blocks[-1]
            block.pieces.append(added)
            kind, name = block.delta
            yield self._placed("delta", delta={"type": kind, name: added})

    def _begin(self, block: _Text) -> Events:
        yield from self._end()
        self._blocks.append(block)
        yield self._placed("start", content_block=block.object())

    def _end(self) -> Events:
        """End the last block, if there is one."""
        if self._blocks:
            block = self._blocks[-1]
            if isinstance(block, _Thinking):
                block.signature = self._key
                delta = {"type": "signature_delta", "signature": block.signature}
                yield self._placed("delta", delta=delta)
            yield self._placed("stop")

    def _placed(self, what: str, **fields: Any) -> MessageEvent:
        return MessageEvent(type=f"content_block_{what}", index=len(self._blocks) - 1, **fields)
