"""Grammar sources of bounded size, and a process-wide cache of grammars compiled by xgrammar."""

from __future__ import annotations

import json
import re
import threading
import weakref
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from sametoken.errors import OverloadedError, RequestError
from sametoken.text.grammar.json_schema import compilable
from sametoken.text.grammar.json_strings import with_escapes
from sametoken.text.grammar.other_names import with_other_names
from sametoken.text.grammar.regular_expressions import plain_regex
from sametoken.text.grammar.structural_tags import with_grammars
from sametoken.types.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    import xgrammar
    from tokenizers import Tokenizer as Backend


#: Bytes of one compiled grammar, of those cached for later requests, and of all in use.
MAX_BYTES = 64 * 2**20
MAX_KEPT_BYTES = 256 * 2**20
MAX_LIVE_BYTES = 2**30
#: White space between two JSON elements: a line break and an indentation.
MAX_WHITESPACE = 20
_ESCAPED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)


class Vocabulary:
    """The tokens that grammars are over. Pickled as compressed JSON.

    Args:
        packed: xgrammar's tokenizer info; ``vocabulary_of`` returns one object per content.
    """

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    @cached_property
    def info(self) -> xgrammar.TokenizerInfo:
        """The tokens in xgrammar's form."""
        import xgrammar

        return xgrammar.TokenizerInfo.deserialize_json(zlib.decompress(self._packed).decode())

    @cached_property
    def compiler(self) -> xgrammar.GrammarCompiler:
        """A compiler over these tokens, without a cache."""
        import xgrammar

        return xgrammar.GrammarCompiler(self.info, max_threads=1, cache_enabled=False)

    @cached_property
    def blank_ids(self) -> frozenset[int]:
        """Token ids without text, which no grammar accepts."""
        return frozenset(self.info.special_token_ids) - set(self.info.stop_token_ids)

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        """Pickle as bytes; a process that has this vocabulary does not unpack it again."""
        return (vocabulary_of, (self._packed,))


@lru_cache(maxsize=4)
def vocabulary_of(packed: bytes) -> Vocabulary:
    """The vocabulary of these bytes, one object per content."""
    return Vocabulary(packed)


@dataclass(frozen=True, slots=True)
class TokenizerText:
    """What a ``Vocabulary`` is made of, in a form that needs no grammar library.

    Attributes:
        text: the tokenizer as the content of a ``tokenizer.json``.
        vocab_size: the model's.
        eos_token_ids: end-of-text token ids.
    """

    text: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def pack(self) -> Vocabulary:
        """The vocabulary; special tokens have no text in it.

        Raises:
            RequestError: xgrammar cannot use the tokenizer.
        """
        import xgrammar
        from tokenizers import Tokenizer as Backend
        from transformers import PreTrainedTokenizerFast

        backend = Backend.from_str(self.text)
        try:
            kind = xgrammar.TokenizerInfo.from_huggingface(
                PreTrainedTokenizerFast(tokenizer_object=backend),
                stop_token_ids=list(self.eos_token_ids),
            )
        except (RuntimeError, ValueError) as error:
            raise RequestError(
                f"structured_outputs cannot use this tokenizer: {error}",
                "use a byte-level or SentencePiece tokenizer",
            ) from error
        info = xgrammar.TokenizerInfo(
            self._tokens(backend),
            kind.vocab_type,
            vocab_size=self.vocab_size,
            stop_token_ids=list(self.eos_token_ids),
            add_prefix_space=kind.add_prefix_space,
        )
        return vocabulary_of(zlib.compress(info.serialize_json().encode(), level=1))

    def _tokens(self, backend: Backend) -> list[str]:
        """The token of every id; empty for special tokens and for padding of the vocabulary."""
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        tokens = [""] * self.vocab_size
        for token, token_id in backend.get_vocab(with_added_tokens=True).items():
            is_special = token_id in added and added[token_id].special
            if token_id < self.vocab_size and not is_special:
                tokens[token_id] = token
        return tokens


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled grammar and its size."""

    grammar: xgrammar.CompiledGrammar
    num_bytes: int


class CompiledGrammars:
    """A thread-safe LRU cache of the compiled grammars of one process.

    Args:
        max_kept_bytes: bytes of cached grammars; the least recently used are evicted first.
        max_live_bytes: bytes of all grammars in use or cached.
    """

    def __init__(
        self, max_kept_bytes: int = MAX_KEPT_BYTES, max_live_bytes: int = MAX_LIVE_BYTES
    ) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._max_live_bytes = max_live_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Vocabulary, GrammarSource], Compiled] = OrderedDict()
        self._live: weakref.WeakValueDictionary[tuple[Vocabulary, GrammarSource], Compiled]
        self._live = weakref.WeakValueDictionary()

    def find(self, source: GrammarSource, vocabulary: Vocabulary) -> Compiled | None:
        """The compiled grammar, if there is one."""
        with self._lock:
            found = self._live.get((vocabulary, source))
            if found is not None:
                self._keep((vocabulary, source), found)
            return found

    def get(self, source: GrammarSource, vocabulary: Vocabulary) -> Compiled:
        """The compiled grammar, new or cached.

        Raises:
            RequestError: it is not valid, or too large.
            OverloadedError: the grammars in use take up the memory.
        """
        found = self.find(source, vocabulary)
        if found is not None:
            return found
        grammar = _compile(source, vocabulary)
        compiled = Compiled(grammar, grammar.memory_size_bytes)
        if compiled.num_bytes > MAX_BYTES:
            raise RequestError(
                f"structured_outputs {source.kind} compiles to {compiled.num_bytes} bytes, "
                f"above {MAX_BYTES}",
                "make it smaller",
            )
        with self._lock:
            self._keep((vocabulary, source), compiled)
            in_use = sum(one.num_bytes for one in list(self._live.values()))
            if in_use + compiled.num_bytes > self._max_live_bytes:
                self._kept.pop((vocabulary, source), None)
                raise OverloadedError(
                    f"the grammars in use take {in_use} bytes of {self._max_live_bytes}",
                    "try again later",
                )
            self._live[vocabulary, source] = compiled
        return compiled

    def _keep(self, key: tuple[Vocabulary, GrammarSource], compiled: Compiled) -> None:
        self._kept[key] = compiled
        self._kept.move_to_end(key)
        while sum(one.num_bytes for one in self._kept.values()) > self._max_kept_bytes:
            self._kept.popitem(last=False)


def _compile(source: GrammarSource, vocabulary: Vocabulary) -> xgrammar.CompiledGrammar:
    import xgrammar

    try:
        grammar = _grammar_of(source)
        if source.free_after is not None:
            free = xgrammar.Grammar.from_ebnf(f"{_one_of((source.free_after,))} {_ANY_TEXT}")
            grammar = xgrammar.Grammar.union(grammar, free)
        return vocabulary.compiler.compile_grammar(grammar)
    except (RuntimeError, ValueError) as error:
        raise not_valid(source.kind, error) from error


def _grammar_of(source: GrammarSource) -> xgrammar.Grammar:
    """The grammar of a source's own kind."""
    import xgrammar

    if source.kind in ("json_schema", "json_object"):
        return _grammar_of_schema(compilable(source.text))
    if source.kind == "regex":
        return xgrammar.Grammar.from_regex(plain_regex(source.text))
    if source.kind == "structural_tag":
        whole = with_grammars(
            source.text, lambda *own: _exact(str(_grammar_of(GrammarSource(*own))))
        )
        return xgrammar.Grammar.from_structural_tag(whole)
    return xgrammar.Grammar.from_ebnf(_exact(source.text))


