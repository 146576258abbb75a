"""Regular expressions: what the grammar compiler ignores is refused, what it misreads rewritten."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sametoken.errors import RequestError, shown

#: Letters and digits that form a complete escape.
_KNOWN = frozenset("0DSWdefnrstvw")
#: Punctuation that the compiler accepts after a backslash without a warning.
_MARKS = frozenset("\"$'()*+-./?[\\]^{|}")
_ESCAPED = r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|c[a-zA-Z]|.)"
_PART = re.compile(_ESCAPED + r"|[\[\]^$.]|\(\?(?:<?[=!]|P?<[^\W\d]\w*>)|[^\x00-\x7f]", re.DOTALL)
_CODE = re.compile(r"(?:x|u00|u\{0*)([0-9a-fA-F]{1,2})\}?|c([a-zA-Z])")
#: What the compiler writes as \xNN. In a class it then reads digits that follow as part of NN.
_SHORT = re.compile(r"[\x01-\x08\x0e-\x1f\x7f-\xff]")
#: A class that begins with an escaped ^, which the compiler would take for a negation.
_CARET = r"\\(?:\^|x5[eE]|u005[eE]|u\{0*5[eE]\})"
_CARET_FIRST = re.compile(rf"\[{_CARET}(?>{_CARET}|\^)*+(?P<rest>(?>[^\]\\]|\\.)*+)\]", re.DOTALL)
#: A point in the compiler's own words: to it, one would be a line break too.
_POINT = r"[^\n\r\u2028\u2029]"
# Comments, literals and character classes of a grammar, whose content is not grammar syntax.
_GRAMMAR_PART = re.compile(
    r'#[^\n]*+|(?P<regex>\bRegex\s*+\(\s*+)?"(?P<text>(?>[^"\\\n]|\\.)*+)"'
    r"|\[(?P<class>(?>[^\]\\\n]|\\.)*+)\](?P<rule>\s*+::=)?"
)


def check_regex(pattern: str) -> None:
    """Refuse an expression that is only partly supported.

    A text must match as a whole, so ``^`` at the start and ``$`` at the end are redundant.

    Raises:
        RequestError: it has another anchor, a lookaround, or an unknown escape.
    """
    for found, in_class in _parts(pattern):
        part, escaped = found[0], found[1]
        if escaped is not None:
            _check_escape(escaped, in_class)
        elif part in ("(?=", "(?!", "(?<=", "(?<!"):
            kind = "lookbehind" if "<" in part else "lookahead"
            raise _refused(f"the {kind} {part}", "list the allowed texts")
        elif part in "^$" and not _is_redundant(found):
            raise _refused(f"the anchor {part} within it", "leave it out, or escape it")


def check_grammar(text: str) -> None:
    """Refuse a grammar in another form than GBNF, or with parts that the compiler would ignore.

    Raises:
        RequestError: it has no rule, holds an unsupported regular expression, or a rule has an
            attribute.
    """
    if "::=" not in text:
        raise RequestError(
            "structured_outputs grammar has no rule in GBNF form, and Lark is not read",
            "write rules as NAME ::= ..., of which root is the whole text",
        )
    for found in _GRAMMAR_PART.finditer(text):
        if found["rule"]:
            raise RequestError(
                f"structured_outputs grammar: a rule has the attribute {shown(found['class'])}, "
                "which is not supported",
                "leave it out",
            )
        if found["regex"]:
            check_regex(found["text"].replace("\\\\", "\\"))


def plain_regex(pattern: str, *, in_schema: bool = False) -> str:
    """An equal expression, of parts that the compiler reads as they are meant.

    In a schema it is in ASCII: beyond, the compiler would not escape what it matches.
    """
    pattern = _replaced(pattern, _carets_apart(pattern))
    plain = (
        (found, _plain(found, as_is=in_class and not in_schema))
        for found, in_class in _parts(pattern)
    )
    return _replaced(pattern, plain)


def _replaced(pattern: str, parts: Iterable[tuple[re.Match[str], str]]) -> str:
    """The expression with a text in the place of each part, in their order."""
    place, pieces = 0, list[str]()
    for found, text in parts:
        pieces += pattern[place : found.start()], text
        place = found.end()
    return "".join((*pieces, pattern[place:]))


def _carets_apart(pattern: str) -> Iterator[tuple[re.Match[str], str]]:
    """Classes that begin with an escaped ^, and what to write for each."""
    for part, _ in _parts(pattern):
        found = _CARET_FIRST.match(pattern, part.start()) if part[0] == "[" else None
        if found is not None:
            rest = found["rest"]
            # A range from ^ on goes on behind it.
            others = f"_{rest}" if rest[:1] == "-" and len(rest) > 1 else rest
            yield found, rf"(?:\^|[{others}])" if others else r"\^"


def _parts(pattern: str) -> Iterator[tuple[re.Match[str], bool]]:
    """Escapes, and whether each is in a character class; marks outside of classes."""
    in_class = False
    for found in _PART.finditer(pattern):
        if found[1] is not None or not found[0].isascii():
            yield found, in_class
        elif found[0] == "]":
            in_class = False
        elif not in_class:
            in_class = found[0] == "["
            yield found, False


def _is_redundant(anchor: re.Match[str]) -> bool:
    is_start, is_end = anchor.start() == 0, anchor.end() == len(anchor.string)
    return is_start if anchor[0] == "^" else is_end


def _check_escape(escaped: str, in_class: bool) -> None:
    is_known = escaped in _KNOWN or len(escaped) > 1 or (in_class and escaped == "b")
    if _is_word(escaped) and not is_known:
        raise _refused(rf"the escape \{escaped}", "write the characters that it stands for")


def _plain(found: re.Match[str], *, as_is: bool) -> str:
    escaped: str | None = found[1]
    character = found[0] if escaped is None else _CODE.sub(_character, escaped)
    if as_is and _SHORT.fullmatch(character):
        return character
    if escaped is None:
        # The compiler knows no names of groups with digits or underscores.
        plain = {".": _POINT}.get(found[0], "(" if found[0][-1] == ">" else found[0])
        return plain if plain.isascii() else _escape(plain)
    if escaped[0] == "x" and len(escaped) > 1:
        # The compiler reads digits that follow \x.. as part of the number.
        return rf"\u00{escaped[1:]}"
    if escaped in _MARKS or _is_word(escaped[0]):
        return found[0]
    # As a code point: a bare comma could become part of a repetition.
    return rf"\u{ord(escaped):04x}" if escaped.isascii() else _escape(escaped)


def _character(code: re.Match[str]) -> str:
    return chr(int(code[1], 16) if code[1] else ord(code[2]) % 32)


def _escape(character: str) -> str:
    return rf"\u{{{ord(character):x}}}"


def _is_word(escaped: str) -> bool:
    return escaped.isascii() and escaped[0].isalnum()


def _refused(part: str, remedy: str) -> RequestError:
    return RequestError(
        f"structured_outputs: a regular expression has {part}, which is not supported", remedy
    )
