"""Structured outputs as grammars over token ids, by xgrammar.

Processes exchange a grammar's source; each process that needs matchers compiles it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from sametoken.errors import RequestError, shown
from sametoken.text.grammar.after_reasoning import GrammarAfterReasoning, allow
from sametoken.text.grammar.compiled import (
    Compiled,
    CompiledGrammars,
    GrammarSource,
    TokenizerText,
    Vocabulary,
    not_valid,
)
from sametoken.text.grammar.json_schema import check_schema
from sametoken.text.grammar.regular_expressions import check_grammar, check_regex, plain_regex
from sametoken.text.grammar.structural_tags import with_grammars
from sametoken.types.structured_outputs import Grammar, StructuredOutputs

if TYPE_CHECKING:
    import xgrammar

    # Its imports are too many for a process that only tries grammars.
    from sametoken.text.tokenizer import Tokenizer

#: Validated structures that are remembered: at most 2 MB of ASCII text.
_MAX_VALIDATED = 32
_COMPILED = CompiledGrammars()


class XGrammarMatcher:
    """A ``Matcher`` over xgrammar's, which terminates at the first end-of-text token.

    Args:
        matcher: xgrammar's matcher.
        blank_ids: token ids without text, which no grammar accepts.
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
        # xgrammar accepts only the first end-of-text token.
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
        allow(masks, row, self._end_ids)


class XGrammar:
    """The ``Grammar`` of one source over one vocabulary.

    Pickled as both, and compiled on demand.
    """

    def __init__(
        self, source: GrammarSource, vocabulary: Vocabulary, store: CompiledGrammars = _COMPILED
    ) -> None:
        self.source = source
        self.vocabulary = vocabulary
        self._store = store
        self._compiled: Compiled | None = None

    def is_ready(self) -> bool:
        """See ``Grammar``."""
        if self._compiled is None:
            self._compiled = self._store.find(self.source, self.vocabulary)
        return self._compiled is not None

    def prepare(self) -> None:
        """See ``Grammar``.

        Raises:
            RequestError: it is not valid, or too large.
            OverloadedError: the grammars in use take up the memory.
        """
        self._get()

    def new_matcher(self) -> XGrammarMatcher:
        """See ``Grammar``."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._get().grammar)
        return XGrammarMatcher(matcher, self.vocabulary.blank_ids)

    def validate(self) -> None:
        """Compile it, and refuse what is not supported. Time and memory are not bounded.

        Raises:
            RequestError: it is not supported, not valid, too large, or matches nothing.
        """
        import xgrammar

        kind = self.source.kind
        if self.source.free_after is not None:
            # With the mark, a kind that matches nothing would go unnoticed.
            XGrammar(replace(self.source, free_after=None), self.vocabulary, self._store).validate()
            self.prepare()
            return
        if kind == "structural_tag":
            with_grammars(self.source.text, self._validate_within)
        try:
            for pattern in _checked_patterns(self.source):
                # Within a schema, the compiler ignores what it does not support in a pattern.
                xgrammar.Grammar.from_regex(plain_regex(pattern))
                if kind == "json_schema":
                    _require_unescaped(pattern)
            masks = xgrammar.allocate_token_bitmask(1, self.vocabulary.info.vocab_size)
            self.new_matcher().fill(masks, 0)
        except RequestError:
            raise
        except (RuntimeError, ValueError) as error:
            raise not_valid(kind, error) from error
        if not masks.any():
            raise RequestError(f"no text matches structured_outputs {kind}", "correct it")

    def _validate_within(self, kind: str, text: str) -> str:
        """Validate a constraint that is part of this one; nobody reads the text returned."""
        XGrammar(GrammarSource(kind, text), self.vocabulary, self._store).validate()
        return "root"

    def _get(self) -> Compiled:
        if self._compiled is None:
            self._compiled = self._store.get(self.source, self.vocabulary)
        return self._compiled

    def __reduce__(self) -> tuple[type[XGrammar], tuple[GrammarSource, Vocabulary]]:
        """Pickle the source and the vocabulary."""
        return (XGrammar, (self.source, self.vocabulary))


class GrammarTrials(Protocol):
    """Validates grammars within a time limit."""

    def pack(self, text: TokenizerText) -> Vocabulary:
        """The vocabulary of a tokenizer, and prepare for the first grammar over it.

        Raises:
            RequestError: the tokenizer cannot be used.
            OverloadedError: that is not possible now.
        """
        ...

    def run(self, grammar: XGrammar) -> None:
        """Validate a grammar.

        Raises:
            RequestError: it is not valid, or validation took too long.
            OverloadedError: other grammars are being validated, and take long.
        """
        ...


class GrammarCompiler:
    """Makes grammars of structures, and validates each once.

    Args:
        tokenizer: its tokens are those of the grammars; special tokens have no text there.
        vocab_size: the model's.
        eos_token_ids: end-of-text token ids.
        trials: packs the tokens, and validates a grammar before it is used.

    Raises:
        RequestError: there is no end-of-text token, or xgrammar cannot use the tokenizer.
        OverloadedError: the tokens cannot be packed now.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        trials: GrammarTrials,
    ) -> None:
        if not eos_token_ids:
            raise RequestError(
                "structured_outputs needs an end-of-text token and the model has none",
                "set eos_token_id in config.json",
            )
        text = TokenizerText(tokenizer.backend.to_str(), vocab_size, eos_token_ids)
        self._vocabulary = trials.pack(text)
        self._trials = trials
        self._lock = threading.Lock()
        self._validated: OrderedDict[StructuredOutputs, GrammarSource] = OrderedDict()

    def knows(self, structured: StructuredOutputs) -> bool:
        """Whether a structure is known to be valid."""
        return self._find(_of_the_text(structured)) is not None

    def compile(self, structured: StructuredOutputs) -> Grammar:
        """The grammar of a structure, validated now or before.

        Raises:
            RequestError: it is not supported, not valid, too large, or matches nothing.
            OverloadedError: other grammars are being validated, and take long.
        """
        of_text, reasoning = _of_the_text(structured), structured.reasoning
        found = self._find(of_text)
        if found is None:
            found = XGrammar(GrammarSource.of(of_text), self._vocabulary)
            self._trials.run(found)
        with self._lock:
            # Only the source: ``CompiledGrammars`` bounds the compiled grammars.
            self._validated[of_text] = found.source
            self._validated.move_to_end(of_text)
            if len(self._validated) > _MAX_VALIDATED:
                self._validated.popitem(last=False)
        return found if reasoning is None else GrammarAfterReasoning(found, reasoning)

    def _find(self, structured: StructuredOutputs) -> XGrammar | None:
        with self._lock:
            source = self._validated.get(structured)
        return None if source is None else XGrammar(source, self._vocabulary)


