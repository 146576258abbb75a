"""Mamba-2 blocks: a state space model with one state per slot, alone or beside attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.layers.linear import Linear, Projection
from sametoken.layers.parallel import TensorParallel, gather_columns, own_columns
from sametoken.layers.residual import Block, Matrices, kept_of
from sametoken.ops.backend import AttentionRows, KeptRows, Kernels, LayerKV
from sametoken.ops.model.mamba2.rule import Mamba2Params
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows, RecurrentPass


@dataclass(frozen=True, slots=True)
class Mamba2Mixer(Matrices):
    """Mamba-2, or this rank's heads of it.

    Attributes:
        projection: fused projection to [z | x | B | C | dt].
        params: weights of the convolution and the rule, and this rank's sizes.
        parallel: the ranks over whose heads the norm is; a single rank, if none shares a group.
        norm_weight: weight of the norm of ``x * silu(z)`` by groups of heads, of all heads of
            ``parallel``; None: no norm.
        eps: epsilon of that norm.
        output: projection of the heads to the hidden size.
    """

    kernels: Kernels
    projection: Linear
    params: Mamba2Params
    parallel: TensorParallel
    norm_weight: Tensor | None
    eps: float
    output: Projection

    def __call__(
        self, x: Tensor, step: RecurrentPass, memory: LayerMemory, kept: KeptRows | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; as ``GatedDeltaNet``."""
        rule = self.params.rule
        sizes = (rule.out_features, rule.conv_channels, *rule.gate_sizes)
        z, mixed, dt = self.projection(x).split(sizes, dim=-1)
        read = step.run(self.params, RawRows(mixed, (dt,)), memory)
        return self.output(self._gated(kept_of(read, kept), kept_of(z, kept)))

    def _gated(self, read: Tensor, z: Tensor) -> Tensor:
        if self.norm_weight is None:
            return self.kernels.silu_mul(torch.cat((z, read), dim=1))
        rule = self.params.rule
        groups = rule.num_groups * self.parallel.size // rule.ranks_per_group
        read, z = (gather_columns(self.parallel, part) for part in (read, z))
        whole = self.kernels.gated_group_norm(read, z, self.norm_weight, groups, self.eps)
        return own_columns(self.parallel, whole).contiguous()


@dataclass(frozen=True, slots=True)
class Mamba2BesideAttention(Matrices):
    """Mamba-2 and attention of the same rows, added."""

    mamba: Block
    attention: Block

    def __call__(
        self,
        x: Tensor,
        rows: AttentionRows,
        kv: LayerKV,
        step: RecurrentPass,
        memory: LayerMemory,
        kept: KeptRows | None = None,
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; ``kept`` is as in both."""
        read = self.mamba(x, step, memory, kept=kept)
        return read + self.attention(x, rows, kv, kept=kept)
