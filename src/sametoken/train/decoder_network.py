"""Whole decoders to train: Llama, and the Qwen3.5 hybrid with its module for further tokens.

Names of parameters are those of published checkpoints (``model.*``, ``mtp.*``); the arithmetic
is that of ``models/decoder.py``, ``models/hybrid.py`` and ``models/mtp.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from sametoken.errors import UnsupportedError
from sametoken.kernels.interface import RotaryTable
from sametoken.layers.rotary import rotary_table
from sametoken.models.base import ModelConfig
from sametoken.models.hybrid import FULL, LINEAR, gated_delta_rule
from sametoken.train.layers import (
    Attention,
    DeltaSizes,
    GatedDeltaNet,
    GatedMLP,
    Norm,
    UnrolledKV,
    rows_of,
)
from sametoken.train.seeds import generator_of

HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
DENSE = ("LlamaForCausalLM", "MistralForCausalLM")


class Layer(nn.Module):
    """A decoder layer: norm, what mixes rows, norm, MLP."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        hybrid = config.architecture in HYBRIDS
        self.input_layernorm = Norm(hidden, eps, centred=hybrid)
        self.post_attention_layernorm = Norm(hidden, eps, centred=hybrid)
        self.mlp = GatedMLP(hidden, config.intermediate_size)
        self.is_full = kind == FULL
        if self.is_full:
            self.self_attn = Attention(config, hidden, gated=hybrid)
        else:
            self.linear_attn = GatedDeltaNet(hidden, _delta_sizes(config), eps)

    def forward(
        self, residual: Tensor, cos: Tensor, sin: Tensor, kv: UnrolledKV | None = None
    ) -> Tensor:
        """[B, L, hidden] to the same; with ``kv`` as a step of an unrolled head."""
        x = self.input_layernorm(residual)
        if not self.is_full:
            mixed = self.linear_attn(x)
        elif kv is None:
            mixed = self.self_attn(x, cos, sin)
        else:
            mixed = self.self_attn.unrolled(x, cos, sin, kv)
        residual = residual + mixed
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output


class Body(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, kind) for kind in layer_kinds(config)])
        self.norm = Norm(
            config.hidden_size, config.rms_norm_eps, centred=config.architecture in HYBRIDS
        )


class MTPModule(nn.Module):
    """The multi-token-prediction module of Qwen3.5, as ``models/mtp.py`` runs it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = Norm(hidden, eps, centred=True)
        self.pre_fc_norm_hidden = Norm(hidden, eps, centred=True)
        self.layers = nn.ModuleList([Layer(config, FULL)])
        self.norm = Norm(hidden, eps, centred=True)

    def unroll(
        self, embedding: Tensor, token_ids: Tensor, states: Tensor, rotary: RotaryTable, k: int
    ) -> Iterator[Tensor]:
        """What logits are made from, [B, L, hidden], of each draft in turn.

        Args:
            embedding: [V, hidden], the target's.
            token_ids: [B, L] int64.
            states: [B, L, hidden], the target's after its final norm.
            rotary: of the target.
            k: drafts in a row, as in ``Eagle3Network.unroll``.
        """
        (layer,) = self.layers
        kv, hidden, num_rows = UnrolledKV(), states, token_ids.shape[1]
        for step in range(k):
            following = functional.pad(token_ids[:, 1 + step :], (0, min(1 + step, num_rows)))
            embedded = functional.embedding(following, embedding).to(hidden.dtype)
            parts = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)
            cos, sin = rows_of(rotary, step, num_rows)
            residual = self.fc(torch.cat(parts, dim=-1))
            hidden = self.norm(layer(residual, cos, sin, kv))
            yield hidden


class DecoderNetwork(nn.Module):
    """A decoder to train.

    Args:
        config: the architecture.
        max_positions: longest sequence, padding and drafts counted.
        mtp: with a module for further tokens.

    Raises:
        UnsupportedError: another architecture, or a form of it, is asked for.
    """

    def __init__(self, config: ModelConfig, *, max_positions: int, mtp: bool = False) -> None:
        super().__init__()
        if config.architecture not in (*HYBRIDS, *DENSE) or config.attention_bias:
            raise UnsupportedError(
                f"a {config.architecture} of this form cannot be trained",
                f"use one of {(*HYBRIDS, *DENSE)}, without biases",
            )
        if mtp and config.architecture not in HYBRIDS:
            raise UnsupportedError(
                f"a {config.architecture} has no module for further tokens",
                f"use one of {HYBRIDS}",
            )
        self.config = config
        self.model = Body(config)
        if mtp:
            self.mtp = MTPModule(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = rotary_table(
            config.rope,
            head_dim=config.head_dim,
            max_positions=max_positions,
            device=torch.device("cpu"),
        )

    @property
    def embedding(self) -> Tensor:
        """[V, hidden]."""
        return self.model.embed_tokens.weight

    @property
    def head(self) -> Tensor:
        """[V, hidden]; the embedding where both are tied."""
        return self.embedding if self.config.tie_word_embeddings else self.lm_head.weight

    def on(self, device: torch.device) -> DecoderNetwork:
        """Move everything to a device."""
        self.rotary = RotaryTable(self.rotary.cos.to(device), self.rotary.sin.to(device))
        return self.to(device)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[B, L] int64 to [B, L, hidden], after the final norm."""
        residual = self.model.embed_tokens(token_ids)
        cos, sin = rows_of(self.rotary, 0, token_ids.shape[1])
        for layer in self.model.layers:
            residual = layer(residual, cos, sin)
        output: Tensor = self.model.norm(residual)
        return output

    def unroll(self, token_ids: Tensor, states: Tensor, k: int) -> Iterator[Tensor]:
        """The module's drafts from states that ``forward`` gave; see ``MTPModule.unroll``."""
        return self.mtp.unroll(self.embedding, token_ids, states, self.rotary, k)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Random weights that follow from the seed alone.

        Matrices are normal with deviation 0.02, those that end in the residual stream less by
        the square root of twice the layers; decays of Gated DeltaNet are spread from short to
        long as its authors do.
        """
        generator = generator_of(seed, "weights")
        shrink = (2 * self.config.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(1.0, 16.0, generator=generator).log_()
            elif name.endswith("dt_bias"):
                # softplus(dt_bias) from 0.001 to 0.1, evenly in its logarithm.
                steps = parameter.uniform_(-6.9, -2.3, generator=generator).exp_()
                parameter.copy_(steps.expm1().log())
            elif name.endswith("conv1d.weight"):
                parameter.uniform_(-0.5, 0.5, generator=generator)
            elif parameter.ndim > 1:
                ends = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                parameter.normal_(std=0.02 * (shrink if ends else 1.0), generator=generator)


def layer_kinds(config: ModelConfig) -> list[str]:
    """The kind of every layer, as a config's ``layer_types`` names them."""
    if config.architecture not in HYBRIDS:
        return [FULL] * config.num_layers
    implied = [FULL if (i + 1) % 4 == 0 else LINEAR for i in range(config.num_layers)]
    return list(config.extra.get("layer_types") or implied)


def _delta_sizes(config: ModelConfig) -> DeltaSizes:
    rule = gated_delta_rule(config, config.architecture)
    return DeltaSizes(
        rule.num_key_heads, rule.num_value_heads, rule.key_dim, rule.value_dim, rule.conv_kernel
    )
