"""A GGUF file's tokenizer, built from the file's metadata.

transformers' own conversion takes seconds and drops ``tokenizer.ggml.pre``: indented numbers then
get other tokens than the model was trained on (tests/unit/text/test_tokenizer.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.text.gguf_pieces import CONTROL, UNKNOWN, USER_DEFINED, sentencepiece_tokenizer

#: SentencePiece's, by scores, and by merges.
_PIECES, _MERGED_PIECES = "llama", "gemma4"
_STRIP_NOT = ("<unk>", "<s>", "<|endoftext|>")
_REMEDY = "give a Hugging Face tokenizer directory as tokenizer"

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
#: Of Kimi K2: as o200k's, but Han stands apart, and signs end before a slash.
_NO_HAN = r"&&[^\p{Han}]]"
_KIMI_UPPER, _KIMI_LOWER = (one.removesuffix("]") + _NO_HAN for one in (_UPPER, _LOWER))
_KIMI_WORDS = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Of DeepSeek's first vocabulary, which V2 has too: letters with case, of the alphabets that it
#: names by code points.
_CASED = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba "
    "1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 "
    "1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb "
    "1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d "
    "212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 "
    "a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a "
    "ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)
#: One after the other: lines, words, signs, spaces at an end, other scripts, digits.
_DEEPSEEK_LLM_PARTS = (
    r"[\r\n]",
    r"\s?[" + re.sub("[0-9a-f]+", r"\\x{\g<0>}", _CASED).replace(" ", "") + "]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)

PreTokenizer: TypeAlias = Callable[[], Any]


def build_gguf_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF header describes: byte-level BPE, or SentencePiece's.

    Raises:
        CheckpointError: the vocabulary, the merges or the scores are missing.
        UnsupportedError: another kind of tokenizer, or an unknown pre-tokenizer.
    """
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    in_pieces = kind in (_PIECES, _MERGED_PIECES)
    if in_pieces:
        tokenizer = sentencepiece_tokenizer(metadata, has_merges=kind == _MERGED_PIECES)
    elif kind == "gpt2":
        tokenizer = _byte_level(metadata, split)
    else:
        raise UnsupportedError(f"GGUF tokenizer model {kind!r} is not supported", _REMEDY)
    _add_special_tokens(tokenizer, metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    bos_id = metadata.get("tokenizer.ggml.bos_token_id", 1 if kind == _PIECES else None)
    # Converters may leave the key out, and llama.cpp then begins these texts with the token.
    begins = in_pieces or split in _BEGINNING
    if metadata.get("tokenizer.ggml.add_bos_token", begins) and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _byte_level(metadata: dict[str, Any], split: Any) -> Tokenizer:
    if split not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"GGUF pre-tokenizer {split!r} is not supported (known: {', '.join(_PRE_TOKENIZERS)})",
            _REMEDY,
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
LLAMA_3, TEKKEN, _KIMI_K2 = "llama-bpe", "tekken", "kimi-k2"
_LLAMA_3 = (LLAMA_3, "llama3", "llama-v3", "pixtral", "falcon3", "falcon-h1")
#: Words as Llama 3's, all merged from parts: Phi-4's, OLMo's, GLM's.
_CL100K = ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")
#: That begin texts with a token, unless told otherwise.
_BEGINNING = (*_LLAMA_3, TEKKEN)
#: Vocabularies whose whole words are not merged from parts.
_WHOLE_WORDS = (*_BEGINNING, _KIMI_K2)
_PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _gpt2,
    **dict.fromkeys(("smollm", "refact", "starcoder"), _digits_apart),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _by_pattern(_WORDS % r"\p{N}")),
    _QWEN_35: _by_pattern(_WORDS_WITH_MARKS),
    **dict.fromkeys((*_LLAMA_3, *_CL100K), _by_pattern(_WORDS % r"\p{N}{1,3}")),
    TEKKEN: _by_pattern(_TEKKEN_WORDS),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), _by_pattern(_O200K_WORDS)),
    "seed-coder": _by_pattern(_SEED_WORDS),
    _KIMI_K2: _by_pattern(_KIMI_WORDS),
    "deepseek-llm": _by_pattern(*_DEEPSEEK_LLM_PARTS),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _by_pattern(*_DEEPSEEK_PARTS)),
}


def pre_tokenizer(name: str) -> Any:
    """What splits texts into words, by its name in GGUF files."""
    return _PRE_TOKENIZERS[name]()
