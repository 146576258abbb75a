"""Nemotron-H's decoder and multi-token-prediction (MTP) module, made of transformers' modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHAttention,
    NemotronHMamba2Mixer,
    NemotronHMoE,
    NemotronHRMSNorm,
    NemotronHTopkRouter,
)

from sametoken.errors import UnsupportedError
from sametoken.models.base import ModelConfig
from sametoken.models.load.settings import Settings
from sametoken.models.mamba2 import mamba2_rule, time_step_limit
from sametoken.models.nemotron_h import ATTENTION, MOE, block_settings, layer_types
from sametoken.train.unrolled import UNROLLED, DraftModule, UnrolledKV, shifted

# Rows whose interactions one matrix holds.
CHUNK = 64
# What a batch adds to an expert's correction bias, or takes from it.
_BALANCE = 1e-3
_SAME_NAMES = (
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "n_group",
    "n_routed_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "topk_group",
    "use_bias",
    "use_conv_bias",
)


def hybrid_model(config: ModelConfig) -> Any:
    """The decoder without its lm_head.

    Raises:
        UnsupportedError: layers of one type differ in size.
    """
    settings = Settings(config.extra, config.architecture)
    if block_settings(settings):
        raise UnsupportedError(
            f"{config.architecture}: layers of different sizes (block_configs) are not trained",
            "use a model whose layers are alike",
        )
    types = list(settings.names("layer_types"))
    model = AutoModel.from_config(_transformers_config(config, types))
    for index, layer in enumerate(model.layers):
        if isinstance(layer.mixer, NemotronHMamba2Mixer):
            layer.mixer = Mamba2Mixer(model.config, index, initialize_mixer_weights=False)
            layer.mixer.time_step_limit = time_step_limit(settings)
        elif isinstance(layer.mixer, NemotronHMoE):
            layer.mixer.gate = Router(model.config)
    return model


def selective_scan(x: Tensor, steps: Tensor, rates: Tensor, into: Tensor, out_of: Tensor) -> Tensor:
    """Mamba-2's recurrence over whole sequences from a state of zero, in chunks of ``CHUNK`` rows.

    The state of a head is ``h = exp(rate * step) * h + step * x into^T``, its output ``h out_of``
    (Dao and Gu 2024, "Transformers are SSMs", section 6).

    Args:
        x: [B, L, H, P] fp32.
        steps: [B, L, H], time steps.
        rates: [H], negative.
        into, out_of: [B, L, G, N]; each group serves H / G adjacent heads.

    Returns:
        [B, L, H, P] fp32.
    """
    length, heads = x.shape[1], x.shape[2]
    padded = -length % CHUNK

    def chunks(rows: Tensor) -> Tensor:
        rows = functional.pad(rows, (0, 0) * (rows.ndim - 2) + (0, padded))
        return torch.unflatten(rows, 1, (-1, CHUNK))

    into, out_of = (
        chunks(rows.to(x.dtype).repeat_interleave(heads // rows.shape[2], dim=2))
        for rows in (into, out_of)
    )
    decays = chunks(steps * rates).cumsum(2)
    inputs = chunks(x * steps[..., None])
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()[..., None]
    between = (decays[:, :, :, None] - decays[:, :, None]).masked_fill(~past, -torch.inf).exp()
    weights = torch.einsum("bcqhn,bcshn->bcqsh", out_of, into) * between
    read = torch.einsum("bcqsh,bcshp->bcqhp", weights, inputs)
    ends = decays[:, :, -1:]
    added = torch.einsum("bcshn,bcshp->bchnp", into * (ends - decays).exp()[..., None], inputs)
    state, before = torch.zeros_like(added[:, 0]), []
    for chunk in range(added.shape[1]):
        before.append(state)
        state = state * ends[:, chunk, 0].exp()[..., None, None] + added[:, chunk]
    earlier = out_of * decays.exp()[..., None]
    read = read + torch.einsum("bcqhn,bchnp->bcqhp", earlier, torch.stack(before, dim=1))
    return read.flatten(1, 2)[:, :length]


class Mamba2Mixer(NemotronHMamba2Mixer):  # type: ignore[misc]
    """transformers' block with the recurrence in fp32 and recomputed for gradients.

    Without kernels the original keeps products of every pair of rows of a chunk for every element
    of a state.
    """

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """[B, L, hidden] to the same."""
        gate, mixed, steps = self.in_proj(hidden_states).split(
            [self.intermediate_size, self.conv_dim, self.num_heads], dim=-1
        )
        mixed = functional.pad(mixed.transpose(1, 2), (self.conv_kernel_size - 1, 0))
        mixed = functional.conv1d(mixed, self.conv1d.weight, self.conv1d.bias, groups=self.conv_dim)
        groups = self.n_groups * self.ssm_state_size
        x, into, out_of = (
            functional.silu(mixed)
            .transpose(1, 2)
            .tensor_split((self.intermediate_size, self.intermediate_size + groups), dim=-1)
        )
        x = torch.unflatten(x, -1, (self.num_heads, -1)).float()
        into, out_of = (torch.unflatten(part, -1, (self.n_groups, -1)) for part in (into, out_of))
        steps = functional.softplus(steps.float() + self.dt_bias).clamp(*self.time_step_limit)
        with torch.autocast(hidden_states.device.type, enabled=False):
            read = checkpoint(
                selective_scan,
                x,
                steps,
                -self.A_log.float().exp(),
                into,
                out_of,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        read = read + self.D[:, None] * x
        normed = self.norm(read.flatten(2), gate)
        output: Tensor = self.out_proj(normed.to(hidden_states.dtype))
        return output


class Router(NemotronHTopkRouter):  # type: ignore[misc]
    """transformers' router; its correction bias learns to give all experts as many tokens.

    Without it most tokens soon meet the same few (Wang et al. 2024, "Auxiliary-loss-free load
    balancing"; Nemotron-3 is trained so).
    """

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L, hidden] to logits [rows, experts], and weights and experts [rows, top_k]."""
        logits, weights, chosen = super().forward(hidden_states)
        if torch.is_grad_enabled():
            every = torch.arange(self.num_experts, device=chosen.device)
            load = (chosen[..., None] == every).sum((0, 1)).float()
            self.e_score_correction_bias += _BALANCE * (load.mean() - load).sign()
        return logits, weights, chosen


class MTPModule(DraftModule):
    """The module of Nemotron-3, as ``models/heads/mtp_nemotron_h.py`` runs it.

    Raises:
        UnsupportedError: layers of another kind than attention and experts.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        settings = Settings(config.extra, config.architecture)
        types = layer_types(settings, "mtp_") or (ATTENTION, MOE)
        if types != (ATTENTION, MOE):
            raise UnsupportedError(
                f"a module of {list(types)} is not trained", "use attention and experts"
            )
        layers = _transformers_config(config, list(types), attn_implementation=UNROLLED)
        self.layers = nn.ModuleList([_Attention(layers), _Experts(layers)])

    def unroll(
        self, embedding: Tensor, token_ids: Tensor, states: Tensor, k: int
    ) -> Iterator[Tensor]:
        """See ``DraftModule``."""
        attention, experts = self.layers
        kv, hidden = UnrolledKV(), states
        for step in range(k):
            embedded = functional.embedding(shifted(token_ids, 1 + step), embedding)
            hidden = experts(attention(embedded.to(hidden.dtype), hidden, kv))
            yield hidden


class _Attention(nn.Module):
    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_epsilon
        self.enorm, self.hnorm = NemotronHRMSNorm(hidden, eps), NemotronHRMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.norm = NemotronHRMSNorm(hidden, eps)
        self.mixer = NemotronHAttention(config, layer_idx=0)

    def forward(self, embedded: Tensor, hidden: Tensor, kv: UnrolledKV) -> Tensor:
        residual = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        attended, _ = self.mixer(self.norm(residual), unrolled_kv=kv)
        summed: Tensor = residual + attended
        return summed


class _Experts(nn.Module):
    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_epsilon
        self.norm, self.mixer = NemotronHRMSNorm(hidden, eps), NemotronHMoE(config, layer_idx=1)
        self.mixer.gate = Router(config)
        self.final_layernorm = NemotronHRMSNorm(hidden, eps)

    def forward(self, residual: Tensor) -> Tensor:
        last: Tensor = self.final_layernorm(residual + self.mixer(self.norm(residual)))
        return last


def _transformers_config(config: ModelConfig, types: list[str], **options: Any) -> NemotronHConfig:
    """transformers' config of layers of these types."""
    settings = Settings(config.extra, config.architecture)
    rule = mamba2_rule(settings)
    given = {name: settings.get(name) for name in _SAME_NAMES}
    return NemotronHConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers_block_type=types,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        layer_norm_epsilon=config.rms_norm_eps,
        mamba_num_heads=rule.num_heads,
        mamba_head_dim=rule.head_dim,
        n_groups=rule.num_groups,
        ssm_state_size=rule.state_dim,
        conv_kernel=rule.conv_kernel,
        # The loop over experts: the others take no autocast.
        experts_implementation="eager",
        **{name: value for name, value in given.items() if value is not None},
        **options,
    )
