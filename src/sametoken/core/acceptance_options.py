"""How drafts are judged, checked on its face."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from sametoken.errors import ConfigError, shown

KEYED, SYNTHETIC = "keyed", "synthetic"
# vLLM's and others' methods, under which speculation changes tokens.
_CHANGES_TOKENS = ("standard", "strict", "probabilistic", "block", "fly")


def check_acceptance(config: Any) -> None:
    """Refuse methods that change tokens, and acceptance that is not or wrongly described.

    Args:
        config: a ``SpeculativeConfig``.

    Raises:
        ConfigError: naming the key and what fits.
    """
    method = config.rejection_sample_method
    if method in _CHANGES_TOKENS:
        raise ConfigError(
            f"rejection_sample_method {method!r} is not offered: its output would differ from "
            "plain decoding",
            f"use {KEYED!r}, which emits the very tokens of plain decoding",
        )
    if method not in (KEYED, SYNTHETIC):
        raise ConfigError(
            f"rejection_sample_method {shown(method)} is not known",
            f"use {KEYED!r} or {SYNTHETIC!r}",
        )
    rates, length = config.synthetic_acceptance_rates, config.synthetic_acceptance_length
    num_given = (rates is not None) + (length is not None)
    if method == KEYED and num_given:
        raise ConfigError(
            "synthetic acceptance was described, but drafts are judged by keyed sampling",
            f'set "rejection_sample_method": "{SYNTHETIC}" to measure times, or leave it out',
        )
    if method == SYNTHETIC and num_given != 1:
        raise ConfigError(
            f"synthetic acceptance needs one description, {num_given} were given",
            "give synthetic_acceptance_rates or synthetic_acceptance_length",
        )
    if rates is not None:
        _check_rates(rates, config.num_speculative_tokens)
    most = config.num_speculative_tokens + 1
    if length is not None and not 1 <= length <= most:
        raise ConfigError(
            f"synthetic_acceptance_length={shown(length)} is not possible",
            f"use a number from 1 to {most}, the drafts and the target's own token",
        )


def _check_rates(rates: Sequence[float], num_drafts: int) -> None:
    falls = all(a >= b for a, b in itertools.pairwise(rates))
    if not rates or not falls or not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(
            f"synthetic_acceptance_rates={shown(list(rates))} are not possible",
            "give numbers from 0 to 1, none above the one before it",
        )
    if len(rates) > num_drafts:
        raise ConfigError(
            f"{len(rates)} synthetic_acceptance_rates were given for {num_drafts} drafts",
            "give one per draft at most",
        )
