"""The output directory of a training: its figures, and weights in published formats.

Draft heads are in the ``speculators`` layout, which vLLM loads as well. Its keys are those of
vllm-project/speculators ``models/eagle3/config.py`` and ``config.py``, its tensors those of
``models/eagle3/core.py``. Embedding and verifier weights are left out: both engines take the
target's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sametoken.errors import CheckpointError, ConfigError, in_words
from sametoken.io.files import DirectoryLock, is_there, make_directory, replacing, write_text
from sametoken.models.base import ModelConfig
from sametoken.models.heads.mtp import PREFIX
from sametoken.models.load.files import INDEX, SINGLE, TRAINING, files_for_a_copy, weight_files
from sametoken.models.safetensors_file import write_safetensors
from sametoken.train.compute import Compute, choose_compute, enough_memory
from sametoken.train.loop import CHECKPOINT, not_written, require_same_training
from sametoken.train.networks import DecoderNetwork
from sametoken.train.options import LoopOptions
from sametoken.types.speculative_config import HEAD_NUM_TOKENS

_CONFIG = "config.json"
#: Answers to train on, beside the drafter that is trained on them.
TEXT = "text.jsonl"
#: Names that no checkpoint's own shards have.
_TARGET_FILE, _MODULE_FILE = "model-target.safetensors", "model-mtp.safetensors"


@contextmanager
def output_directory(directory: Path, *, resume: bool) -> Iterator[None]:
    """Create the output directory and lock it for one training.

    Args:
        directory: the output.
        resume: as for ``require_output``.

    Raises:
        ConfigError: as ``require_output``; or it cannot be created, or another training writes
            to it.
    """
    make_directory(directory)
    with DirectoryLock(directory, "wait for that training's end, or choose another output"):
        require_output(directory, resume=resume)
        yield


@contextmanager
def training_in(directory: Path, loop: LoopOptions, settings: dict[str, Any]) -> Iterator[Compute]:
    """Begin a training before its text and weights are read; yields where it runs.

    Args:
        directory: the output, locked until the training's end.
        loop: device, dtype, and whether to resume.
        settings: as for ``require_same_training``.

    Raises:
        ConfigError: as ``output_directory``, ``require_same_training`` and ``enough_memory``.
        CheckpointError: as ``require_same_training``.
        UnsupportedError: as ``choose_compute``.
    """
    with output_directory(directory, resume=loop.resume), enough_memory():
        require_same_training(directory, loop, settings)
        yield choose_compute(loop)


def require_output(directory: Path, *, resume: bool) -> None:
    """Refuse to start over where a training has been, which may have taken hours.

    Args:
        directory: the output.
        resume: the training goes on from a checkpoint, and may replace its own result.

    Raises:
        ConfigError: the directory holds a model or a checkpoint; with ``resume``, no checkpoint.
    """
    if resume:
        if not is_there(directory / CHECKPOINT):
            raise ConfigError(f"{directory / CHECKPOINT} does not exist", "leave resume out")
        return
    for name, what in ((_CONFIG, "a model"), (CHECKPOINT, "an unfinished training")):
        if is_there(directory / name):
            raise ConfigError(
                f"{directory} holds {what} already",
                "choose another output, remove it, or give --resume to go on from its checkpoint",
            )


def write_result(directory: Path, settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Write ``training.json``.

    Raises:
        ConfigError: the directory cannot be written.
    """
    text = json.dumps({"settings": settings, "result": result}, indent=2) + "\n"
    write_text(directory / TRAINING, text)


def write_decoder(directory: Path, config: dict[str, Any], network: DecoderNetwork) -> None:
    """Write config.json and model.safetensors, in bf16; the network takes the rounded weights.

    Raises:
        ConfigError: the directory cannot be written.
    """
    _write_checkpoint(directory, config, _rounded(network))


def write_with_module(source: Path, directory: Path, network: DecoderNetwork) -> None:
    """Copy a checkpoint and write the network's MTP module, in bf16, beside its weights.

    Weights are copied without an older MTP module, and of the other files those of
    ``files_for_a_copy``. The network takes the rounded weights.

    Raises:
        ConfigError: the directory cannot be written.
        CheckpointError: a file of weights cannot be read.
    """
    module = _rounded(network.mtp)
    tensors = {f"{PREFIX}.{name}": tensor for name, tensor in module.items()}
    _save(tensors, directory / _MODULE_FILE)
    files: dict[str, str] = {}
    for path in files_for_a_copy(source):
        copy_file(path, directory / path.name)
    for path in weight_files(source):
        # A file of the usual name would be read without the index.
        name = _TARGET_FILE if path.name == SINGLE else path.name
        names = _names_in(path)
        kept = [key for key in names if not key.startswith(f"{PREFIX}.")]
        if kept == names:
            copy_file(path, directory / name)
        elif kept:
            with safe_open(path, framework="pt") as file:
                _save({key: file.get_tensor(key) for key in kept}, directory / name)
        files |= dict.fromkeys(kept, name)
    files |= dict.fromkeys(tensors, _MODULE_FILE)
    write_text(directory / INDEX, json.dumps({"metadata": {}, "weight_map": files}, indent=1))
    # Last, as of every training: a directory that has it holds a model.
    copy_file(source / _CONFIG, directory / _CONFIG)


def _rounded(network: nn.Module) -> dict[str, Tensor]:
    """All tensors on the host in bf16, which the network takes over too."""
    tensors = {}
    for name, tensor in network.state_dict().items():
        rounded = tensor.to(torch.bfloat16)
        tensor.copy_(rounded)
        tensors[name] = rounded.cpu()
    return tensors


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The fields of a head's config.json.

    Attributes:
        layer: sizes of the decoder layer and of the target's vocabulary.
        draft_vocab_size: tokens that the head proposes.
        aux_layers: layers of the target whose inputs it reads.
        verifier: name of the target.
    """

    layer: ModelConfig
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    norm_before_residual: bool
    verifier: str


def write_head(directory: Path, layout: HeadLayout, tensors: dict[str, Tensor]) -> None:
    """Write a head's config.json and model.safetensors.

    Raises:
        ConfigError: the directory cannot be written.
    """
    _write_checkpoint(directory, _config(layout), tensors)


def _write_checkpoint(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    make_directory(directory)
    _save(tensors, directory / SINGLE)
    write_text(directory / _CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _config(layout: HeadLayout) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": HEAD_NUM_TOKENS,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": layout.verifier,
                "architectures": [layout.layer.architecture],
            },
        },
        "transformer_layer_config": _layer_config(layout.layer),
        "draft_vocab_size": layout.draft_vocab_size,
        "target_hidden_size": None,
        "norm_before_residual": layout.norm_before_residual,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": list(layout.aux_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _layer_config(layer: ModelConfig) -> dict[str, Any]:
    rope = dict(layer.rope)
    return {
        "model_type": "llama",
        "vocab_size": layer.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": layer.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
    }


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is truncated or corrupt ({in_words(error)})", "fetch or convert it again"
        ) from error


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        write_safetensors(path, tensors)
    except (OSError, SafetensorError) as error:
        raise not_written(path, error) from error


def copy_file(source: Path, path: Path) -> None:
    """Copy a file, whole or not at all.

    Raises:
        ConfigError: the copy cannot be written.
    """
    try:
        with replacing(path) as unfinished:
            shutil.copyfile(source, unfinished)
    except OSError as error:
        raise not_written(path, error) from error
