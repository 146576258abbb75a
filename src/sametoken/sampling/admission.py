"""Checks on a request's logits options before it is admitted to a slot."""

from __future__ import annotations

from sametoken.errors import RequestError
from sametoken.types.sampling_params import SamplingParams


def require_choosable(
    params: SamplingParams,
    vocab_size: int,
    stop_token_ids: tuple[int, ...],
    bad_words_token_ids: tuple[tuple[int, ...], ...],
) -> None:
    """Refuse bad words outside the vocabulary and masks that leave no token to choose.

    The ids in ``params`` are of the vocabulary: whoever calls this has checked them.

    Raises:
        RequestError: an id of a bad word is not in 0..vocab_size-1, or allowed ids, bad words of
            one token and ``min_tokens`` together forbid every token.
    """
    allowed, words = params.allowed_token_ids, bad_words_token_ids
    for token_id in (token_id for word in words for token_id in word):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"bad_words names token id {token_id}, which is not in the vocabulary",
                f"use ids from 0 to {vocab_size - 1}",
            )
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
