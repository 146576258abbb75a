"""An incremental parser of tool calls that a model writes as Python's.

OLMo 3 writes calls between two tags, each on a line of its own::

    <function_calls>NAME(KEY="TEXT", KEY=[1, True, null])
    NAME()</function_calls>

Texts have quotes of either kind, and words are Python's or JSON's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from sametoken.serving.http.json_spans import scalar
from sametoken.serving.http.marked_calls import TagSyntax, marked_parser
from sametoken.serving.http.parsed import FoundCall

OLMO_TAGS = ("<function_calls>", "</function_calls>")
#: All arguments are keywords: what has others is no call.
_HEAD = re.compile(r"[\s,]*+([^\W\d][\w.-]*+)(?=\(\s*(?:\)|[^\W\d]\w*\s*=))")
#: What follows a text. A quote before anything else is the text's own, as some templates escape
#: none.
_FOLLOWS = r"\s*[,)\]}:]"
# Possessive quantifiers do not backtrack, so the time is linear in the text. Their group is atomic:
# before Python 3.11.5 another goes on from where it failed.
_TEXT = (
    r"(?P<quote>[\"'])(?P<text>(?>(?!(?P=quote))[^\\]|\\(?:[^u]|u(?![0-9a-fA-F]{0,3}\Z))"
    rf"|(?P=quote)(?!\s*\Z|{_FOLLOWS}))*+)(?P<end>(?P=quote)(?={_FOLLOWS}))?"
)
_TOKEN = re.compile(
    rf"\s*+(?P<comma>,)?+\s*+(?:{_TEXT}|(?P<key>[^\W\d]\w*+)\s*+="
    r"|(?P<opening>[{\[(])|(?P<closing>[}\])])|(?P<colon>:)"
    r"|(?P<bare>[^\s{}\[\](),:=\"'<]++)(?P<last>\s*+\Z)?)",
    re.DOTALL,
)
#: What JSON has too, what it has without the backslash, and what it escapes.
_PIECE = re.compile(r'\\(?:u[0-9a-fA-F]{4}|["\\bfnrt])|\\\'|[\\"\x00-\x1f]')
_WORDS = {"True": "true", "False": "false", "None": "null"}
_OBJECT, _LIST = ("{", "}"), ("[", "]")


def _read_calls(text: str, place: int, *, is_whole: bool) -> tuple[list[FoundCall], int, bool]:
    """The consecutive calls from a place on, up to where they were read, and whether in a text."""
    calls, is_open = list[FoundCall](), False
    while not is_open and (head := _HEAD.match(text, place)) is not None:
        arguments, place, is_open = _read_arguments(text, head.end(), is_whole=is_whole)
        calls.append(FoundCall(head[1], arguments))
    return calls, place, is_open


def _read_arguments(text: str, place: int, *, is_whole: bool) -> tuple[str, int, bool]:
    """The arguments at a place as JSON so far, up to where they were read, and whether in a text.

    Texts grow. Any other value is known once something follows it, as it may be a key.
    """
    written, closing = list[str](), list[str]()
    while (token := _TOKEN.match(text, place)) is not None:
        if token["last"] is not None and not is_whole:
            break
        if token["comma"] is not None and token["closing"] is None:
            written.append(", ")
        if token["quote"] is not None and token["end"] is None:
            written.append(_open_text(text, token, is_whole=is_whole))
            return "".join(written), place, True
        place = token.end()
        written.append(_as_json(token, closing))
        if not closing:
            break
    return "".join(written), place, False


def _as_json(token: re.Match[str], closing: list[str]) -> str:
    """A token as JSON.

    Args:
        token: the token.
        closing: closes what is open, the innermost last; changed by the token.
    """
    if token["opening"] is not None:
        is_object = token["opening"] == "{" or not closing
        opened, closed = _OBJECT if is_object else _LIST
        closing.append(closed)
        return opened
    if token["closing"] is not None:
        return closing.pop()
    if token["quote"] is not None:
        return f'"{_escaped(token["text"])}"'
    if token["key"] is not None:
        return f"{json.dumps(token['key'], ensure_ascii=False)}: "
    return ": " if token["colon"] is not None else scalar(token["bare"], _WORDS)


def _open_text(text: str, token: re.Match[str], *, is_whole: bool) -> str:
    """A text without an end, as JSON so far."""
    rest = text[token.end() :]
    if not is_whole:
        return f'"{_escaped(token["text"])}'
    return f'"{_escaped(token["text"] + ("" if rest.startswith(token["quote"]) else rest))}"'


def _escaped(text: str) -> str:
    """A text between Python's quotes, as it is between JSON's."""

    def piece(found: re.Match[str]) -> str:
        if len(found[0]) == 1:
            return json.dumps(found[0])[1:-1]
        return "'" if found[0] == "\\'" else found[0]

    return _PIECE.sub(piece, text)


def _find_outside_texts(text: str, mark: str, start: int) -> tuple[int, bool]:
    """Where the first mark outside of calls' texts is, and whether that is final."""
    _, place, is_open = _read_calls(text, start, is_whole=False)
    return text.find(mark, place), not is_open


def _calls_in(body: str, is_whole: bool) -> Sequence[FoundCall]:
    return _read_calls(body, 0, is_whole=is_whole)[0]


#: See the module. A call is reported once its first argument, or its end, begins.
parse_olmo3 = marked_parser(TagSyntax(_calls_in, _find_outside_texts, OLMO_TAGS[:1], OLMO_TAGS[1]))
