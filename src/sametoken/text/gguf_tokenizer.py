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
from sametoken.text.gguf_pieces import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    sentencepiece_tokenizer,
)

#: SentencePiece's, by scores, and by merges.
_PIECES, _MERGED_PIECES = "llama", "gemma4"
_STRIP_NOT = ("<unk>", "<s>", "<|endoftext|>")

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Of Qwen3.5: marks belong to words.
_WORDS_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
#: Of Mistral's tekken: a word ends before a capital, and digits stand alone.
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Of o200k: the same, with an ending after a word, and up to three digits.
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Of Seed: a run of signs ends before a new line.
_SEED_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Of DeepSeek-V3, one after the other: numbers, ideographs and kana, words.
_DEEPSEEK_PARTS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)

PreTokenizer: TypeAlias = Callable[[], Any]


def build_gguf_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF header describes: byte-level BPE, or SentencePiece's.

    Raises:
        CheckpointError: the vocabulary, the merges or the scores are missing.
        UnsupportedError: another kind of tokenizer, or an unknown pre-tokenizer.
    """
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind not in ("gpt2", _PIECES, _MERGED_PIECES):
        raise UnsupportedError(
            f"GGUF tokenizer model {kind!r} is not supported",
            "give a Hugging Face tokenizer directory as tokenizer",
        )
    if kind == "gpt2" and split not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"GGUF pre-tokenizer {split!r} is not supported (known: {', '.join(_PRE_TOKENIZERS)})",
            "give a Hugging Face tokenizer directory as tokenizer",
        )
    in_pieces = kind != "gpt2"
    if in_pieces:
        tokenizer = sentencepiece_tokenizer(metadata, has_merges=kind == _MERGED_PIECES)
    else:
        tokenizer = _byte_level(metadata, str(split))
    _add_special_tokens(tokenizer, metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    bos_id = metadata.get("tokenizer.ggml.bos_token_id", 1 if kind == _PIECES else None)
    # Converters may leave the key out, and llama.cpp then begins these texts with the token.
    begins = in_pieces or split in _WHOLE_WORDS
    if metadata.get("tokenizer.ggml.add_bos_token", begins) and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _byte_level(metadata: dict[str, Any], split: str) -> Tokenizer:
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise CheckpointError("the GGUF file holds no vocabulary or no merges", "convert it again")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    ignore_merges = split in _WHOLE_WORDS
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split in ("qwen2", _QWEN_35):
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    of_phi = metadata.get("general.architecture") == "phi3" and tokenizer.pre_tokenizer is None
    for token, kind in zip(tokens, kinds, strict=False):
        is_special = kind in (UNKNOWN, CONTROL)
        # Of Phi-3's special tokens most take the spaces behind them, which files do not say.
        strips = of_phi and (is_special or kind == USER_DEFINED) and token not in _STRIP_NOT
        added = AddedToken(token, special=is_special, normalized=False, rstrip=strips)
        if is_special:
            tokenizer.add_special_tokens([added])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([added])


def _by_pattern(*patterns: str) -> PreTokenizer:
    def build() -> Any:
        words = [pre.Split(Regex(pattern), "isolated") for pattern in patterns]
        return pre.Sequence([*words, pre.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _gpt2() -> Any:
    return pre.ByteLevel(add_prefix_space=False)


def _digits_apart() -> Any:
    return pre.Sequence([pre.Digits(individual_digits=True), _gpt2()])


_QWEN_35 = "qwen35"
LLAMA_3, TEKKEN = "llama-bpe", "tekken"
_LLAMA_3 = (LLAMA_3, "llama3", "llama-v3", "pixtral", "falcon3")
#: Words as Llama 3's, all merged from parts: Phi-4's, OLMo's, GLM's.
_CL100K = ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")
#: Vocabularies whose whole words are not merged from parts.
_WHOLE_WORDS = (*_LLAMA_3, TEKKEN)
_PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _gpt2,
    **dict.fromkeys(("smollm", "refact", "starcoder"), _digits_apart),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _by_pattern(_WORDS % r"\p{N}")),
    _QWEN_35: _by_pattern(_WORDS_WITH_MARKS),
    **dict.fromkeys((*_LLAMA_3, *_CL100K), _by_pattern(_WORDS % r"\p{N}{1,3}")),
    TEKKEN: _by_pattern(_TEKKEN_WORDS),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), _by_pattern(_O200K_WORDS)),
    "seed-coder": _by_pattern(_SEED_WORDS),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _by_pattern(*_DEEPSEEK_PARTS)),
}


def pre_tokenizer(name: str) -> Any:
    """What splits texts into words, by its name in GGUF files."""
    return _PRE_TOKENIZERS[name]()
