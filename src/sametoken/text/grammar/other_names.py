"""Names of properties that a JSON schema does not name, in the compiler's grammars.

The compiler lets them be any but the properties', whose bytes it takes for characters of JSON. In
another spelling (``\\u0061`` is a), or with characters that are not ASCII or that JSON escapes, a
property could have what others may have, and some texts were no JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

#: The compiler's rule of such names, which begin by a quote; the rules of their beginnings; in one
#: of these a property's next character, and the beginning with it.
_NAMES = re.compile(r'^(\S+_addl_key) ::= \(\("\\"" (\1_\d+)\)\)', re.MULTILINE)
_BEGINNING = re.compile(r"^((\S+_addl_key)_\d+) ::= (.*)\n", re.MULTILINE)
_NEXT = re.compile(r'\("([^"\\]|\\x[0-9a-f]{2}|\\.)" (\S+_addl_key_\d+)\)')
_MAY_END = '(("\\"")'
#: What JSON has to escape.
_ESCAPED = re.compile(r'[\0-\x1f"\\]')


def with_other_names(grammar: str) -> str:
    """The grammar with other properties' names as JSON has them: no property's in any spelling.

    They have no escape while they may still become a property's name.
    """
    roots = dict(_NAMES.findall(grammar))
    rules = {rule: choices for rule, _, choices in _BEGINNING.findall(grammar)}
    body = _BEGINNING.sub(lambda found: "" if found[2] in roots else found[0], grammar)
    begun = _NAMES.sub(lambda found: f'{found[1]} ::= (("\\"" {found[1]}_0))', body)
    made = (_rules_of(family, root, rules) for family, root in roots.items())
    return begun + "".join(rule for several in made for rule in several)


def _rules_of(family: str, root: str, rules: Mapping[str, str]) -> Iterator[str]:
    """Rules ``family``_0 and so on of the names that are no property's, from the compiler's."""
    following: list[dict[str, int]] = [{}]
    excluded = set[int]()
    # A beginning by the compiler, by us, and the bytes of a character that is not whole.
    waiting = [(root, 0, b"")]
    while waiting:
        rule, place, pending = waiting.pop()
        if not pending and not rules[rule].startswith(_MAY_END):
            excluded.add(place)
        for written, further in _NEXT.findall(rules[rule]):
            read = pending + written.encode().decode("unicode_escape").encode("latin-1")
            character = read.decode(errors="ignore")
            if not character:
                waiting.append((further, place, read))
            elif not _ESCAPED.match(character):
                following[place][character] = len(following)
                waiting.append((further, len(following), b""))
                following.append({})
    for place, after in enumerate(following):
        choices = _choices(family, after, ends=place not in excluded)
        yield f"{family}_{place} ::= ({choices})\n"


def _choices(family: str, after: dict[str, int], *, ends: bool) -> str:
    """What may follow a beginning: the end, a name's next character, or another one."""
    codes = {rf"\U{ord(character):08x}": place for character, place in after.items()}
    return " | ".join(
        (
            *(['"\\""'] if ends else ()),
            *(f'"{code}" {family}_{place}' for code, place in codes.items()),
            rf"[^\0-\x1f\"\\{''.join(codes)}] basic_string_sub",
        )
    )
