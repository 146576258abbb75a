"""Checks on a request's logits options before it is admitted to a slot."""

from __future__ import annotations

from collections.abc import Iterable

from sametoken.errors import RequestError
from sametoken.types.sampling_params import SamplingParams


def require_choosable(
    params: SamplingParams,
    vocab_size: int,
    stop_token_ids: tuple[int, ...] = (),
    bad_words_token_ids: tuple[tuple[int, ...], ...] = (),
) -> None:
    """Refuse token ids outside the vocabulary and masks that leave no token to choose.

    Raises:
        RequestError: an id of ``logit_bias``, ``allowed_token_ids`` or a bad word is not in
            0..vocab_size-1, or allowed ids, bad words of one token and ``min_tokens``
            together forbid every token.
    """
    allowed = params.allowed_token_ids
    words = bad_words_token_ids
    _require_known("logit_bias", params.logit_bias or {}, vocab_size)
    _require_known("allowed_token_ids", allowed or (), vocab_size)
    _require_known("bad_words", (token for word in words for token in word), vocab_size)
    if not all(words):
        raise RequestError("a bad word has no tokens", "leave it out")

    forbidden = {word[0] for word in words if len(word) == 1}
    if params.min_tokens > 0:
        forbidden |= set(stop_token_ids)
    if forbidden.issuperset(range(vocab_size) if allowed is None else allowed):
        raise RequestError(
            "allowed_token_ids, bad_words and min_tokens together forbid every token",
            "allow a token that is neither a bad word nor, with min_tokens, a stop token",
        )


def _require_known(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name} names token id {token_id}, which is not in the vocabulary",
                f"use ids from 0 to {vocab_size - 1}",
            )
