"""A SentencePiece vocabulary of a GGUF file: pieces, and a score for each, or merges.

The two neighbours become one whose piece has the highest score, the first of equals, until none is
left; what is no piece becomes bytes. Merges by rank say the same: a pair has the rank of its piece.
Gemma 4's files have them.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from sametoken.errors import CheckpointError

#: A space within a piece.
_SPACE = "▁"
#: Characters of a piece: several times those of any known vocabulary, as each gives a pair.
_LONGEST = 256
#: Kinds of tokens.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4


def sentencepiece_tokenizer(metadata: dict[str, Any], *, has_merges: bool) -> Tokenizer:
    """The tokenizer of such a vocabulary, without its special tokens.

    If merges are told, no space comes before a text, unless that is told too.

    Raises:
        CheckpointError: there are no merges, a piece has no score, or is too long.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("the GGUF file holds no vocabulary", "convert it again")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = metadata.get("tokenizer.ggml.merges")
    if has_merges:
        if merges is None:
            raise CheckpointError("the GGUF file holds no merges", "convert it again")
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    else:
        pairs = _pairs(_by_score(metadata, tokens), vocabulary)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocabulary, pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    begins = metadata.get("tokenizer.ggml.add_space_prefix", not has_merges)
    replaced = normalizers.Replace(" ", _SPACE)
    prepended = [normalizers.Prepend(_SPACE)] if begins else []
    tokenizer.normalizer = normalizers.Sequence([*prepended, replaced])
    stripped = [decoders.Strip(" ", 1, 0)] if begins else []
    whole = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*whole, *stripped])
    return tokenizer


def _by_score(metadata: dict[str, Any], tokens: list[str]) -> list[str]:
    """Pieces that are made of others, the highest score first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(
            "the GGUF file has not one score for each of its tokens", "convert it again"
        )
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    made = [
        (score, token)
        for token, score, kind in zip(tokens, scores, kinds, strict=False)
        if kind not in (CONTROL, USER_DEFINED)
    ]
    return [token for _, token in sorted(made, key=lambda one: -one[0])]


def _pairs(pieces: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of pieces that are one, in the order in which they become it."""
    pairs = []
    for piece in pieces:
        if len(piece) > _LONGEST:
            raise CheckpointError(
                f"a token of the GGUF file has {len(piece)} characters, more than {_LONGEST}",
                "download the file again",
            )
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                pairs.append((left, right))
    return pairs
