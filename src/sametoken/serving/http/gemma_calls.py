"""An incremental parser of tool calls of Gemma 4.

Gemma 4 writes a call as an object whose keys have no quotes, and whose texts have a mark for
them::

    <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:[1,true,{KEY:null}]}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from sametoken.serving.http.json_spans import scalar, skip_space
from sametoken.serving.http.marked_calls import marked_parser
from sametoken.serving.http.parsed import FoundCall, num_safe

_START, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA_MARKS = (_START, _END, _QUOTE)
_HEAD = re.compile(r"\s*(?:call)?:\s*([^\s{}<:]+)\s*(?={)")
_TOKEN = re.compile(
    rf"{re.escape(_QUOTE)}(?P<text>.*?){re.escape(_QUOTE)}"
    r"|(?P<mark>[{}\[\],:])|(?P<bare>[^{}\[\],:<]+)",
    re.DOTALL,
)
#: The template writes null in Python's form.
_WORDS = {"None": "null"}


class _GemmaSyntax:
    """See ``Syntax``."""

    def find_opening(self, text: str, place: int) -> tuple[int, int] | None:
        """See ``Syntax``."""
        start = text.find(_START, place)
        return None if start < 0 else (start, start + len(_START))

    def find_end(self, text: str, begun: tuple[int, int]) -> tuple[int, int, bool]:
        """See ``Syntax``."""
        _, body = begun
        head = _HEAD.match(text, body)
        place, is_closed = body, False
        if head is not None:
            _, place, is_closed = _read(text, head.end(), is_whole=False)
        if not is_closed:
            end = text.find(_END, place)
            # In a text without an end, the mark counts unless the end may still come.
            is_final = end >= 0 and not text.startswith(_QUOTE, place)
            return end, end + len(_END) if end >= 0 else -1, is_final
        follows = skip_space(text, place)
        if text.startswith(_END, follows):
            return place, follows + len(_END), True
        return place, place, not _END.startswith(text[follows : follows + len(_END)])

    def calls_in(self, body: str, is_whole: bool) -> Sequence[FoundCall]:
        """See ``Syntax``."""
        head = _HEAD.match(body)
        if head is None:
            return ()
        return (FoundCall(head[1], _read(body, head.end(), is_whole=is_whole)[0]),)

    def num_inside(self, text: str) -> int:
        """See ``Syntax``."""
        return num_safe(text, _END)

    def num_outside(self, text: str) -> int:
        """See ``Syntax``."""
        return num_safe(text, _START)


def _read(text: str, place: int, *, is_whole: bool) -> tuple[str, int, bool]:
    """The object at a place as JSON so far, up to where it was read, and whether that is its end.

    Texts grow. Any other value is known once something follows it, as it may be a key.
    """
    written, depth = [], 0
    while token := _TOKEN.match(text, place):
        if token["bare"] is not None and token.end() == len(text) and not is_whole:
            break
        place = token.end()
        written.append(_as_json(token, is_key=text.startswith(":", place)))
        depth += (token["mark"] in ("{", "[")) - (token["mark"] in ("}", "]"))
        if depth == 0:
            return "".join(written), place, True
    if text.startswith(_QUOTE, place):
        rest = text[place + len(_QUOTE) :]
        quoted = json.dumps(
            rest if is_whole else rest[: num_safe(rest, _QUOTE)], ensure_ascii=False
        )
        written.append(quoted if is_whole else quoted[:-1])
    return "".join(written), place, False


def _as_json(token: re.Match[str], *, is_key: bool) -> str:
    if token["mark"] is not None:
        return {",": ", ", ":": ": "}.get(token["mark"], token["mark"])
    if token["text"] is not None:
        return json.dumps(token["text"], ensure_ascii=False)
    bare = token["bare"].strip()
    if is_key and bare:
        return json.dumps(bare, ensure_ascii=False)
    return scalar(bare, _WORDS) if bare else bare


#: See the module.
parse_gemma4 = marked_parser(_GemmaSyntax())
