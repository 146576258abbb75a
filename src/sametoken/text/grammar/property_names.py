"""Which properties of a JSON Schema a pattern of names applies to.

The compiler takes one schema for each property. By JSON Schema all that apply to a name hold, and a
pattern applies where it is found in a name, so what differs there is refused.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sametoken.text.grammar.one_of import listed_values

#: What a pattern with ``^`` begins every name with.
_FIXED = re.compile(r"\^([^\\.\[\](){}*+?|^$]*)(?![*?+{])")
#: Where a search has a choice, repeats a group, and counts far.
_REPEATED, _GROUPS, _FAR = (re.compile(one) for one in (r"[*+?{]", r"\)[*+{]", r"[{,]\d{4}"))
#: Ways that a search may try, as a power of 2: no other thread runs meanwhile.
_MOST_WAYS = 20
#: Keywords of a schema of names that can be compared with a name; a format only annotates.
_OF_NAMES = frozenset(("type", "enum", "const", "minLength", "maxLength", "pattern", "format"))


class Clash(NamedTuple):
    """Two that may apply to one name, and whose schemas differ.

    Attributes:
        pattern: of names.
        other: a property, another pattern, or the keyword for all other properties.
    """

    pattern: str
    other: str


def find_clash(
    schema: Mapping[str, Any], others: tuple[str, ...], meaningful: frozenset[str]
) -> Clash | None:
    """The first clash of a schema's ``patternProperties``, if there is one.

    ``others`` are the keywords for properties without a name, ``meaningful`` those that do not only
    annotate.
    """
    patterns = schema.get("patternProperties", {})
    asked = {pattern: _asked(one, meaningful) for pattern, one in patterns.items()}
    for one, other in itertools.combinations(patterns, 2):
        if asked[one] != asked[other] and not _apart(one, other):
            return Clash(one, other)
    properties = schema.get("properties", {})
    for pattern, name in itertools.product(patterns, properties):
        if asked[pattern] != _asked(properties[name], meaningful) and _applies(
            pattern, name, is_any=asked[pattern] == {}
        ):
            return Clash(pattern, name)
    # Without properties the compiler allows no names but those of the patterns.
    for key in others if properties else ():
        if schema.get(key, False) is not False:
            for pattern in patterns:
                if asked[pattern] != _asked(schema[key], meaningful):
                    return Clash(pattern, key)
    return None


def admits(names: Any, name: str, meaningful: frozenset[str]) -> bool:
    """Whether a schema of names says plainly that a property's name is one.

    ``names`` has the target of a reference in its place; ``meaningful`` is as for ``find_clash``.
    """
    if not isinstance(names, dict):
        return names is True
    asked, values = _asked(names, meaningful), listed_values(names)
    least, most = asked.get("minLength", 0), asked.get("maxLength", len(name))
    pattern = asked.get("pattern", "")
    return (
        asked.keys() <= _OF_NAMES
        and "string" in asked.get("type", "string")
        and (values is None or json.dumps(name) in values)
        and isinstance(least, int)
        and isinstance(most, int)
        and least <= len(name) <= most
        and not _is_long(pattern, len(name))
        and _applies(pattern, name, is_any=False)
    )


def _asked(schema: Any, meaningful: frozenset[str]) -> Any:
    """What a schema asks of a value."""
    if isinstance(schema, dict):
        return {key: value for key, value in schema.items() if key in meaningful}
    return {} if schema is True else schema


def _applies(pattern: str, name: str, *, is_any: bool) -> bool:
    """Whether a pattern may apply to a name; one of any value, whether the compiler makes it so."""
    if _is_long(pattern, len(name)):
        return True
    try:
        known = re.compile(pattern.replace("(?<", "(?P<"), re.ASCII)
    except re.error:
        return True
    return (known.fullmatch(name) if is_any else known.search(name)) is not None


def _is_long(pattern: str, num_characters: int) -> bool:
    """Whether a search of a name may go back so often that it does not end soon."""
    parts = pattern.replace("(?", "(")
    num_repeats, num_others = len(_REPEATED.findall(parts)), parts.count("|")
    if _FAR.search(parts) or (_GROUPS.search(parts) and num_repeats + num_others > 1):
        return True
    return (num_repeats + 1) * math.log2(num_characters + 1) + num_others > _MOST_WAYS


def _apart(one: str, other: str) -> bool:
    """Whether no name has both patterns, as far as their beginnings tell."""
    first, second = _beginning(one), _beginning(other)
    return not (first.startswith(second) or second.startswith(first))


def _beginning(pattern: str) -> str:
    found = None if "|" in pattern else _FIXED.match(pattern)
    return found[1] if found else ""
