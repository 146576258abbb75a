"""Grammars over a small byte-level vocabulary, and a toy target that speaks it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.harness import request
from helpers.toy import ToyModel
from sametoken.errors import RequestError
from sametoken.text.grammar.compiled import TokenizerText, Vocabulary
from sametoken.text.grammar.grammar import GrammarCompiler
from sametoken.text.grammar.trials import ThreadTrials
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.request import EngineRequest
from sametoken.types.structured_outputs import StructuredOutputs

EOS, SPECIAL = 0, 1
MERGED = ('{"', '": ', '",', "true", "10")


@lru_cache
def tokenizer() -> Tokenizer:
    """256 bytes and a few longer tokens; two special ones in front, one of them EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [text.replace(" ", "Ġ") for text in MERGED]
    tokens = ["<end>", "<special>", *alphabet, *merged]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<special>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))


# The model's vocabulary is padded, as those of real checkpoints are.
VOCAB = -(-len(tokenizer().hf) // 16) * 16


@lru_cache
def model() -> ToyModel:
    return ToyModel(VOCAB)


@dataclass(frozen=True, slots=True)
class UnusableText(TokenizerText):
    """A tokenizer that the grammar library refuses."""

    def pack(self) -> Vocabulary:
        raise RequestError("structured_outputs cannot use this tokenizer", "use another one")


@lru_cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB, (EOS,), ThreadTrials())


def ids(text: str) -> list[int]:
    """The text byte by byte."""
    vocabulary = tokenizer().hf.get_vocab()
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [vocabulary[character] for piece, _ in pieces for character in piece]


def token(text: str) -> int:
    return tokenizer().hf.get_vocab()[text.replace(" ", "Ġ")]


def structured_request(
    request_id: str, prompt, structured: StructuredOutputs, **options
) -> EngineRequest:
    """As the input processor makes it."""
    plain = request(request_id, prompt, structured_outputs=structured, **options)
    stop_ids = (EOS, *plain.stop_token_ids)
    return replace(plain, stop_token_ids=stop_ids, grammar=compiler().compile(structured))


def text_of(token_ids: list[int]) -> str:
    """What a user reads: up to EOS."""
    end = token_ids.index(EOS) if EOS in token_ids else len(token_ids)
    return tokenizer().decode(token_ids[:end])
