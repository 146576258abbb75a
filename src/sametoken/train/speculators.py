"""Heads on disk in the ``speculators`` layout, which vLLM loads as well.

Keys are those of vllm-project/speculators ``models/eagle3/config.py`` and ``config.py``;
tensors those of ``models/eagle3/core.py``. Embedding and verifier weights are left out: both
engines take the target's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sametoken.errors import ConfigError, UnsupportedError
from sametoken.models.base import ModelConfig


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """What a head's config.json says beside its layer.

    Attributes:
        layer: sizes of the decoder layer and of the target's vocabulary.
        draft_vocab_size: tokens that the head proposes.
        aux_layers: layers of the target whose inputs it reads.
        num_speculative_tokens: drafts that it is meant for.
        verifier: name of the target.
    """

    layer: ModelConfig
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    norm_before_residual: bool
    num_speculative_tokens: int
    verifier: str


def write_head(directory: Path, layout: HeadLayout, tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors.

    Raises:
        ConfigError: the directory cannot be written.
        UnsupportedError: the target's rotary settings have no name in a config.json.
    """
    config = json.dumps(_config(layout), indent=2, sort_keys=True) + "\n"
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(config, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{directory} cannot be written ({error})", "make room or choose another output"
        ) from error


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
                    "speculative_tokens": layout.num_speculative_tokens,
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
    if rope["rope_type"] == "divided":
        raise UnsupportedError(
            "the target's rotary frequencies come from a GGUF file's divisors",
            "train from the Hugging Face checkpoint of the same model",
        )
    config: dict[str, Any] = {
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
    return config
