"""Qwen3.5's decoder and its multi-token-prediction (MTP) module, made of transformers' modules."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from sametoken.models.base import ModelConfig
from sametoken.models.layer_types import FULL, LINEAR
from sametoken.models.qwen3_5 import gated_delta_rule
from sametoken.train.llama import sizes_of
from sametoken.train.unrolled import UNROLLED, DraftModule, UnrolledKV, shifted

# The function in PyTorch, out of the wrapper that calls flash-linear-attention where that is
# installed: its kernels take no fp32 and no CPU.
_chunked_rule = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)


def hybrid_model(config: ModelConfig) -> Any:
    """The decoder without its lm_head."""
    model = AutoModel.from_config(_transformers_config(config, layer_kinds(config)))
    for index, layer in enumerate(model.layers):
        if hasattr(layer, "linear_attn"):
            layer.linear_attn = GatedDeltaNet(model.config, index)
    return model


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule over whole sequences from a state of zero, [B, L, Hv, Dv] fp32.

    Args:
        q, k: [B, L, Hk, Dk]; each is normalised and serves Hv / Hk adjacent value heads.
        v: [B, L, Hv, Dv].
        log_decay, beta: [B, L, Hv].
    """
    ratio = v.shape[2] // k.shape[2]
    q, k = (x.float().repeat_interleave(ratio, dim=2) for x in (q, k))
    read: Tensor
    read, _ = _chunked_rule(q, k, v.float(), g=log_decay, beta=beta, use_qk_l2norm_in_kernel=True)
    return read


class GatedDeltaNet(Qwen3_5GatedDeltaNet):  # type: ignore[misc]
    """transformers' block with the gated delta rule in fp32 and recomputed for gradients.

    Under autocast the original runs the products of the rule in bf16, and it keeps every chunk's
    matrices for the backward pass.
    """

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """[B, L, hidden] to the same."""
        mixed = functional.pad(
            self.in_proj_qkv(hidden_states).transpose(1, 2), (self.conv_kernel_size - 1, 0)
        )
        mixed = functional.silu(functional.conv1d(mixed, self.conv1d.weight, groups=self.conv_dim))
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        q, k, v = torch.split(mixed.transpose(1, 2), sizes, dim=-1)
        q, k = (torch.unflatten(x, -1, (self.num_k_heads, -1)) for x in (q, k))
        v = torch.unflatten(v, -1, (self.num_v_heads, -1))
        steps = functional.softplus(self.in_proj_a(hidden_states).float() + self.dt_bias)
        log_decay = -self.A_log.float().exp() * steps
        beta = self.in_proj_b(hidden_states).float().sigmoid()
        with torch.autocast(hidden_states.device.type, enabled=False):
            read = checkpoint(
                delta_rule, q, k, v, log_decay, beta, use_reentrant=False, preserve_rng_state=False
            )
        gate = torch.unflatten(self.in_proj_z(hidden_states), -1, read.shape[-2:])
        output: Tensor = self.out_proj(self.norm(read, gate).flatten(2))
        return output


class MTPModule(DraftModule):
    """The multi-token-prediction module of Qwen3.5, as ``models/heads/mtp.py`` runs it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden, eps)
        layer = _transformers_config(config, [FULL], attn_implementation=UNROLLED)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(layer, 0)])
        self.norm = Qwen3_5RMSNorm(hidden, eps)
        self.rotary = Qwen3_5TextRotaryEmbedding(layer)

    def unroll(
        self, embedding: Tensor, token_ids: Tensor, states: Tensor, k: int
    ) -> Iterator[Tensor]:
        """See ``DraftModule``."""
        (layer,) = self.layers
        kv, hidden = UnrolledKV(), states
        rows = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        for step in range(k):
            embedded = functional.embedding(shifted(token_ids, 1 + step), embedding)
            parts = (
                self.pre_fc_norm_embedding(embedded.to(hidden.dtype)),
                self.pre_fc_norm_hidden(hidden),
            )
            residual = self.fc(torch.cat(parts, dim=-1))
            # Only the dtype of ``embedding`` counts here: fp32 even under autocast.
            positions = self.rotary(embedding, rows + step)
            hidden = self.norm(layer(residual, position_embeddings=positions, unrolled_kv=kv))
            yield hidden


def layer_kinds(config: ModelConfig) -> list[str]:
    """The kind of each layer of a hybrid, as a config's ``layer_types`` names them."""
    implied = [FULL if (i + 1) % 4 == 0 else LINEAR for i in range(config.num_layers)]
    named = config.extra.get("layer_types") or implied
    return [FULL if kind == FULL else LINEAR for kind in named]


def _transformers_config(
    config: ModelConfig, kinds: list[str], **options: Any
) -> Qwen3_5TextConfig:
    """transformers' config of a hybrid with layers of these kinds."""
    rule = gated_delta_rule(config, config.architecture)
    return Qwen3_5TextConfig(
        **sizes_of(config) | {"num_hidden_layers": len(kinds)},
        layer_types=kinds,
        linear_num_key_heads=rule.num_key_heads,
        linear_num_value_heads=rule.num_value_heads,
        linear_key_head_dim=rule.key_dim,
        linear_value_head_dim=rule.value_dim,
        linear_conv_kernel_dim=rule.conv_kernel,
        **options,
    )
