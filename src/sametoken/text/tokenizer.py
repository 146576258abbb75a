"""Text to token ids and back, over Hugging Face tokenizers and those in GGUF files.

A bound on what a chat template may run: its author wrote a program, and programs may not end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from sametoken.config import DUMMY, EngineConfig
from sametoken.errors import CheckpointError, RequestError, SametokenError, UnsupportedError
from sametoken.io.files import (
    is_there,
    open_regular,
)
from sametoken.models.load.gguf_file import read_gguf
from sametoken.models.load.huggingface import read_json_object
from sametoken.text.gguf_tokenizer import build_gguf_tokenizer

Messages = Sequence[Mapping[str, Any]]
#: Tokenizers may make one token of more characters than any token has: a run of spaces or of
#: characters that they do not know.
_MIN_TOKEN_CHARS = 128

#: Bytes of each of its files; those of the largest vocabularies have 40 MB.
MAX_BYTES = 2**28
_FILE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
#: Objects that transformers reads beside those two.
_BESIDE = ("special_tokens_map.json", "added_tokens.json")
_READ = (".json", ".jinja", ".model", ".txt")
_REMEDY = "fetch it again, or give another tokenizer"


class Tokenizer:
    """A Hugging Face tokenizer behind the few verbs that the engine uses.

    Attributes:
        hf: the Hugging Face tokenizer itself.
        backend: the ``tokenizers.Tokenizer`` that it drives.
        special_ids: tokens that ``skip_special_tokens`` leaves out.
    """

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.backend = hf.backend_tokenizer
        self.special_ids = frozenset(
            token_id for token_id, token in hf.added_tokens_decoder.items() if token.special
        )

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if the tokenizer names one."""
        token_id: int | None = self.hf.eos_token_id
        return token_id

    @cached_property
    def max_token_chars(self) -> int:
        """The most characters that a text may have for each of its tokens."""
        return max(_MIN_TOKEN_CHARS, *map(len, self.hf.get_vocab()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text; special tokens written out in it count as such.

        Raises:
            RequestError: the text holds a lone surrogate, half of a character.
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
        """Text of token ids; bytes that form no character become U+FFFD."""
        text: str = self.hf.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def decode_token(self, token_id: int) -> str:
        """Text of one token on its own, special tokens written out."""
        return self.decode((token_id,), skip_special_tokens=False)

    def apply_chat_template(self, messages: Messages, **options: Any) -> str:
        """The prompt text of a conversation.

        Args:
            messages: ``{"role": ..., "content": ...}`` in order.
            options: as transformers has them: ``add_generation_prompt``, ``chat_template``,
                and whatever the template itself reads.

        Raises:
            RequestError: there is no chat template, or it refuses the messages.
        """
        if not options.get("chat_template") and not self.hf.chat_template:
            raise RequestError(
                "the model has no chat template", "use generate, or give chat_template"
            )
        try:
            with bounded_steps():
                text: str = self.hf.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, **options
                )
        except Exception as error:
            # Templates are programs of the checkpoint's author and raise what they like.
            raise RequestError(
                f"the chat template refuses the messages: {error}",
                'give a list of {"role": ..., "content": ...}',
            ) from error
        return text


def require_own_end(tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Refuse a tokenizer that ends texts by what is no token of the model.

    Raises:
        CheckpointError: it does.
    """
    own = None if tokenizer is None else tokenizer.eos_token_id
    if own is not None and own >= vocab_size:
        raise CheckpointError(
            f"the tokenizer ends texts by token {own}, and the model has {vocab_size} tokens",
            "give the model's own tokenizer",
        )


def all_eos_ids(model_ids: tuple[int, ...], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end a text: the model's, and the tokenizer's if it names another."""
    own = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(dict.fromkeys((*model_ids, *(() if own is None else (own,)))))


def load_tokenizer_of(config: EngineConfig, model_path: Path) -> Tokenizer | None:
    """The tokenizer that the options ask for: the model's own unless they name another.

    None if they want none, and for dummy weights without one beside them.

    Raises:
        CheckpointError, UnsupportedError: as ``load_tokenizer``.
    """
    chosen = Path(config.tokenizer) if config.tokenizer else model_path
    is_left_out = config.load_format == DUMMY and config.tokenizer is None and not _has_one(chosen)
    return None if config.skip_tokenizer_init or is_left_out else load_tokenizer(chosen)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load from a checkpoint directory, a ``tokenizer.json``, or a GGUF file.

    Raises:
        CheckpointError: nothing is there, or it is corrupt.
        UnsupportedError: a GGUF file holds a kind of tokenizer that is not known, or only
            Python code of the checkpoint could make the tokenizer.
    """
    source = _find_source(path)
    try:
        return Tokenizer(_from_gguf(source) if source.suffix == ".gguf" else _from_hf(source))
    except (SametokenError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # transformers and tokenizers raise bare Exception, OSError, ValueError and KeyError; what
        # panics in Rust is no Exception at all.
        raise CheckpointError(
            f"the tokenizer at {_culprit(source)} cannot be read ({type(error).__name__}: {error})",
            _REMEDY,
        ) from error


def _has_one(directory: Path) -> bool:
    return any(is_there(directory / name) for name in (_FILE, _SETTINGS))


def _find_source(path: Path) -> Path:
    if path.is_file() and path.suffix in (".gguf", ".json"):
        return path
    if path.is_dir():
        if _has_one(path):
            return path
        gguf_files = sorted(path.glob("*.gguf"))
        if gguf_files:
            return gguf_files[0]
    raise CheckpointError(
        f"no tokenizer at {path}",
        "give a directory with tokenizer.json or a GGUF file, or set skip_tokenizer_init",
    )


def _from_gguf(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    metadata = read_gguf(path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    special = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            special[name] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    backend = build_gguf_tokenizer(metadata)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)


def _from_hf(path: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.is_file():
        _require_readable(path)
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    settings = _checked_settings(path)
    if (path / _FILE).is_file():
        # The file as it is: the classes of some architectures rebuild it from its vocabulary.
        return PreTrainedTokenizerFast.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    if settings.get("auto_map"):
        raise UnsupportedError(
            f"{path / _SETTINGS} has an auto_map: only Python code of the checkpoint could make "
            "its tokenizer, and that is never run",
            "give a tokenizer that has a tokenizer.json",
        )
    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _checked_settings(directory: Path) -> dict[str, Any]:
    """What tokenizer_config.json says, once all that transformers may open can be opened."""
    for path in sorted(directory.iterdir()):
        if path.suffix in _READ:
            _require_readable(path)
    objects = {
        name: read_json_object(directory / name)
        for name in (_SETTINGS, *_BESIDE)
        if is_there(directory / name)
    }
    return objects.get(_SETTINGS, {})


def _require_readable(path: Path) -> None:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error})", _REMEDY) from error
    if size > MAX_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, above {MAX_BYTES}", _REMEDY)


def _culprit(source: Path) -> Path:
    """The file at fault where a tokenizer cannot be read, as far as that can be told."""
    from tokenizers import Tokenizer as Backend

    file = source / _FILE
    if not file.is_file():
        return source
    try:
        Backend.from_file(str(file))
    except Exception:
        return file
    return source / _SETTINGS if (source / _SETTINGS).is_file() else source


#: Lines that one rendering may run. A conversation of 1000 messages takes some 30,000.
MAX_STEPS = 1_000_000

_TEMPLATE = "<template>"


@contextmanager
def bounded_steps(most: int = MAX_STEPS) -> Iterator[None]:
    """Within the block, templates that this thread renders run ``most`` lines, loops counted.

    Raises:
        RuntimeError: out of the template, after the last of them.
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
