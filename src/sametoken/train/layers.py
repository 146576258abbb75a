"""Trainable layers, under the parameter names of published checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sametoken.kernels.interface import RotaryTable
from sametoken.models.base import ModelConfig
from sametoken.train.arithmetic import rms_norm, rotated
from sametoken.train.gated_delta import gated_delta_rule


@dataclass(slots=True)
class UnrolledKV:
    """Keys and values of every step so far, [B, kv_heads, L, head_dim] each."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Norm(nn.Module):
    """An RMS norm over ``size`` elements; ``centred`` weights are stored as 1 + weight."""

    def __init__(self, size: int, eps: float, *, centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if centred else torch.ones(size))
        self.eps = eps
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        weight = 1.0 + self.weight if self.centred else self.weight
        return rms_norm(x, weight, self.eps)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, size, bias=False)
        self.up_proj = nn.Linear(hidden, size, bias=False)
        self.down_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same."""
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Attention(nn.Module):
    """Causal attention of rows of ``in_features``.

    Args:
        config: head counts.
        in_features: width of a row.
        gated: as Qwen3.5 has it: an output gate beside every head of q, and norms of q and k.
    """

    def __init__(self, config: ModelConfig, in_features: int, *, gated: bool = False) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_kv_heads = config.num_kv_heads
        self.gated = gated
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(in_features, q_size * (2 if gated else 1), bias=False)
        self.k_proj = nn.Linear(in_features, kv_size, bias=False)
        self.v_proj = nn.Linear(in_features, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        if gated:
            self.q_norm = Norm(config.head_dim, config.rms_norm_eps, centred=True)
            self.k_norm = Norm(config.head_dim, config.rms_norm_eps, centred=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, L, in_features] to [B, L, hidden].

        Args:
            x: the rows.
            cos, sin: [L, 1, rotary_dim / 2], of their positions.
        """
        q, k, v, gate = self._project(x, cos, sin)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._output(attended, gate)

    def unrolled(self, x: Tensor, cos: Tensor, sin: Tensor, kv: UnrolledKV) -> Tensor:
        """The same over the steps of an unrolled head, whose keys and values it adds.

        Row r reads those of rows 0 .. r at step 0, and of row r alone at later steps.
        """
        q, k, v, gate = self._project(x, cos, sin)
        kv.keys.append(k)
        kv.values.append(v)
        attended = _attend(torch.unflatten(q, 1, (self.num_kv_heads, -1)), kv)
        return self._output(attended.flatten(1, 2), gate)

    def _project(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Rotated q and k, and v, [B, heads, L, head_dim]; the gate [B, L, q_size]."""
        gate = None
        q, k, v = (
            torch.unflatten(projection(x), -1, (-1, width))
            for projection, width in (
                (self.q_proj, self.head_dim * (2 if self.gated else 1)),
                (self.k_proj, self.head_dim),
                (self.v_proj, self.head_dim),
            )
        )
        if self.gated:
            q, gate = q.chunk(2, dim=-1)
            gate = gate.flatten(2)
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate

    def _output(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        rows = attended.transpose(1, 2).flatten(2)
        output: Tensor = self.o_proj(rows if gate is None else rows * gate.sigmoid())
        return output


def _attend(q: Tensor, kv: UnrolledKV) -> Tensor:
    """[B, kv_heads, group, L, head_dim] over step 0's rows up to a row, and its later ones."""
    keys, values = ([one[:, :, None] for one in part] for part in (kv.keys, kv.values))
    num_rows = q.shape[-2]
    q = q * q.shape[-1] ** -0.5
    future = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ keys[0].transpose(-1, -2)).float().masked_fill(future, -torch.inf)
    own = [(q * key).sum(-1, dtype=torch.float32) for key in keys[1:]]
    if own:
        scores = torch.cat((scores, torch.stack(own, dim=-1)), dim=-1)
    weights = scores.softmax(-1).to(q.dtype)
    attended = weights[..., :num_rows] @ values[0]
    for step, value in enumerate(values[1:]):
        attended = attended + weights[..., num_rows + step, None] * value
    return attended


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Head counts and sizes of a Gated DeltaNet block."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """Widths of q, k and v."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim


class GatedDeltaNet(nn.Module):
    """A Gated DeltaNet block with the projections of Qwen3.5."""

    def __init__(self, hidden: int, sizes: DeltaSizes, eps: float) -> None:
        super().__init__()
        self.sizes = sizes
        heads, values = sizes.num_value_heads, sizes.parts[2]
        self.in_proj_qkv = nn.Linear(hidden, sum(sizes.parts), bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)
        width = sum(sizes.parts)
        self.conv1d = nn.Conv1d(width, width, sizes.conv_kernel, groups=width, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.norm = Norm(sizes.value_dim, eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, hidden] to the same."""
        sizes = self.sizes
        mixed = functional.pad(self.in_proj_qkv(x).transpose(1, 2), (sizes.conv_kernel - 1, 0))
        mixed = functional.silu(self.conv1d(mixed)).transpose(1, 2)
        q, k, v = torch.split(mixed, list(sizes.parts), dim=-1)
        q, k = (torch.unflatten(part, -1, (sizes.num_key_heads, -1)) for part in (q, k))
        v = torch.unflatten(v, -1, (sizes.num_value_heads, -1))
        log_decay = -self.A_log.float().exp() * functional.softplus(
            self.in_proj_a(x).float() + self.dt_bias
        )
        beta = self.in_proj_b(x).float().sigmoid()
        # In fp32 whatever the matrices around it run in.
        with torch.autocast(x.device.type, enabled=False):
            # Run again for the gradients: what happens in chunks is large, and soon done.
            read = checkpoint(
                gated_delta_rule,
                q,
                k,
                v,
                log_decay,
                beta,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        gate = functional.silu(torch.unflatten(self.in_proj_z(x), -1, read.shape[-2:]).float())
        output: Tensor = self.out_proj((self.norm(read) * gate).flatten(2).to(x.dtype))
        return output


def rows_of(rotary: RotaryTable, first: int, count: int) -> tuple[Tensor, Tensor]:
    """cos and sin, [count, 1, rotary_dim / 2], of positions from ``first`` on."""
    return rotary.cos[first : first + count, None], rotary.sin[first : first + count, None]
