"""Checkpoints of the first EAGLE in the two layouts that the field publishes.

SafeAILab: config.json is that of a Llama of ``num_hidden_layers`` layers, mostly one, with
``bias`` for ``fc``; tensors are ``fc.weight``, maybe ``fc.bias``, ``layers.<i>.*`` without
``layers.0.input_layernorm`` and mostly ``embed_tokens.weight`` (``eagle/model/cnets1.py``;
the published heads hold ``pytorch_model.bin``).

``speculators`` (vllm-project): config.json has ``"speculators_model_type": "eagle"``, the
layer's config under ``transformer_layer_config``, ``fusion_bias`` and ``layernorms``; the
one layer is ``transformer.*`` whatever ``num_hidden_layers`` says, the rest ``fusion_fc.*``
(``models/eagle.py`` and ``convert/eagle/eagle_converter.py`` of its first releases).

Whether ``fc`` has a bias is read from the tensors: trainers write one though the config
says nothing (sgl-project/sglang#5773, vllm-project/vllm#22323).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.kernels.interface import Kernels, RotaryTable
from sametoken.layers.rotary import rotary_table
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import load_attention, load_mlp
from sametoken.models.eagle1 import Eagle1Config, Eagle1Head, Eagle1Layer
from sametoken.models.eagle_checkpoint import (
    UNUSED_TENSORS,
    SharedWeights,
    load_lm_head,
    load_norm,
    open_head,
    own_or_shared,
    read_layer_config,
    refuse,
    require_sizes,
)
from sametoken.models.huggingface import read_json_object
from sametoken.models.weights import Part, WeightReader


class Eagle1Checkpoint:
    """A directory that holds a head of the first EAGLE, as a ``HeadCheckpoint``.

    Args:
        directory: the head's.
        load_format: "auto", or "dummy" for random weights.

    Raises:
        CheckpointError: config.json is missing, malformed, or lacks a key.
        UnsupportedError: another kind of drafter, or a feature that is not implemented.
    """

    def __init__(self, directory: Path, *, load_format: str = "auto") -> None:
        self._directory = directory
        self._load_format = load_format
        location = directory / "config.json"
        self.config = _head_config(read_json_object(location), location)

    def require_fit(self, target: ModelConfig) -> None:
        """Refuse a head for a target of another vocabulary or hidden size."""
        require_sizes(self.config.layer.vocab_size, self.config.layer.hidden_size, target)

    def aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """None: the head reads what the target makes its logits from."""
        return ()

    def load(
        self,
        shared: SharedWeights,
        *,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        token_ids: Tensor | None = None,
        quantize_fp8: bool = False,
    ) -> Eagle1Head:
        """Read the weights; arguments and errors as in ``HeadCheckpoint``."""
        reader = open_head(
            self._directory,
            kernels,
            dtype,
            device,
            load_format=self._load_format,
            quantize_fp8=quantize_fp8,
        )
        layer = self.config.layer
        vocab_size, hidden_size = layer.vocab_size, layer.hidden_size
        rotary = rotary_table(
            layer.rope, head_dim=layer.head_dim, max_positions=max_positions, device=device
        )
        fc_bias = self.config.fc_bias or "fc.bias" in reader
        whole = own_or_shared(reader, "lm_head", vocab_size, hidden_size, shared.whole_head)
        head = Eagle1Head(
            kernels=kernels,
            embedding=own_or_shared(
                reader, "embed_tokens", vocab_size, hidden_size, lambda: shared.embedding
            ),
            fc=reader.linear(2 * hidden_size, Part("fc", hidden_size), bias=fc_bias),
            layers=tuple(_load_layer(reader, layer, i, rotary) for i in range(layer.num_layers)),
            lm_head=load_lm_head(reader, whole, token_ids),
            token_ids=token_ids,
        )
        reader.require_all_read(allowed=UNUSED_TENSORS)
        return head


def _head_config(config: Mapping[str, Any], location: Path) -> Eagle1Config:
    implied = "eagle3" if "draft_vocab_size" in config else "eagle"
    kind = config.get("speculators_model_type", implied)
    if kind != "eagle":
        raise UnsupportedError(
            f"{location} describes a {short(kind)} drafter", 'use a head for the method "eagle"'
        )
    refuse(
        location,
        (config.get("layernorms"), "layernorms"),
        (config.get("add_para_norm"), "add_para_norm"),
        (config.get("qkv_bias"), "qkv_bias"),
    )
    layer = read_layer_config(config, location)
    if "speculators_model_type" in config:
        layer = dataclasses.replace(layer, num_layers=1)
    return Eagle1Config(layer, fc_bias=bool(config.get("fusion_bias", config.get("bias", False))))


def _load_layer(
    reader: WeightReader, layer: ModelConfig, index: int, rotary: RotaryTable
) -> Eagle1Layer:
    prefix = f"layers.{index}"
    return Eagle1Layer(
        load_norm(reader, f"{prefix}.input_layernorm", layer) if index else None,
        load_attention(layer, reader, f"{prefix}.self_attn", rotary),
        load_norm(reader, f"{prefix}.post_attention_layernorm", layer),
        load_mlp(layer, reader, f"{prefix}.mlp"),
    )
