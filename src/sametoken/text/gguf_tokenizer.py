"""A GGUF file's tokenizer, built from the file's metadata.

transformers' own conversion takes seconds and drops ``tokenizer.ggml.pre``: indented numbers then
get other tokens than the model was trained on (tests/unit/text/test_tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from sametoken.errors import CheckpointError, UnsupportedError

_CONTROL, _USER_DEFINED = 3, 4

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
#: Of Mistral's tekken: a word ends before a capital, and digits stand alone.
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PreTokenizer: TypeAlias = Callable[[], Any]


def build_gguf_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that a GGUF header describes.

    Raises:
        CheckpointError: the vocabulary or the merges are missing.
        UnsupportedError: another kind of tokenizer, or an unknown pre-tokenizer.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedError(
            f"GGUF tokenizer model {kind!r} is not supported",
            "give a Hugging Face tokenizer directory as tokenizer",
        )
    split = metadata.get("tokenizer.ggml.pre")
    if split not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"GGUF pre-tokenizer {split!r} is not supported (known: {', '.join(_PRE_TOKENIZERS)})",
            "give a Hugging Face tokenizer directory as tokenizer",
        )
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise CheckpointError("the GGUF file holds no vocabulary or no merges", "convert it again")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    ignore_merges = split in _WHOLE_WORDS
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    _add_special_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", []))
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    # Converters may leave the key out, and llama.cpp then begins these texts with the token.
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", split in _WHOLE_WORDS)
    if adds_bos and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    for token, kind in zip(tokens, kinds, strict=False):
        added = AddedToken(token, special=kind == _CONTROL, normalized=False)
        if kind == _CONTROL:
            tokenizer.add_special_tokens([added])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([added])


def _by_pattern(pattern: str) -> PreTokenizer:
    def build() -> Any:
        words = pre.Split(Regex(pattern), "isolated")
        return pre.Sequence([words, pre.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _gpt2() -> Any:
    return pre.ByteLevel(add_prefix_space=False)


def _digits_apart() -> Any:
    return pre.Sequence([pre.Digits(individual_digits=True), _gpt2()])


LLAMA_3, TEKKEN = "llama-bpe", "tekken"
_LLAMA_3 = (LLAMA_3, "llama3", "llama-v3")
#: Vocabularies whose whole words are not merged from parts.
_WHOLE_WORDS = (*_LLAMA_3, TEKKEN)
_PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _gpt2,
    "smollm": _digits_apart,
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _by_pattern(_WORDS % r"\p{N}")),
    **dict.fromkeys(_LLAMA_3, _by_pattern(_WORDS % r"\p{N}{1,3}")),
    TEKKEN: _by_pattern(_TEKKEN_WORDS),
}


def pre_tokenizer(name: str) -> Any:
    """What splits texts into words, by its name in GGUF files."""
    return _PRE_TOKENIZERS[name]()
