"""Options of drafters that match text, checked on their face."""

from __future__ import annotations

from typing import Any

from sametoken.errors import ConfigError, shown

#: Methods that match text, and those before which such a match may go.
LOOKUPS = ("ngram", "suffix")
CASCADED = ("draft_model", "eagle", "eagle3", "mtp")

_SUFFIX_LIMITS = {
    "suffix_decoding_max_tree_depth": (1, 64),
    "suffix_decoding_max_cached_requests": (0, 2**20),
    "suffix_decoding_max_spec_factor": (0, 64),
    "suffix_decoding_min_token_prob": (0, 1),
}


def check_lookups(config: Any, most: int) -> None:
    """Refuse values that mean nothing, and methods that make no cascade.

    Args:
        config: a ``SpeculativeConfig``.
        most: drafts that a window may hold.

    Raises:
        ConfigError: naming the key and what fits.
    """
    for name, (low, high) in _SUFFIX_LIMITS.items():
        value = getattr(config, name)
        if not low <= value <= high:
            raise ConfigError(f"{name}={shown(value)} is not possible", f"use {low} to {high}")
    if config.cascade is not None:
        _check_cascade(config, most)
    elif config.cascade_model_tokens is not None:
        raise ConfigError("cascade_model_tokens is set without a cascade", 'set "cascade"')


def _check_cascade(config: Any, most: int) -> None:
    lookup, method = config.cascade, config.method
    if lookup not in LOOKUPS or method not in CASCADED:
        raise ConfigError(
            f"cascade {shown(lookup)} with method {method!r} is not possible",
            f"put one of {LOOKUPS} before one of {CASCADED}",
        )
    longest = config.suffix_decoding_max_tree_depth if lookup == "suffix" else 64
    if not 1 <= config.cascade_min_match <= longest:
        raise ConfigError(
            f"cascade_min_match={shown(config.cascade_min_match)} is not possible",
            f"use an integer from 1 to {longest}",
        )
    own, num_tokens = config.num_model_tokens, config.num_speculative_tokens
    if not own <= num_tokens <= most:
        raise ConfigError(
            f"num_speculative_tokens={num_tokens} and cascade_model_tokens={own} are not possible",
            f"use 1 <= cascade_model_tokens <= num_speculative_tokens <= {most}",
        )
