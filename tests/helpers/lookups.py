"""Lookup drafters with the options of a test."""

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
