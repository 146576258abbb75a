"""Tokenizers of models, and chat templates with a step limit."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from sametoken.config import DUMMY, EngineConfig
from sametoken.errors import (
    CheckpointError,
    ConfigError,
    DrafterMismatchError,
    RequestError,
    in_words,
)
from sametoken.io.cache_directory import expanded
from sametoken.io.files import is_there
from sametoken.models.hub import HubId, Needed, cached_on_hub
from sametoken.models.names import resolve_model
from sametoken.text.template_inputs import Messages as Messages
from sametoken.text.template_inputs import eased, readable, readable_tools, shows_instructions
from sametoken.text.tokenizer_files import has_tokenizer, read_tokenizer

_logger = logging.getLogger(__name__)

#: One token may cover more characters than any vocabulary entry: a run of spaces or of unknown
#: characters.
_MIN_TOKEN_CHARS = 128

#: How SentencePiece writes a space, as a character or as a byte.
_SPACES = ("\u2581", "<0x20>")
#: A token that SentencePiece names by its byte.
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte-to-character map: printable bytes unchanged, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    unchanged = {chr(byte): byte for byte in printable}
    return unchanged | {chr(0x100 + i): byte for i, byte in enumerate(others)}


#: The byte of each character in which byte-level vocabularies are written.
BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A Hugging Face tokenizer behind the few methods that the engine uses.

    Attributes:
        hf: the Hugging Face tokenizer.
        backend: its ``tokenizers.Tokenizer``.
        special_ids: tokens that ``skip_special_tokens`` leaves out.
    """

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.backend = hf.backend_tokenizer
        self.special_ids = frozenset(
            token_id for token_id, token in hf.added_tokens_decoder.items() if token.special
        )
        # At most one of each token of the vocabulary.
        self._token_texts: dict[int, str] = {}

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-text token id, if the tokenizer has one."""
        token_id: int | None = self.hf.eos_token_id
        return token_id

    @property
    def chat_template(self) -> str:
        """The Jinja text of the chat template, or of all by name; empty: there is none."""
        given = self.hf.chat_template or ""
        return "\n".join(given.values()) if isinstance(given, dict) else str(given)

    @cached_property
    def max_token_chars(self) -> int:
        """Upper bound of a text's characters per token."""
        return max(_MIN_TOKEN_CHARS, *map(len, self.hf.get_vocab()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text; special tokens written out in it are recognized.

        Raises:
            RequestError: the text holds a lone surrogate.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a lone surrogate at character {error.start}",
                "give valid Unicode text",
            ) from error
        return tuple(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD."""
        text: str = self.hf.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def decode_token(self, token_id: int) -> str:
        """Text of a single token within a text, special tokens included.

        Decoded once: log-probabilities name up to 21 candidates at every position.
        """
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self._decode_token(token_id)
        return self._token_texts[token_id]

    def _decode_token(self, token_id: int) -> str:
        text = self.decode((token_id,), skip_special_tokens=False)
        if not (self.backend.id_to_token(token_id) or "").startswith(_SPACES):
            return text
        # Decoders of SentencePiece take the space from the beginning of a text.
        twice = self.decode((token_id, token_id), skip_special_tokens=False)
        return twice[len(text) :]

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that is a part of a character; None where no name tells them.

        Vocabularies name such a token as in ``BYTE_TOKEN``, or in characters of ``BYTE_OF``.
        """
        token = self.backend.id_to_token(token_id) or ""
        if BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        is_known = token != "" and all(character in BYTE_OF for character in token)
        return bytes(BYTE_OF[character] for character in token) if is_known else None

    def apply_chat_template(self, messages: Messages, **options: Any) -> str:
        """The prompt text of a conversation.

        Args:
            messages: ``{"role": ..., "content": ...}`` in order.
            options: those of transformers (``add_generation_prompt``, ``chat_template``) and
                variables of the template.

        Raises:
            RequestError: there is no chat template, or it refuses the messages.
        """
        given = options.get("chat_template")
        if not (given or self.chat_template):
            raise RequestError(
                "the model has no chat template", "give a text to continue, or chat_template"
            )
        try:
            template = self.hf.get_chat_template(given, options.get("tools"))
            text = self._render(messages, options, str(template))
        except TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template has no valid Jinja at line {error.lineno} ({error})",
                "repair the template",
            ) from error
        except Exception as error:
            # A template is a program of the checkpoint's author and may raise anything.
            raise RequestError(
                f"the chat template refuses the messages: {error}",
                "change the messages, or the template's options",
            ) from error
        return text

    def _render(self, messages: Messages, options: dict[str, Any], template: str) -> str:
        """The text of a conversation, eased if the template refuses it or drops instructions.

        Raises:
            Exception: the template refuses all that, or it fails.
        """
        given = readable(messages, template), readable_tools(options, template)
        shown: list[str] = []
        refusals: list[TemplateError] = []
        for form in chain([given], eased(*given, template)):
            try:
                shown.append(self._render_once(*form))
            except TemplateSyntaxError:
                raise
            except TemplateError as error:
                refusals.append(error)
                continue
            if shows_instructions(shown[-1], form[0]):
                return shown[-1]
        if shown:
            return shown[0]
        raise refusals[0]

    def _render_once(self, messages: Messages, options: dict[str, Any]) -> str:
        with bounded_steps():
            text: str = self.hf.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, **options
            )
        return text


