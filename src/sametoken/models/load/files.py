"""The files of a Hugging Face checkpoint: JSON objects, and which files hold the weights.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath, PureWindowsPath
from reprlib import repr as short
from typing import Any

from sametoken.errors import CheckpointError, UnsupportedError, in_words
from sametoken.io.files import is_there, read_json
from sametoken.models.load.settings import NO_SETTINGS, Settings

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SINGLE_PICKLED = "pytorch_model.bin"
INDEX_PICKLED = "pytorch_model.bin.index.json"
OF_MODELOPT = "hf_quant_config.json"
#: How weights are quantized, by writers that leave it out of config.json: ModelOpt until 2025,
#: AutoGPTQ and AutoAWQ until 2023.
QUANTIZATION_FILES = (OF_MODELOPT, "quantize_config.json", "quant_config.json")
ADAPTER_CONFIG = "adapter_config.json"
#: An adapter's tensors, the first one that is there.
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PICKLED = (".bin", ".pt", ".pth")
#: The figures of a training, which ``sametoken train`` writes.
TRAINING = "training.json"
#: A model's card and figures: a copy with other weights has others.
_OF_ITS_OWN = ("README.md", "acceptance.json", TRAINING)
#: Endings of tokenizers, templates and code; licences have none.
_COPIED = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py", "")
#: Longest file name on any system.
MAX_NAME_BYTES = 255
AGAIN = "download the checkpoint again"


def unreadable(path: Path, fault: str, error: Exception, remedy: str = AGAIN) -> CheckpointError:
    """The error of a file that was opened or parsed in vain.

    Args:
        path: the file.
        fault: what is said of it, unless the system refuses access: a copy would be refused too.
        error: the cause.
        remedy: of the fault.
    """
    if isinstance(error, PermissionError):
        fault, remedy = "cannot be read", "check its permissions, and those of its folders"
    return CheckpointError(f"{path} {fault} ({in_words(error)})", remedy)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a checkpoint's JSON file.

    Raises:
        CheckpointError: the file or its directory is missing or unreadable, or it is not a JSON
            object.
    """
    try:
        value = read_json(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} holds no {path.name}", "give a checkpoint directory or a GGUF file"
        ) from error
    except NotADirectoryError as error:
        raise CheckpointError(
            f"{path.parent} is not a directory", "give a checkpoint directory"
        ) from error
    except (OSError, ValueError) as error:
        raise unreadable(path, "cannot be read as JSON", error) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object", AGAIN)
    return value


def read_settings(path: Path) -> Settings:
    """The settings in a checkpoint's JSON file; errors as ``read_json_object``."""
    return Settings(read_json_object(path), str(path))


def read_generation_config(directory: Path) -> Settings:
    """The settings of generation_config.json; empty without the file.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    path = directory / "generation_config.json"
    return read_settings(path) if is_there(path) else NO_SETTINGS


def weight_files(directory: Path) -> list[Path]:
    """The files with the weights of a directory, all of one format.

    Raises:
        CheckpointError: there are none, or the index is malformed or lists a missing file.
        UnsupportedError: only pickled files of unknown content.
    """
    names = [path.name for path in directory.iterdir()]
    chosen = choose_weights(names, directory, directory.joinpath)
    missing = [name for name in chosen if name not in names]
    if missing:
        raise CheckpointError(
            f"the index of {directory} lists {missing[0]}, which is not there", AGAIN
        )
    return [directory / name for name in chosen]


def files_for_a_copy(directory: Path) -> list[Path]:
    """What a copy with changed weights takes over as it is: tokenizer, template, licence, code.

    Left out are weights, config.json, and the card and figures of the model.
    """
    left_out = ("config.json", INDEX, INDEX_PICKLED, *_OF_ITS_OWN)
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in left_out
        and path.suffix in _COPIED
    ]


def choose_weights(
    names: Collection[str], location: object, index: Callable[[str], Path]
) -> list[str]:
    """The names of the files with the weights, among those of a checkpoint.

    safetensors go before pickled files.

    Args:
        names: the checkpoint's files.
        location: the checkpoint, for messages.
        index: the path of the index of a name; called if it decides.

    Raises:
        CheckpointError: there are none, or the index is malformed.
        UnsupportedError: only pickled files of unknown content.
    """
    listed = _shards(index(INDEX)) if INDEX in names else []
    # An index that names the single file too has more: AutoRound adds modules in a file of their
    # own. Any other one beside it is left over.
    if SINGLE in names and SINGLE not in listed:
        return [SINGLE]
    if listed:
        return listed
    files = sorted(name for name in names if name.endswith(".safetensors"))
    if files:
        return files
    if SINGLE_PICKLED in names:
        return [SINGLE_PICKLED]
    if INDEX_PICKLED in names:
        return _shards(index(INDEX_PICKLED))
    pickled = sorted(name for name in names if name.endswith(PICKLED))
    if pickled:
        raise UnsupportedError(
            f"{location} holds pickled files only, and none is {SINGLE_PICKLED} ({pickled[0]})",
            "convert the weights to safetensors",
        )
    raise CheckpointError(f"{location} holds no safetensors file", AGAIN)


def choose_adapter_weights(names: Collection[str], location: object) -> str:
    """The name of the file with an adapter's tensors, among those of its directory.

    Raises:
        CheckpointError: the files are not those of an adapter in PEFT's format.
    """
    found = next((name for name in ADAPTER_WEIGHTS if name in names), None)
    if found is None or ADAPTER_CONFIG not in names:
        missing = " or ".join(ADAPTER_WEIGHTS) if ADAPTER_CONFIG in names else ADAPTER_CONFIG
        raise CheckpointError(f"{location} holds no {missing}", "give an adapter in PEFT's format")
    return found


def _shards(index: Path) -> list[str]:
    """The files of a weight map, all in its own folder."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map", AGAIN)
    names = list(weight_map.values())
    for name in names:
        if not isinstance(name, str) or not _is_plain(name):
            raise CheckpointError(
                f"{index} lists {short(name)}, which is no name of a file beside it", AGAIN
            )
    return list(dict.fromkeys(names))


def _is_plain(name: str) -> bool:
    """Whether a name stays within its folder, on any system."""
    is_one = name == PurePosixPath(name).name == PureWindowsPath(name).name
    fits = len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES
    return is_one and fits and name not in ("", "..") and "\0" not in name
