"""Mamba-2 (arXiv 2405.21060) as a recurrent rule: sizes, a layer's weights, its functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from sametoken.ops.model.mamba2 import reference
from sametoken.ops.model.mamba2.chunk_reference import advance_chunk
from sametoken.ops.model.recurrent.chunk_reference import in_one_shape
from sametoken.ops.model.recurrent.convolution import convolve_row
from sametoken.ops.model.recurrent.rule import ChunkFunction, RowFunction


@dataclass(frozen=True, slots=True)
class Mamba2:
    """``RecurrentRule`` of Mamba-2; a raw row is [x | B | C] and the gate dt.

    Attributes:
        num_groups: groups of heads that share B and C.
        state_dim: N, the width of B and C of a group.
        conv_kernel: as in ``RecurrentRule``.
        ranks_per_group: ranks that divide the heads of a group, each with all of its B and C.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_kernel: int
    ranks_per_group: int = 1

    @property
    def xbc_sizes(self) -> tuple[int, int, int]:
        """Widths of x, B and C."""
        shared = self.num_groups * self.state_dim
        return self.out_features, shared, shared

    @property
    def conv_channels(self) -> int:
        """Width of [x | B | C]."""
        return sum(self.xbc_sizes)

    @property
    def gate_sizes(self) -> tuple[int]:
        """Width of dt."""
        return (self.num_heads,)

    @property
    def out_features(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[H, P, N]."""
        return self.num_heads, self.head_dim, self.state_dim

    @property
    def constants(self) -> dict[str, int]:
        """The sizes by the names of Triton kernels' constants."""
        return {
            "H": self.num_heads,
            "P": self.head_dim,
            "G": self.num_groups,
            "N": self.state_dim,
            "K": self.conv_kernel,
        }

    def divided(self, size: int) -> Mamba2:
        """The shard of one of ``size`` ranks: heads with their groups, or some heads of a group."""
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_groups=max(self.num_groups // size, 1),
            ranks_per_group=max(size // self.num_groups, 1),
        )


@dataclass(frozen=True, slots=True)
class Mamba2Params:
    """``RuleWeights`` of Mamba-2.

    Attributes:
        A_log, D, dt_bias: [H].
        conv_weight: [K, C], transposed from a checkpoint's [C, 1, K].
        conv_bias: [C] or None.
        time_step_limit: least and largest time step, after the softplus.
    """

    rule: Mamba2
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    time_step_limit: tuple[float, float] = (0.0, float("inf"))

    def row_function(self) -> RowFunction:
        """See ``RuleWeights.row_function``."""
        prepare, skip = self._preparation(), self.D.float()[:, None]

        def run_row(state: Tensor, window: Tensor, gates: Tensor) -> Tensor:
            x, b, c, log_decay, step = prepare(window, gates)
            read = reference.advance(state, x, b, c, log_decay.exp(), step)
            out: Tensor = read + skip * x
            return out.flatten()

        return run_row

    def chunk_function(self) -> ChunkFunction:
        """See ``RuleWeights.chunk_function``."""
        skip = self.D.float()[:, None]

        def advance(state: Tensor, x: Tensor, *others: Tensor) -> Tensor:
            return advance_chunk(state, x, *others) + skip * x

        return in_one_shape(self._preparation(), advance, self.rule.conv_kernel)

    def _preparation(self) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
        """From windows and gates of any rows to x, B, C, log decay and time step."""
        rule, limit, rate = self.rule, self.time_step_limit, self.A_log.float().exp()
        conv_weight, dt_bias = self.conv_weight.float(), self.dt_bias.float()
        conv_bias = None if self.conv_bias is None else self.conv_bias.float()

        def prepare(window: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
            convolved = convolve_row(window, conv_weight, conv_bias)
            x, b, c = convolved.split(rule.xbc_sizes, dim=-1)
            step = reference.time_step(gates, dt_bias, limit)
            x = x.unflatten(-1, (rule.num_heads, rule.head_dim))
            b, c = (shared.unflatten(-1, (rule.num_groups, rule.state_dim)) for shared in (b, c))
            return x, b, c, -rate * step, step

        return prepare
