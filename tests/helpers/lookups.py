"""Lookup drafters with the options of a test, and a slow reading of what they find."""

from __future__ import annotations

from functools import partial

from helpers.suffixes import Options
from sametoken.drafters.lookup import LookupDrafter
from sametoken.ops.lookup import ngram, suffix
from sametoken.state.sequences import NO_HISTORY, TokenHistory


def ngram_drafter(k, shortest=1, longest=3, lookup=ngram.lookup, kind=LookupDrafter):
    return kind(partial(lookup, min_length=shortest, max_length=longest, k=k))


def suffix_drafter(options: Options, history: TokenHistory = NO_HISTORY) -> LookupDrafter:
    earlier = suffix.Earlier(history.texts, history.lengths)
    return LookupDrafter(partial(suffix.search, earlier=earlier, limits=options.tables()))


def slow_lookup(tokens: list[int], shortest: int, longest: int, k: int) -> list[int]:
    n = len(tokens)
    for length in range(min(longest, n - 1), shortest - 1, -1):
        for start in range(n - length):
            if tokens[start : start + length] == tokens[n - length :]:
                return tokens[start + length : min(start + length + k, n)]
    return []
