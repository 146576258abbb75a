"""Strings of bounded length in the compiler's grammars of JSON schemas.

The compiler gives them no escapes, and control characters, which are no JSON.
"""

from __future__ import annotations

import json
import re
from itertools import count

#: The compiler's class of their characters, rules of such a character, and where rules repeat one.
_CLASS = r"[^\"\\\r\n]"
_RULE = re.compile(rf"^(\S+) ::= \(\({re.escape(_CLASS)}\)\)$", re.MULTILINE)
_PART = re.compile(
    r'(?P<class>\[(?:[^\]\\]|\\.)*+\])|"(?:[^"\\]|\\.)*+"'
    r"|(?<![^\s(){}])(?P<rule>[^\s(){}]++)\{(?P<least>\d+), (?P<most>-?\d+)\}"
)

#: A character as JSON writes it: itself, an escape, or the two halves of a surrogate pair.
_HEX = "[0-9A-Fa-f]"
_PAIR = rf"[Dd][89ABab]{_HEX}{{2}}\\u[Dd][C-Fc-f]{_HEX}{{2}}"
_CODE = rf"u([0-9A-CE-Fa-ce-f]{_HEX}{{3}}|[Dd][0-7]{_HEX}{{2}}|{_PAIR})"
_CHARACTER = rf'([^\u0000-\u001f"\\]|\\(["\\/bfnrt]|{_CODE}))'
#: Characters of a rule. Tokens within a rule are decided when it is compiled, for each place in it;
#: those across its end are tried whenever a mask is filled.
_RUN = 32
#: Up to here the characters beyond the least are one rule: no mask is slow, but none is shared.
_SHORT = 64


def with_escapes(grammar: str) -> str:
    """The grammar with strings of bounded length as JSON has them: an escape is one character."""
    counted = set(_RULE.findall(grammar))
    strings = _Strings(grammar)

    def replaced(found: re.Match[str]) -> str:
        if found["class"] == _CLASS:
            return strings.rule("")
        if found["rule"] in counted:
            return strings.repeated(int(found["least"]), int(found["most"]))
        return found[0]

    return _PART.sub(replaced, grammar) + strings.rules()


class _Strings:
    """Rules of repeated characters, one for each repetition, which all strings share."""

    def __init__(self, grammar: str) -> None:
        prefixes = (f"string{n}_" for n in count())
        self._prefix = next(prefix for prefix in prefixes if prefix not in grammar)
        self._kinds: dict[str, str] = {}

    def rule(self, times: str) -> str:
        """The name of the rule of a character that is repeated so."""
        return self._kinds.setdefault(times, f"{self._prefix}{len(self._kinds)}")

    def rules(self) -> str:
        """All rules that have been named."""
        lines = (
            f"{name} ::= Regex({json.dumps(_CHARACTER + times)})\n"
            for times, name in self._kinds.items()
        )
        return "".join(lines)

    def repeated(self, least: int, most: int) -> str:
        """From ``least`` to ``most`` characters; -1: any number."""
        rest = [self.rule("*")] if most < 0 else self._up_to(most - least)
        return " ".join([*self._exactly(least), *rest])

    def _exactly(self, size: int) -> list[str]:
        num_runs, rest = divmod(size, _RUN)
        return [*self._runs(num_runs, num_runs), *([self.rule(f"{{{rest}}}")] if rest else [])]

    def _up_to(self, size: int) -> list[str]:
        """Whole runs and a part of one, or all of the runs and the rest."""
        if size <= _SHORT:
            return [self.rule(f"{{0,{size}}}")] if size else []
        num_runs, rest = divmod(size, _RUN)
        last = self._runs(num_runs, num_runs) + ([self.rule(f"{{0,{rest}}}")] if rest else [])
        part = [*self._runs(0, num_runs - 1), self.rule(f"{{0,{_RUN - 1}}}")]
        return [f"({' '.join(part)} | {' '.join(last)})"]

    def _runs(self, least: int, most: int) -> list[str]:
        return [f"{self.rule(f'{{{_RUN}}}')}{{{least},{most}}}"] if most else []