def _of_the_text(structured: StructuredOutputs) -> StructuredOutputs:
    """The structure without the reasoning before it, which no trial depends on."""
    return replace(structured, reasoning=None)


def _checked_patterns(source: GrammarSource) -> tuple[str, ...]:
    """The regular expressions in a source, after refusing what the compiler would ignore."""
    if source.kind == "grammar":
        check_grammar(source.text)
    patterns: tuple[str, ...] = (source.text,) if source.kind == "regex" else ()
    if source.kind == "json_schema":
        patterns = check_schema(source.text)
    for pattern in patterns:
        check_regex(pattern)
    return patterns


def _require_unescaped(pattern: str) -> None:
    """Refuse a pattern in a schema if JSON escapes a part of every text of it.

    The compiler would write these texts as they are, which is no JSON.
    """
    if _is_escaped("a") and not _is_escaped(plain_regex(pattern, in_schema=True)):
        raise RequestError(
            f"json_schema: every text of the pattern {shown(pattern)} has a quotation mark, a "
            "backslash or a control character, which JSON escapes, and that is not supported",
            "list the texts in an enum, or use a regex or a grammar of the whole answer",
        )


def _is_escaped(pattern: str) -> bool:
    """Whether the compiler says that a pattern's texts are written as JSON.

    It says so in words of its version: of no pattern if another version has others.
    """
    import xgrammar

    schema = {"type": "string", "pattern": pattern}
    return "json_string=true" in str(xgrammar.Grammar.from_json_schema(schema))
