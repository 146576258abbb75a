"""A frozen target's forward pass over whole sequences, in the engine's arithmetic.

It reads the engine's checkpoints, GGUF included. Norms are in fp32 and rounded once, and the
residual stream has the dtype of the weights. transformers' modules round a bf16 norm twice, so
they do not serve here: hidden states equal the engine's up to the order of addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.layers.rotary import rotary_table
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import DERIVED_TENSORS, HEAD
from sametoken.models.layer_types import require_supported
from sametoken.models.load.quantization import require_unquantized
from sametoken.models.load.sources import TensorSource, require_finite
from sametoken.models.loader import open_checkpoint
from sametoken.train.compute import Compute
from sametoken.types.option_values import listed

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class TargetStates:
    """States of a forward pass, [B, L, ...] each.

    Attributes:
        auxiliary: [B, L, num_aux * hidden], the residual streams that enter the chosen layers.
        last: [B, L, hidden], after the final norm.
    """

    auxiliary: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """A target's config, and its tensors, which have the names and shapes that it wants."""

    config: ModelConfig
    source: TensorSource


def open_target(path: Path) -> TargetFiles:
    """Open a checkpoint directory or a GGUF file, before weights are read.

    Raises:
        CheckpointError: a tensor is missing, or has another shape than the config wants.
        UnsupportedError: the architecture or a setting is not implemented here.
    """
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    require_unquantized(config.extra, str(path), "a target in training")
    source = checkpoint.open_tensors()
    if config.architecture not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{path} is a {config.architecture}, which cannot be a target in training",
            f"use a {listed(_ARCHITECTURES)}",
        )
    require_supported(config, frozenset(("full_attention",)), source.location)
    _require_tensors(source, config)
    return TargetFiles(config, source)


class FrozenTarget:
    """A dense decoder with frozen weights.

    Args:
        files: its config and tensors.
        compute: dtype and device of weights and activations.
        aux_layers: layers whose input is kept, as ``Decoder`` counts them.
        max_positions: longest sequence, padding included.

    Attributes:
        config: the architecture.
        embedding: [V, hidden].
        head: [V, hidden]; with tied embeddings the same tensor.
        final_norm: [hidden].

    Raises:
        CheckpointError: a tensor is not finite.
    """

    def __init__(
        self,
        files: TargetFiles,
        compute: Compute,
        *,
        aux_layers: tuple[int, ...],
        max_positions: int,
    ) -> None:
        self.config = files.config
        self._weights = _read(files, compute)
        self._aux_layers = aux_layers
        self.embedding = self._weights["model.embed_tokens.weight"]
        self.head = self._weights.get(HEAD, self.embedding)
        self.final_norm = self._weights["model.norm.weight"]
        self._rotary = rotary_table(
            self.config.rope,
            head_dim=self.config.head_dim,
            max_positions=max_positions,
            device=compute.device,
        )

    @torch.no_grad()
    def states(self, token_ids: Tensor) -> TargetStates:
        """[B, L] int64 to hidden states; padding on the right changes no row before it."""
        residual = self.embedding[token_ids]
        kept: dict[int, Tensor] = {}
        for index in range(self.config.num_layers):
            if index in self._aux_layers:
                kept[index] = residual
            residual = self._layer(residual, f"model.layers.{index}")
        kept[self.config.num_layers] = residual
        auxiliary = [kept[index] for index in self._aux_layers] or [residual[..., :0]]
        return TargetStates(torch.cat(auxiliary, dim=-1), self._norm(residual, "model.norm"))

    def _layer(self, residual: Tensor, prefix: str) -> Tensor:
        normed = self._norm(residual, f"{prefix}.input_layernorm")
        residual = residual + self._attention(normed, f"{prefix}.self_attn")
        normed = self._norm(residual, f"{prefix}.post_attention_layernorm")
        gate = self._linear(normed, f"{prefix}.mlp.gate_proj")
        up = self._linear(normed, f"{prefix}.mlp.up_proj")
        gated = functional.silu(gate.float()) * up.float()
        return residual + self._linear(gated.to(up.dtype), f"{prefix}.mlp.down_proj")

    def _attention(self, x: Tensor, prefix: str) -> Tensor:
        q, k, v = (
            torch.unflatten(
                self._linear(x, f"{prefix}.{name}_proj"), -1, (-1, self.config.head_dim)
            )
            for name in "qkv"
        )
        if f"{prefix}.q_norm.weight" in self._weights:
            q, k = self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm")
        cos, sin = (table[: x.shape[1], None] for table in (self._rotary.cos, self._rotary.sin))
        attended = functional.scaled_dot_product_attention(
            rotated(q, cos, sin).transpose(1, 2),
            rotated(k, cos, sin).transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return self._linear(attended.transpose(1, 2).flatten(2), f"{prefix}.o_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self._weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self._weights.get(f"{name}.bias")
        return functional.linear(x, self._weights[f"{name}.weight"], bias)


def require_layers(aux_layers: tuple[int, ...], config: ModelConfig) -> None:
    """Refuse layers that the target lacks.

    Raises:
        ConfigError: one is not in 0 .. ``num_layers``.
    """
    if not all(0 <= layer <= config.num_layers for layer in aux_layers):
        raise ConfigError(
            f"the target has no layers {aux_layers}",
            f"set aux_layers to three from 0 to {config.num_layers}",
        )


def _require_tensors(source: TensorSource, config: ModelConfig) -> None:
    shapes = _shapes(config)
    unused = [n for n in source.names() if n not in shapes and not n.endswith(DERIVED_TENSORS)]
    if config.tie_word_embeddings:
        unused = [name for name in unused if name != HEAD]
    if unused:
        raise UnsupportedError(
            f"{source.location} holds tensors that its architecture does not use: {unused[:3]}",
            "check the architecture and the bias settings in its config",
        )
    for name, shape in shapes.items():
        if name not in source.names() or source.shape(name) != shape:
            raise CheckpointError(
                f"{source.location} holds no tensor {name} of shape {list(shape)}",
                "check that config and weights belong together",
            )


def _read(files: TargetFiles, compute: Compute) -> dict[str, Tensor]:
    weights = {}
    for name in _shapes(files.config):
        chunks = [chunk.to(compute.device, compute.dtype) for chunk in files.source.chunks(name)]
        weights[name] = torch.cat(chunks)
        require_finite(weights[name], name, files.source)
    return weights


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the architecture's tensors."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (hidden,)
        for name, rows, columns in (
            ("self_attn.q_proj", q_size, hidden),
            ("self_attn.k_proj", kv_size, hidden),
            ("self_attn.v_proj", kv_size, hidden),
            ("self_attn.o_proj", hidden, q_size),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if config.attention_bias and name.startswith("self_attn"):
                shapes[f"{layer}.{name}.bias"] = (rows,)
        if config.architecture == "Qwen3ForCausalLM":
            for name in ("q_norm", "k_norm"):
                shapes[f"{layer}.self_attn.{name}.weight"] = (config.head_dim,)
    return shapes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32, rounded once."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., heads, head_dim] by [..., 1, rotary_dim / 2], element j with j + half."""
    half = cos.shape[-1]
    wide = x.float()
    low, high, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1).to(x.dtype)
