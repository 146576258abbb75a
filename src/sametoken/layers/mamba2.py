"""Mamba-2 blocks: a state space model with one state per slot."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.layers.linear import Linear, Projection
from sametoken.layers.residual import Matrices, kept_of
from sametoken.ops.backend import KeptRows, Kernels
from sametoken.ops.model.mamba2.rule import Mamba2Params
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows, RecurrentPass


@dataclass(frozen=True, slots=True)
class Mamba2Mixer(Matrices):
    """Mamba-2, or this rank's heads of it.

    Attributes:
        projection: fused projection to [z | x | B | C | dt].
        params: weights of the convolution and the rule, and this rank's sizes.
        norm_weight: [H * P], weight of the norm of ``x * silu(z)`` by groups of heads.
        eps: epsilon of that norm.
        output: projection of the heads to the hidden size.
    """

    kernels: Kernels
    projection: Linear
    params: Mamba2Params
    norm_weight: Tensor
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
        read, z = kept_of(read, kept), kept_of(z, kept)
        normed = self.kernels.gated_group_norm(read, z, self.norm_weight, rule.num_groups, self.eps)
        return self.output(normed)
