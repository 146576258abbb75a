"""Gated DeltaNet as a recurrent rule: sizes, a layer's weights, and its row function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from sametoken.ops.model.gated_delta_rule import reference
from sametoken.ops.model.gated_delta_rule.chunk_reference import advance_chunk
from sametoken.ops.model.recurrent.chunk_reference import in_one_shape
from sametoken.ops.model.recurrent.convolution import convolve_row
from sametoken.ops.model.recurrent.rule import ChunkFunction, RowFunction


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """``RecurrentRule`` of Gated DeltaNet; a raw row is [q | k | v] and the gates a and b.

    Attributes:
        conv_kernel: as in ``RecurrentRule``.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of q, k and v."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.out_features

    @property
    def conv_channels(self) -> int:
        """Width of [q | k | v]."""
        return sum(self.qkv_sizes)

    @property
    def gate_sizes(self) -> tuple[int, int]:
        """Widths of a and b."""
        return self.num_value_heads, self.num_value_heads

    @property
    def out_features(self) -> int:
        """Width of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[Hv, Dk, Dv]."""
        return self.num_value_heads, self.key_dim, self.value_dim

    @property
    def constants(self) -> dict[str, int]:
        """The sizes by the names of Triton kernels' constants."""
        return {
            "HK": self.num_key_heads,
            "HV": self.num_value_heads,
            "DK": self.key_dim,
            "DV": self.value_dim,
            "K": self.conv_kernel,
        }

    def divided(self, size: int) -> GatedDelta:
        """The shard of one of ``size`` ranks: value heads stay with their key head."""
        key_heads, value_heads = self.num_key_heads // size, self.num_value_heads // size
        return replace(self, num_key_heads=key_heads, num_value_heads=value_heads)


@dataclass(frozen=True, slots=True)
class GatedDeltaParams:
    """``RuleWeights`` of Gated DeltaNet.

    Attributes:
        A_log, dt_bias: [Hv].
        conv_weight: [K, C], transposed from a checkpoint's [C, 1, K].
        conv_bias: [C] or None.
    """

    rule: GatedDelta
    A_log: Tensor
    dt_bias: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None

    def row_function(self) -> RowFunction:
        """See ``RuleWeights.row_function``."""
        prepare = self._preparation()

        def run_row(state: Tensor, window: Tensor, gates: Tensor) -> Tensor:
            return reference.advance(state, *prepare(window, gates)).flatten()

        return run_row

    def chunk_function(self) -> ChunkFunction:
        """See ``RuleWeights.chunk_function``."""
        return in_one_shape(self._preparation(), advance_chunk, self.rule.conv_kernel)

    def _preparation(self) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
        """From windows and gates of any rows to q, k, v, log decay and beta."""
        rule, decay_rate, dt_bias = self.rule, self.A_log.float().exp(), self.dt_bias.float()
        conv_weight = self.conv_weight.float()
        conv_bias = None if self.conv_bias is None else self.conv_bias.float()

        def prepare(window: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
            convolved = convolve_row(window, conv_weight, conv_bias)
            q, k, v = convolved.split(rule.qkv_sizes, dim=-1)
            a, b = gates.split(rule.gate_sizes, dim=-1)
            q, k = (x.unflatten(-1, (-1, rule.key_dim)) for x in (q, k))
            v = v.unflatten(-1, (-1, rule.value_dim))
            return q, k, v, *reference.gates(a, b, decay_rate, dt_bias)

        return prepare
