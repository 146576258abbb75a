"""Strings of bounded length in the compiler's grammars of JSON schemas.

The compiler gives them no escapes, and control characters, which are no JSON.
"""

from __future__ import annotations

import json
import re

#: The compiler's class of their characters, the rule of one, and where a rule is repeated.
_CLASS = r"[^\"\\\r\n]"
_RULE = re.compile(rf"^(\S+) ::= \(\({re.escape(_CLASS)}\)\)$", re.MULTILINE)
_PART = re.compile(
    r'(?P<class>\[(?>[^\]\\]|\\.)*+\])|"(?>[^"\\]|\\.)*+"'
    r"|(?<![^\s(){}])(?P<rule>[^\s(){}]++)\{(?P<least>\d+), (?P<most>-?\d+)\}"
)
#: What every character of a longer string is: none that JSON has to escape.
_UNESCAPED = r"[^\0-\x1f\"\\]"

#: A character as JSON writes it: itself, an escape, or the two halves of a surrogate pair.
_HEX = "[0-9A-Fa-f]"
_PAIR = rf"[Dd][89ABab]{_HEX}{{2}}\\u[Dd][C-Fc-f]{_HEX}{{2}}"
_CODE = rf"u([0-9A-CE-Fa-ce-f]{_HEX}{{3}}|[Dd][0-7]{_HEX}{{2}}|{_PAIR})"
_CHARACTER = rf'([^\u0000-\u001f"\\]|\\(["\\/bfnrt]|{_CODE}))'
#: Characters up to which the compiler decides tokens at each place beforehand. Of longer ones each
#: mask would take 60 ms with a vocabulary of 150,000.
MAX_COUNTED = 128


def with_escapes(grammar: str) -> str:
    """The grammar with strings of bounded length as JSON has them: an escape is one character.

    Those with a bound above ``MAX_COUNTED`` have no escapes.
    """
    counted = set(_RULE.findall(grammar))
    prefix = "string"
    while prefix in grammar:
        prefix += "_"
    names: dict[str, str] = {}

    def named(times: str) -> str:
        """Strings of one length share a rule."""
        return names.setdefault(times, f"{prefix}{len(names)}")

    def replaced(found: re.Match[str]) -> str:
        if found["class"] == _CLASS:
            return named("")
        if found["rule"] in counted:
            least, most = int(found["least"]), int(found["most"])
            if max(least, most) <= MAX_COUNTED:
                return named(f"{{{least},{most if most >= 0 else ''}}}")
        return found[0]

    unescaped = _RULE.sub(lambda found: f"{found[1]} ::= (({_UNESCAPED}))", grammar)
    body = _PART.sub(replaced, unescaped)
    rules = (
        f"{name} ::= Regex({json.dumps(_CHARACTER + times)})\n" for times, name in names.items()
    )
    return body + "".join(rules)
