"""What one request said, and which window said it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sametoken.engine.detokenizer import make_detokenizer
from sametoken.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Window:
    """One step of a request.

    Attributes:
        first: index in the answer of the first token that it emitted.
        num_drafts, num_accepted: drafts offered and accepted; 0 for the step that ends a
            prompt.
    """

    first: int
    num_drafts: int
    num_accepted: int

    @property
    def end(self) -> int:
        """Index after the last token that it emitted."""
        return self.first + self.num_accepted + 1


@dataclass(slots=True)
class Trace:
    """The answer to one request, window by window.

    Attributes:
        request: its id.
        token_ids: of the answer, cut at its length; empty where only texts are known.
        windows: in order.
    """

    request: str
    token_ids: list[int] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], num_drafts: int, num_accepted: int) -> None:
        """Note one step, of which ``token_ids`` count."""
        self.windows.append(Window(len(self.token_ids), num_drafts, num_accepted))
        self.token_ids.extend(token_ids)

    def as_json(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Values that JSON knows; ``texts`` has one entry per token."""
        return {
            "request": self.request,
            "token_ids": list(self.token_ids),
            "texts": token_texts(self.token_ids, tokenizer),
            "windows": [asdict(window) for window in self.windows],
        }


def token_texts(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """One text per token that add up to the decoding of the whole; ids without a tokenizer.

    A character of several tokens stands with the last of them.
    """
    if tokenizer is None:
        return [f"{token_id} " for token_id in token_ids]
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=False)
    texts = [detokenizer.append(token_id) for token_id in token_ids]
    if texts:
        texts[-1] += detokenizer.finish()
    return texts
