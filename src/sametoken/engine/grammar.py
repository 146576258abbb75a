"""Structured outputs compiled to grammars over token ids, by xgrammar."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from sametoken.core.structured_outputs import StructuredOutputs
from sametoken.engine.json_schema import check_schema
from sametoken.engine.tokenizer import Tokenizer
from sametoken.errors import OverloadedError, RequestError

if TYPE_CHECKING:
    import xgrammar

#: Longer texts are refused, and such with deeper brackets: the compiler recurses on them.
MAX_CHARACTERS = 2**16
MAX_NESTING = 200
#: Seconds until a grammar is refused as too large.
TIME_LIMIT = 10.0
#: White space between two elements of JSON: room for a line break and an indentation.
MAX_WHITESPACE = 20

_MAX_KEPT = 32
_AT_ONCE = 2
_ANY_OBJECT = '{"type": "object"}'
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


class XGrammarMatcher:
    """``Matcher`` over xgrammar's, which ends with the first end-of-text token.

    Args:
        matcher: its matcher.
        blank_ids: token ids without a text, which no grammar accepts.
    """

    def __init__(self, matcher: xgrammar.GrammarMatcher, blank_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._blank_ids = blank_ids
        self._end_ids = tuple(matcher.stop_token_ids)

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``."""
        if token_id in self._blank_ids:
            return False
        if not self._matcher.is_terminated():
            accepted: bool = self._matcher.accept_token(token_id)
            return accepted
        # Of end-of-text tokens after the first, xgrammar would know nothing.
        return token_id in self._end_ids

    def copy(self) -> XGrammarMatcher:
        """See ``Matcher``."""
        return XGrammarMatcher(self._matcher.fork(), self._blank_ids)

    def fill(self, masks: Any, row: int) -> None:
        """See ``Matcher``."""
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(masks, row)
            return
        masks[row] = 0
        for token_id in self._end_ids:
            masks[row, token_id // 32] |= _bit(token_id % 32)


class XGrammar:
    """``Grammar`` of one compiled structure. Crosses process borders whole.

    Args:
        compiled: the grammar.
        vocabulary: its tokenizer info as compressed JSON.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: bytes) -> None:
        info = compiled.tokenizer_info
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._vocab_size: int = info.vocab_size
        self._blank_ids = frozenset(info.special_token_ids) - set(info.stop_token_ids)

    def new_matcher(self) -> XGrammarMatcher:
        """See ``Grammar``."""
        import xgrammar

        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._blank_ids)

    @property
    def is_empty(self) -> bool:
        """Whether not even a first token is allowed."""
        import xgrammar

        masks = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        self.new_matcher().fill(masks, 0)
        return not masks.any()

    @cached_property
    def _packed(self) -> bytes:
        return zlib.compress(self._compiled.serialize_json().encode(), level=1)

    def __reduce__(self) -> tuple[Callable[[bytes, bytes], XGrammar], tuple[bytes, bytes]]:
        """Grammar and vocabulary; a process that has met them before builds nothing."""
        return (_unpacked, (self._packed, self._vocabulary))


class GrammarCompiler:
    """Compiles structures once, and keeps them up to a bound of memory.

    Args:
        tokenizer: whose tokens the grammars are over. Special tokens have no text in them.
        vocab_size: the model's.
        eos_token_ids: what may end a text.

    Raises:
        RequestError: nothing can end a text, or the tokenizer's text is not known by token.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        import xgrammar

        if not eos_token_ids:
            raise RequestError(
                "structured_outputs needs an end-of-text token and the model names none",
                "name eos_token_id in config.json",
            )
        try:
            kind = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer.hf, stop_token_ids=list(eos_token_ids)
            )
        except (RuntimeError, ValueError) as error:
            raise RequestError(
                f"structured_outputs cannot use this tokenizer: {_first_line(error)}",
                "use a byte-level or SentencePiece tokenizer",
            ) from error
        info = xgrammar.TokenizerInfo(
            _vocabulary(tokenizer, vocab_size),
            kind.vocab_type,
            vocab_size=vocab_size,
            stop_token_ids=list(eos_token_ids),
            add_prefix_space=kind.add_prefix_space,
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocabulary = zlib.compress(info.serialize_json().encode(), level=1)
        self._kept = lru_cache(maxsize=_MAX_KEPT)(self._compile_anew)
        self._turns = threading.BoundedSemaphore(_AT_ONCE)

    def compile(self, structured: StructuredOutputs) -> XGrammar:
        """The grammar of a structure, new or kept.

        Raises:
            RequestError: it cannot be honoured, is not valid, too large, or matches nothing.
            OverloadedError: other grammars are being compiled, and take long.
        """
        return self._kept(structured)

    def _compile_anew(self, structured: StructuredOutputs) -> XGrammar:
        kind = structured.kind
        source = _source(structured)
        _require_small(kind, source)
        patterns = check_schema(source) if kind == "json_schema" else ()
        grammar = XGrammar(self._in_time(kind, source, patterns), self._vocabulary)
        if grammar.is_empty:
            raise RequestError(f"no text matches structured_outputs {kind}", "correct it")
        return grammar

    def _in_time(
        self, kind: str, source: str, patterns: tuple[str, ...]
    ) -> xgrammar.CompiledGrammar:
        if not self._turns.acquire(timeout=TIME_LIMIT):
            raise OverloadedError(
                "other grammars are still being compiled", "try again later", TIME_LIMIT
            )
        outcome: Future[xgrammar.CompiledGrammar] = Future()

        def work() -> None:
            try:
                outcome.set_result(self._compile(kind, source, patterns))
            except BaseException as error:
                outcome.set_exception(error)
            finally:
                self._turns.release()

        # A daemon, since a compilation cannot be stopped; it ends behind a refused request.
        threading.Thread(target=work, name="compile-grammar", daemon=True).start()
        try:
            return outcome.result(TIME_LIMIT)
        except TimeoutError as error:
            raise RequestError(
                f"structured_outputs {kind} took more than {TIME_LIMIT:.0f} s to compile",
                "make it smaller",
            ) from error
        except (RuntimeError, ValueError) as error:
            raise RequestError(
                f"structured_outputs {kind} is not valid: {_first_line(error)}", "correct it"
            ) from error

    def _compile(
        self, kind: str, source: str, patterns: tuple[str, ...]
    ) -> xgrammar.CompiledGrammar:
        import xgrammar

        for pattern in patterns:
            # Within a schema, what a regular expression must not hold would be ignored.
            xgrammar.Grammar.from_regex(pattern)
        if kind in ("json_schema", "json_object"):
            return self._compiler.compile_json_schema(source, max_whitespace_cnt=MAX_WHITESPACE)
        if kind == "regex":
            return self._compiler.compile_regex(source)
        return self._compiler.compile_grammar(source)


@lru_cache(maxsize=4)
def _tokenizer_info(vocabulary: bytes) -> xgrammar.TokenizerInfo:
    import xgrammar

    return xgrammar.TokenizerInfo.deserialize_json(zlib.decompress(vocabulary).decode())


@lru_cache(maxsize=_MAX_KEPT)
def _unpacked(packed: bytes, vocabulary: bytes) -> XGrammar:
    import xgrammar

    text, info = zlib.decompress(packed).decode(), _tokenizer_info(vocabulary)
    return XGrammar(xgrammar.CompiledGrammar.deserialize_json(text, info), vocabulary)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Every id's token, and nothing for special tokens and the model's padding."""
    tokens = [""] * vocab_size
    for token, token_id in tokenizer.hf.get_vocab().items():
        if token_id < vocab_size and token_id not in tokenizer.special_ids:
            tokens[token_id] = token
    return tokens


def _source(structured: StructuredOutputs) -> str:
    """The text that is compiled; a choice is a grammar of quoted texts."""
    if structured.json_object:
        return _ANY_OBJECT
    if structured.choice is not None:
        quoted = (json.dumps(text, ensure_ascii=False) for text in structured.choice)
        return f"root ::= {' | '.join(quoted)}"
    text: str = getattr(structured, structured.kind)
    return text


def _require_small(kind: str, source: str) -> None:
    if len(source) > MAX_CHARACTERS:
        raise RequestError(
            f"structured_outputs {kind} has {len(source)} characters, above {MAX_CHARACTERS}",
            "make it smaller",
        )
    depth = deepest = 0
    for character in source:
        depth = max(0, depth + _BRACKETS.get(character, 0))
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise RequestError(
            f"structured_outputs {kind} nests brackets deeper than {MAX_NESTING}", "flatten it"
        )


def _first_line(error: BaseException) -> str:
    """What the compiler says, without the place in its source."""
    line = str(error).strip().splitlines()[0]
    return (line.partition(".cc:")[2].partition(": ")[2] or line).rstrip(". ")


def _bit(index: int) -> int:
    """Bit ``index`` of a signed 32-bit word."""
    return 1 << index if index < 31 else -(1 << 31)
