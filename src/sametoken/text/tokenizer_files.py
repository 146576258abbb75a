"""The files of a tokenizer: which there are, what is wrong with them, and how they are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sametoken.errors import CheckpointError, SametokenError, UnsupportedError
from sametoken.io.files import is_there, open_regular
from sametoken.models.load.files import read_json_object, unreadable
from sametoken.models.load.gguf_parts import read_first
from sametoken.text.gguf_tokenizer import LLAMA_3, TEKKEN, build_gguf_tokenizer, pre_tokenizer

#: Largest tokenizer file in bytes; the largest vocabularies take 40 MB.
MAX_BYTES = 2**28
_FILE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
#: Other JSON objects that transformers reads.
_EXTRA = ("special_tokens_map.json", "added_tokens.json")
#: The template of a model that also sees, until 2025; some tokenizers have none beside it.
_SEEING_TEMPLATE = "chat_template.json"
#: Classes whose ``add_bos_token`` transformers 4 obeys, whatever tokenizer.json does.
_LLAMA = ("LlamaTokenizer", "LlamaTokenizerFast")
#: Of Mistral's vocabularies alone.
_MISTRAL = "[AVAILABLE_TOOLS]"
#: Llama 3 splits it otherwise than Mistral.
_TELLING = "aB 123"
_READ = (".json", ".jinja", ".model", ".txt")
_REMEDY = "fetch it again, or give another tokenizer"


def read_tokenizer(path: Path) -> Any:
    """Read transformers' tokenizer from a directory, a ``tokenizer.json`` or a GGUF file.

    A file is GGUF unless its name ends in ``.json``, as those of some caches have no ending.

    Raises:
        CheckpointError: there is no tokenizer, or it is corrupt.
        UnsupportedError: a GGUF file holds an unknown kind of tokenizer, or the tokenizer needs
            Python code of the checkpoint.
    """
    source = _find_source(path)
    try:
        is_hf = source.is_dir() or source.suffix == ".json"
        return _from_hf(source) if is_hf else _from_gguf(source)
    except (SametokenError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # transformers and tokenizers raise bare Exception, OSError, ValueError and KeyError; a
        # Rust panic derives from BaseException.
        told = " ".join(f"{type(error).__name__}: {error}".split())
        cause = (
            f"{source} holds no {_FILE}, and its other files give no tokenizer"
            if source.is_dir() and not is_there(source / _FILE)
            else f"the tokenizer at {_faulty_file(source)} cannot be read"
        )
        raise CheckpointError(f"{cause} ({told})", _REMEDY) from error


def has_tokenizer(directory: Path) -> bool:
    """Whether a checkpoint directory has a tokenizer's files."""
    return any(is_there(directory / name) for name in (_FILE, _SETTINGS))


def _find_source(path: Path) -> Path:
    if path.is_file():
        return path
    if path.is_dir():
        if has_tokenizer(path):
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

    metadata = read_first(path).metadata
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
    from transformers import PreTrainedTokenizerFast

    if path.is_file():
        _require_readable(path)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    else:
        tokenizer = _from_directory(path)
        if not tokenizer.chat_template and is_there(path / _SEEING_TEMPLATE):
            tokenizer.chat_template = _seeing_template(path / _SEEING_TEMPLATE)
    _correct_mistral(tokenizer.backend_tokenizer)
    return tokenizer


def _from_directory(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    settings = _checked_settings(path)
    if (path / _FILE).is_file():
        # Reads the file unchanged: some architectures' classes rebuild it from its vocabulary.
        # Whether ``_correct_mistral`` corrects it or not, there is nothing to warn of.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, fix_mistral_regex=False
        )
        begins = settings.get("add_bos_token") is True and settings.get("tokenizer_class") in _LLAMA
        # transformers 5 passes over it. DeepSeek's files say so there alone.
        if begins and tokenizer.bos_token_id not in (None, *tokenizer.encode("")):
            tokenizer.add_bos_token = True
        return tokenizer
    if settings.get("auto_map"):
        raise UnsupportedError(
            f"{path / _SETTINGS} has an auto_map: the tokenizer needs Python code of the "
            "checkpoint, which is never run",
            "give a tokenizer that has a tokenizer.json",
        )
    # It imports torch, so only a tokenizer that has to be converted pays for it.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _correct_mistral(backend: Any) -> None:
    """Split words as Mistral does, where a file of its vocabulary does as Llama 3.

    So do files of Mistral Small 3, by mistake; transformers corrects them if asked to
    (transformers#42389).
    """
    given = backend.pre_tokenizer
    if backend.token_to_id(_MISTRAL) is None or given is None:
        return
    if given.pre_tokenize_str(_TELLING) == pre_tokenizer(LLAMA_3).pre_tokenize_str(_TELLING):
        backend.pre_tokenizer = pre_tokenizer(TEKKEN)


def _seeing_template(file: Path) -> str:
    template = read_json_object(file).get("chat_template")
    if not isinstance(template, str):
        raise CheckpointError(f"{file} holds no text chat_template", _REMEDY)
    return template


def _checked_settings(directory: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json, after checking every file that transformers reads."""
    for path in sorted(directory.iterdir()):
        # A folder of another name is nobody's file.
        if path.suffix in _READ and not (path.is_dir() and path.name != _FILE):
            _require_readable(path)
    objects = {
        name: read_json_object(directory / name)
        for name in (_SETTINGS, *_EXTRA)
        if is_there(directory / name)
    }
    return objects.get(_SETTINGS, {})


def _require_readable(path: Path) -> None:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise unreadable(path, "cannot be read", error, _REMEDY) from error
    if size > MAX_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, above {MAX_BYTES}", _REMEDY)


def _faulty_file(source: Path) -> Path:
    """The file that cannot be read, or the directory if that is unknown."""
    from tokenizers import Tokenizer as Backend

    file = source / _FILE
    if not file.is_file():
        return source
    try:
        Backend.from_file(str(file))
    except Exception:
        return file
    return source / _SETTINGS if (source / _SETTINGS).is_file() else source
