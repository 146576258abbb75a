"""Recurrent layers with gradients: the engine's pass runs forward, the chunked rule backward.

The backward pass computes the rule again in fp32, ``CHUNK_ROWS`` positions at a time: within a
chunk by products of matrices, from chunk to chunk by the state. The chunked form of the gated delta
rule is that of arXiv 2412.06464, Mamba-2's that of arXiv 2405.21060. It holds one state for each
chunk, and what one layer's rows need in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.exact.functions import recomputed
from sametoken.ops.model.gated_delta_rule import reference as gated_delta_rule
from sametoken.ops.model.gated_delta_rule.rule import GatedDeltaParams
from sametoken.ops.model.mamba2.reference import time_step
from sametoken.ops.model.mamba2.rule import Mamba2Params
from sametoken.ops.model.recurrent.rule import LayerMemory, RawRows, RecurrentPass, RuleWeights

#: Positions between two states that the backward pass holds.
CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True)
class RecordedMemory(LayerMemory):
    """The slots' memory in one layer in a pass.

    Attributes:
        lengths: of the packed sequences.
    """

    lengths: Sequence[int]


@dataclass(frozen=True, slots=True)
class DifferentiablePass:
    """``RecurrentPass`` with gradients.

    Attributes:
        kernels_pass: runs every row.
    """

    kernels_pass: RecurrentPass

    def run(self, weights: RuleWeights, raw: RawRows, memory: LayerMemory) -> Tensor:
        """See ``RecurrentPass.run``; all sequences begin in this pass."""
        assert isinstance(memory, RecordedMemory)
        assert isinstance(weights, GatedDeltaParams | Mamba2Params)
        given = {one.name: getattr(weights, one.name) for one in fields(weights)}
        own = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        lengths, num_gates = [*memory.lengths], len(raw.gates)

        def with_weights(rest: Sequence[Tensor]) -> Any:
            return type(weights)(**given | dict(zip(own, rest[num_gates:], strict=True)))

        def run(mixed: Tensor, *rest: Tensor) -> Tensor:
            rows = RawRows(mixed, rest[:num_gates])
            return self.kernels_pass.run(with_weights(rest), rows, memory)

        def formula(mixed: Tensor, *rest: Tensor) -> Tensor:
            columns = [torch.split(part, lengths) for part in (mixed, *rest[:num_gates])]
            sequences = zip(*columns, strict=True)
            return torch.cat([outputs(with_weights(rest), *sequence) for sequence in sequences])

        return recomputed(run, formula, raw.mixed, *raw.gates, *own.values())

    def finish(self) -> None:
        """See ``RecurrentPass.finish``."""
        self.kernels_pass.finish()


def outputs(weights: GatedDeltaParams | Mamba2Params, mixed: Tensor, *gates: Tensor) -> Tensor:
    """A layer's outputs for one whole sequence of n rows: [n, out_features], differentiable.

    Args:
        weights: of a floating dtype, that of all arguments.
        mixed: [n, C], before the convolution.
        gates: [n, size] for each of ``RecurrentRule.gate_sizes``.
    """
    rows = convolved(mixed, weights.conv_weight, weights.conv_bias)
    if isinstance(weights, GatedDeltaParams):
        return _gated_delta(weights, rows, *gates)
    return _mamba2(weights, rows, *gates)


def convolved(mixed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``convolve_row`` at every position of a sequence, [n, C], after zeros."""
    padded = F.pad(mixed, (0, 0, weight.shape[0] - 1, 0))
    taps = (padded[tap : tap + len(mixed)] * row for tap, row in enumerate(weight))
    summed = sum(taps, start=torch.zeros_like(mixed))
    return F.silu(summed if bias is None else summed + bias)


def _gated_delta(weights: GatedDeltaParams, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
    rule = weights.rule
    q, k, v = torch.split(qkv, [*rule.qkv_sizes], dim=1)
    shared = rule.num_value_heads // rule.num_key_heads
    q, k = (_by_head(gated_delta_rule.normalised(_heads(part, rule.key_dim))) for part in (q, k))
    q, k = (part.repeat_interleave(shared, dim=0) for part in (q / rule.key_dim**0.5, k))
    log_decay, beta = gated_delta_rule.gates(a, b, weights.A_log.exp(), weights.dt_bias)
    v = _by_head(_heads(v, rule.value_dim))
    return _scanned(q, k, v, log_decay.t(), beta.t()).transpose(0, 1).flatten(1)


def _mamba2(weights: Mamba2Params, xbc: Tensor, dt: Tensor) -> Tensor:
    rule = weights.rule
    x, *shared = torch.split(xbc, [*rule.xbc_sizes], dim=1)
    heads_per_group = rule.num_heads // rule.num_groups
    b, c = (
        _by_head(_heads(part, rule.state_dim)).repeat_interleave(heads_per_group, dim=0)
        for part in shared
    )
    x, step = _heads(x, rule.head_dim), time_step(dt, weights.dt_bias, weights.time_step_limit)
    log_decay = -weights.A_log.exp() * step
    read = _scanned(c, b, _by_head(x * step[..., None]), log_decay.t()).transpose(0, 1)
    return (read + weights.D[:, None] * x).flatten(1)


def _heads(rows: Tensor, width: int) -> Tensor:
    return torch.unflatten(rows, 1, (-1, width))


def _by_head(rows: Tensor) -> Tensor:
    """[n, H, W] to [H, n, W]."""
    return rows.transpose(0, 1)


def _scanned(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    """Reads of the state at each of n positions: [H, n, Dv].

    Args:
        q, k: [H, n, Dk].
        v: [H, n, Dv].
        gates: [H, n] each, log decay, and beta with the delta rule.
    """
    state = v.new_zeros(v.shape[0], k.shape[2], v.shape[2])
    columns = (torch.split(part, CHUNK_ROWS, dim=1) for part in (q, k, v, *gates))
    read = []
    for chunk in zip(*columns, strict=True):
        out, state = _chunk(state, *chunk)
        read.append(out)
    return torch.cat(read, dim=1)


def _chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Reads of c positions, [H, c, Dv], and the state after them; ``state`` is the one before."""
    # By rows i and columns j, what is left at i of what was written at j.
    rows = log_decay[:, :, None].expand(-1, -1, log_decay.shape[1])
    left = rows.tril(-1).cumsum(1).exp().tril()
    of_state = log_decay.cumsum(1).exp()[..., None]
    if beta is not None:
        # What the delta rule writes depends on what was written before: a triangular system.
        share = beta[..., None]
        rest = share * (v - of_state * (k @ state))
        v = torch.linalg.solve_triangular(
            share * left * (k @ k.mT), rest, upper=False, unitriangular=True
        )
    read = of_state * (q @ state) + (left * (q @ k.mT)) @ v
    return read, of_state[:, -1:] * state + (left[:, -1, :, None] * k).mT @ v