def require_tokenizer(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    """The tokenizer, for ``what`` needs one.

    Raises:
        RequestError: there is none.
    """
    if tokenizer is None:
        raise RequestError(
            f"{what} needs a tokenizer but skip_tokenizer_init is set",
            'give {"prompt_token_ids": [...]}, or load the tokenizer',
        )
    return tokenizer


def require_own_end(tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Refuse a tokenizer whose end-of-text id is outside the model's vocabulary.

    Raises:
        CheckpointError: it is outside.
    """
    eos_id = None if tokenizer is None else tokenizer.eos_token_id
    if eos_id is not None and eos_id >= vocab_size:
        raise CheckpointError(
            f"the tokenizer ends texts with token {eos_id}, and the model has {vocab_size} tokens",
            "give the model's own tokenizer",
        )


def require_same_tokens(draft: Tokenizer, target: Tokenizer) -> None:
    """Refuse a draft model to which an id is another token than to its target.

    Padding is none, which GGUF files name by its id.

    Raises:
        DrafterMismatchError: an id that both have is.
    """
    own = {token_id: token for token, token_id in draft.hf.get_vocab().items()}
    for token, token_id in target.hf.get_vocab().items():
        padding = f"[PAD{token_id}]"
        if padding != token and own.get(token_id, token) not in (token, padding):
            raise DrafterMismatchError(
                f"token {token_id} is {own[token_id]!r} to the draft model and {token!r} to the"
                " target",
                "use a draft model of the same vocabulary",
            )


def all_eos_ids(model_ids: tuple[int, ...], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """End-of-text token ids of the model and of the tokenizer, without duplicates."""
    eos_id = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(dict.fromkeys((*model_ids, *(() if eos_id is None else (eos_id,)))))


def load_tokenizer_here(config: EngineConfig) -> Tokenizer | None:
    """``load_tokenizer_of`` where the tokenizer's name is a path or of a cached model; else None.

    For a caller that has a second to spare: then at least the library is imported.

    Raises:
        CheckpointError, UnsupportedError, ConfigError: as ``load_tokenizer_of``.
    """
    name = config.tokenizer or config.model
    path = expanded(name)
    hub_id = None if is_there(path) or config.skip_tokenizer_init else HubId.parse(name)
    if hub_id is not None:
        # Weights come last: where they are cached, no other file is on its way.
        path = cached_on_hub(hub_id) or path
    if has_tokenizer(path) or (path.suffix == ".gguf" and is_there(path)):
        return load_tokenizer_of(config, path)
    if not config.skip_tokenizer_init:
        from transformers import PreTrainedTokenizerFast  # noqa: F401
    return None


def load_tokenizer_of(config: EngineConfig, model_path: Path) -> Tokenizer | None:
    """The configured tokenizer: ``config.tokenizer``, else the model's own, with its template.

    None with ``skip_tokenizer_init``, and for dummy weights whose directory has none.

    Raises:
        CheckpointError, UnsupportedError: as ``load_tokenizer`` and ``resolve_model``.
        ConfigError: ``config.chat_template`` cannot be read, or is no Jinja.
    """
    if config.skip_tokenizer_init:
        return None
    chosen = model_path
    if config.tokenizer is not None:
        chosen = resolve_model(config.tokenizer, _logger.info, Needed.TOKENIZER)
    elif config.load_format == DUMMY and not has_tokenizer(chosen):
        return None
    tokenizer = load_tokenizer(chosen)
    if config.chat_template is not None:
        _set_template(tokenizer, Path(config.chat_template))
    return tokenizer


def _set_template(tokenizer: Tokenizer, path: Path) -> None:
    """Replace the chat template by a file's."""
    try:
        tokenizer.hf.chat_template = path.read_text(encoding="utf-8")
        tokenizer.apply_chat_template([{"role": "user", "content": ""}])
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({in_words(error)})", "give a file of Jinja"
        ) from error
    except RequestError as error:
        # What it refuses in a message is the template's right; its syntax is not.
        if isinstance(error.__cause__, TemplateSyntaxError):
            raise ConfigError(
                f"{path} has no valid Jinja at line {error.__cause__.lineno} ({error.__cause__})",
                "repair the template",
            ) from error


def load_tokenizer(path: Path) -> Tokenizer:
    """Load from a checkpoint directory, a ``tokenizer.json``, or a GGUF file.

    Raises:
        CheckpointError, UnsupportedError: see ``tokenizer_files.read_tokenizer``.
    """
    return Tokenizer(read_tokenizer(path))


#: Lines that one rendering may execute. A conversation of 1000 messages takes about 30,000.
MAX_STEPS = 1_000_000

_TEMPLATE = "<template>"


@contextmanager
def bounded_steps(most: int = MAX_STEPS) -> Iterator[None]:
    """Limit the lines, loop iterations included, that templates execute in this thread.

    A template is a program of the checkpoint's author and may never end.

    Raises:
        RuntimeError: from within the template, at line ``most`` + 1.
    """
    left = most

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError(f"it runs more than {most} lines")
        return count

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return count if frame.f_code.co_filename == _TEMPLATE else None

    outer = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(outer)