def _grammar_of_schema(schema: str) -> xgrammar.Grammar:
    import xgrammar

    grammar = xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
    rules = str(grammar)
    corrected = with_escapes(with_other_names(rules))
    return grammar if corrected == rules else xgrammar.Grammar.from_ebnf(_exact(corrected))


def _exact(rules: str) -> str:
    r"""A grammar so that the compiler reads \xNN as GBNF has it: two digits, and no more.

    It writes é as \xe9 itself, and reads letters and digits behind that as part of the number.
    """
    return _ESCAPED.sub(lambda found: rf"\u00{found[1]}" if found[1] else found[0], rules)


def not_valid(kind: str, error: Exception) -> RequestError:
    """The compiler's error about a source."""
    return RequestError(
        f"structured_outputs {kind} is not valid: {_first_line(error)}", "correct it"
    )


def _first_line(error: Exception) -> str:
    """The compiler's message, which may be empty, without the place in its source code."""
    line, *_ = [*str(error).strip().splitlines(), ""]
    reason = (line.partition(".cc:")[2].partition(": ")[2] or line).rstrip(". ")
    return reason[:_LONGEST_REASON] or "the compiler gives no reason"


_LONGEST_REASON = 300


#: Longer texts and deeper brackets are refused: the compiler recurses on brackets.
MAX_CHARACTERS = 2**16
MAX_NESTING = 200

_ANY_OBJECT = '{"type": "object"}'
_ANY_TEXT = r"[\u0000-\U0010ffff]*"
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A text to compile.

    Attributes:
        kind: the field of ``StructuredOutputs``.
        text: a JSON schema, a regular expression, a grammar in GBNF form, or a structural tag.
        free_after: as in ``StructuredOutputs``.
    """

    kind: str
    text: str
    free_after: str | None = None

    @classmethod
    def of(cls, structured: StructuredOutputs) -> GrammarSource:
        """The source of a structure; a choice becomes a grammar of quoted texts.

        Raises:
            RequestError: it is too long, or nests too deeply.
        """
        kind = structured.kind
        texts = (_ANY_OBJECT,) if structured.json_object else getattr(structured, kind)
        texts = (texts,) if isinstance(texts, str) else texts
        # Before any work on them.
        _require_short(kind, sum(map(len, (*texts, structured.free_after or ""))))
        text = _one_of(texts) if kind == "choice" else texts[0]
        _require_short(kind, len(text))
        _require_shallow(kind, text)
        return cls(kind, text, structured.free_after)


def _one_of(texts: tuple[str, ...]) -> str:
    quoted = (json.dumps(text, ensure_ascii=False) for text in texts)
    return f"root ::= {' | '.join(quoted)}"


def _require_short(kind: str, num_characters: int) -> None:
    if num_characters > MAX_CHARACTERS:
        raise RequestError(
            f"structured_outputs {kind} has {num_characters} characters, above {MAX_CHARACTERS}",
            "make it smaller",
        )


def _require_shallow(kind: str, text: str) -> None:
    depth = deepest = 0
    for character in text:
        depth = max(0, depth + _BRACKETS.get(character, 0))
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise RequestError(
            f"structured_outputs {kind} nests brackets deeper than {MAX_NESTING}", "flatten it"
        )
