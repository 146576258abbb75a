"""Branches of ``oneOf``, which must exclude each other: the compiler takes them for ``anyOf``.

Types and listed values tell them apart, their own or those of a property that all require.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import combinations
from typing import Any

from sametoken.errors import RequestError

#: Pairs of branches that must be compared with each other.
MAX_PAIRS = 10_000


def disjoint(branches: list[Any]) -> bool:
    """Whether types and constants prove that no value satisfies two branches.

    In place of references stand their targets.

    Raises:
        RequestError: too many pairs would have to be compared.
    """
    groups = _similar(branches)
    num_pairs = sum(math.comb(len(group), 2) for group in groups)
    if num_pairs > MAX_PAIRS:
        raise RequestError(
            f"json_schema: oneOf has {num_pairs} pairs of branches that look alike",
            "use anyOf, or fewer",
        )
    pairs = (pair for group in groups for pair in combinations(group, 2))
    return all(are_disjoint(one, other) for one, other in pairs)


def _similar(branches: list[Any]) -> list[list[Any]]:
    """Group the branches so that two without a common group are disjoint.

    They differ by type, by value, or by the value of a property that all require.
    """
    if not all(isinstance(branch, dict) for branch in branches):
        return [branches]
    groups = _refined([branches], named_types)
    groups = _refined(groups, listed_values)
    for name in _required_by_all(branches):
        groups = _refined(groups, partial(_values_of_property, name))
    return groups


def _refined(
    groups: list[list[Any]], keys_of: Callable[[Any], Iterable[str] | None]
) -> list[list[Any]]:
    """Split each group by the keys of its members, unless a member has none."""
    refined: list[list[Any]] = []
    for group in groups:
        keys = [keys_of(branch) for branch in group]
        if not all(keys):
            refined.append(group)
            continue
        by_key: dict[str, list[Any]] = {}
        for branch, some in zip(group, keys, strict=True):
            for key in some or ():
                by_key.setdefault(key, []).append(branch)
        refined += [alike for alike in by_key.values() if len(alike) > 1]
    return refined


def _required_by_all(branches: list[Any]) -> list[str]:
    """Properties that all branches require, if all are objects."""
    if not branches or any(named_types(branch) != {"object"} for branch in branches):
        return []
    return sorted(set.intersection(*(set(branch.get("required", ())) for branch in branches)))


def _values_of_property(name: str, schema: Mapping[str, Any]) -> set[str] | None:
    found = schema.get("properties", {}).get(name)
    return listed_values(found) if isinstance(found, dict) else None


def are_disjoint(one: Any, other: Any) -> bool:
    """The same of two branches."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    types, other_types = named_types(one), named_types(other)
    if types and other_types and not types & other_types:
        return True
    values, other_values = listed_values(one), listed_values(other)
    if values is not None and other_values is not None and not values & other_values:
        return True
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    return types == other_types == {"object"} and any(
        are_disjoint(*(branch.get("properties", {}).get(name) for branch in (one, other)))
        for name in sorted(shared)
    )


def named_types(schema: Mapping[str, Any]) -> set[str]:
    """Type names, with "number" for integers; empty if the schema has no type."""
    found = schema.get("type", [])
    names = [found] if isinstance(found, str) else found
    return {"number" if name == "integer" else name for name in names}


def listed_values(schema: Mapping[str, Any]) -> set[str] | None:
    """The values that a schema lists, as JSON text."""
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    if isinstance(schema.get("enum"), list):
        return {json.dumps(value, sort_keys=True) for value in schema["enum"]}
    return None
