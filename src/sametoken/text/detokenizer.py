"""Incremental detokenization: the pieces add up to what the whole adds to its prompt's text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from sametoken.text.tokenizer import BYTE_OF, BYTE_TOKEN, Tokenizer


class Detokenizer(Protocol):
    """Makes the text of one completion, token by token.

    Attributes:
        num_before: characters of earlier tokens, held back until then, that come before those of
            the last token.
    """

    num_before: int

    def append(self, token_id: int) -> str:
        """The text that this token completes, possibly empty."""
        ...

    def finish(self) -> str:
        """The text still held back: an incomplete character, or a run of byte tokens."""
        ...

    @property
    def held(self) -> str:
        """Whole characters that are held back, as they stand if no other token follows."""
        ...


#: Tokens at a prompt's end among which one with a text of its own is looked for.
_NUM_BEFORE = 1024

#: Tokens that a character may have before it is whole: one for each byte but its last.
_MOST_CUT = 3


def make_detokenizer(
    tokenizer: Tokenizer | None,
    *,
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool = True,
    prompt: Sequence[int] = (),
) -> Detokenizer:
    """The detokenizer for the tokenizer's decoder.

    Args:
        tokenizer: the tokenizer; without one there is no text.
        skip_special_tokens: whether special tokens have no text.
        spaces_between_special_tokens: whether those that have one keep the spaces that some
            decoders write between tokens; as in vLLM, all added tokens count, within the output.
        prompt: the tokens before the text; without any, decoders of SentencePiece take the space
            from its beginning.
    """
    if tokenizer is None:
        return NoDetokenizer()
    if type(tokenizer.backend.decoder).__name__ == "ByteLevel":
        return ByteLevelDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return WindowDetokenizer(
        tokenizer,
        skip_special_tokens=skip_special_tokens,
        joins_added=not (skip_special_tokens or spaces_between_special_tokens),
        prompt=prompt,
    )


class NoDetokenizer:
    """For completions without a text."""

    num_before = 0
    held = ""

    def append(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        return ""

    def finish(self) -> str:
        """See ``Detokenizer``."""
        return ""


class ByteLevelDetokenizer:
    """For byte-level BPE, where every token is a fixed byte string."""

    #: Only an incomplete character is held back.
    held = ""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._id_to_token = tokenizer.backend.id_to_token
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_before = 0

    def append(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        token = None if token_id in self._skipped else self._id_to_token(token_id)
        added = _token_bytes(token) if token else b""
        pending, _ = self._utf8.getstate()
        # What began a character, and is continued by none, becomes one U+FFFD.
        self.num_before = int(bool(pending) and not _may_begin(pending + added[:1]))
        return self._utf8.decode(added)

    def finish(self) -> str:
        """See ``Detokenizer``."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any other decoder: decodes a window of the last tokens again.

    A run of byte tokens is held back until it ends, since its decoding depends on all of it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        joins_added: bool,
        prompt: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._joined = frozenset(tokenizer.hf.added_tokens_decoder if joins_added else ())
        self._follows_joined = False
        self._window = self._last_whole(prompt[-_NUM_BEFORE:])
        self._num_shown = len(self._decode())
        self._run = _ByteRun()
        self._holds = False
        self.num_before = 0
        decoder = tokenizer.backend.decoder
        steps: bytes = b"" if decoder is None else decoder.__getstate__()
        # Elsewhere U+FFFD is a token's whole text, and any number of them may follow each other.
        self._cuts_characters = b'"ByteLevel"' in steps
        self._joins_bytes = b'"ByteFallback"' in steps

    def append(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        self.num_before = 0
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None or (self._skip and token_id in self._tokenizer.special_ids):
            return ""
        self._window.append(token_id)
        is_joined = token_id in self._joined
        follows_joined, self._follows_joined = self._follows_joined, is_joined
        if BYTE_TOKEN.fullmatch(token):
            self._run.append(token)
            self._holds = True
            return ""
        self._run = _ByteRun()
        held = self._decode(self._window[:-1])[self._num_shown :] if self._holds else ""
        text = self._decode()
        # The last character may be a part of one that goes on.
        self._holds = self._cuts_characters and text.endswith("\ufffd")
        piece = text[self._num_shown : len(text) - self._holds]
        if is_joined and follows_joined:
            piece = held + token
        self.num_before = len(held) if piece.startswith(held) else 0
        self._window = self._window[-_MOST_CUT:] if self._holds else [token_id]
        self._num_shown = len(self._decode()) - self._holds
        return piece

    def finish(self) -> str:
        """See ``Detokenizer``."""
        piece = self._decode()[self._num_shown :]
        self._num_shown += len(piece)
        self._run = _ByteRun()
        return piece

    @property
    def held(self) -> str:
        """See ``Detokenizer``: the run of byte tokens, if its last character is whole."""
        return self._run.text if self._joins_bytes else ""

    def _last_whole(self, token_ids: Sequence[int]) -> list[int]:
        """The last token that is shown and cuts no character, if there is one."""
        for token_id in reversed(token_ids):
            is_shown = not (self._skip and token_id in self._tokenizer.special_ids)
            token = self._tokenizer.backend.id_to_token(token_id)
            is_whole = token is not None and not BYTE_TOKEN.fullmatch(token)
            if is_shown and is_whole and "\ufffd" not in self._tokenizer.decode_token(token_id):
                return [token_id]
        return []

    def _decode(self, token_ids: Sequence[int] | None = None) -> str:
        """The text of tokens, or of the window."""
        found = self._window if token_ids is None else token_ids
        return self._tokenizer.decode(found, skip_special_tokens=self._skip)


class _ByteRun:
    """The text of consecutive byte tokens."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._known = ""
        self._is_valid = True

    def append(self, token: str) -> None:
        """Add a byte token."""
        if not self._is_valid:
            return
        try:
            self._known += self._utf8.decode(bytes.fromhex(token[3:5]))
        except UnicodeDecodeError:
            # Then each of its bytes becomes U+FFFD.
            self._is_valid = False

    @property
    def text(self) -> str:
        """The run's text; empty if its last character is not whole."""
        pending, _ = self._utf8.getstate()
        return self._known if self._is_valid and not pending else ""


def _may_begin(found: bytes) -> bool:
    """Whether bytes are a character, or the beginning of one."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(found)
    except UnicodeDecodeError:
        return False
    return True


def _token_bytes(token: str) -> bytes:
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        # An added token holds plain text.
        return token.encode("utf-8")
