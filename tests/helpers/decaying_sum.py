"""A second recurrent rule, and a toy target that keeps something of every kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from helpers.hybrid_toy import HIDDEN, VOCAB, rowwise
from helpers.toy import toy_config
from sametoken.layers.residual import kept_of
from sametoken.models.base import HiddenStates
from sametoken.ops.cache_types import LatentKV, Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.recurrent.rule import RawRows
from sametoken.ops.reference import ReferenceKernels

FP32 = torch.float32


@dataclass(frozen=True)
class DecayingSum:
    """``RecurrentRule`` without a convolution: a raw row is [x | d], as wide as the state."""

    width: int
    conv_kernel = 1
    conv_channels = 0

    @property
    def state_shape(self):
        return (self.width,)

    @property
    def gate_sizes(self):
        return self.width, self.width

    @property
    def out_features(self):
        return self.width

    def divided(self, size):
        return replace(self, width=self.width // size)


@dataclass(frozen=True)
class DecayingSumWeights:
    """``RuleWeights``: what is added to every d."""

    rule: DecayingSum
    bias: torch.Tensor

    def row_function(self):
        def run_row(state, window, gates):
            x, d = gates.chunk(2)
            state *= (d + self.bias).sigmoid()
            state += x
            return state.tanh()

        return run_row

    def raw(self, projected: torch.Tensor) -> RawRows:
        """From [T, 2 * width] projections."""
        return RawRows(projected[:, :0], projected.split(self.rule.gate_sizes, dim=-1))


class MixedToy:
    """``CausalLM`` of a decaying sum, attention over latents, and a Gated DeltaNet layer."""

    def __init__(self, kernels=None) -> None:
        self.config, self.kernels = toy_config(VOCAB), kernels or ReferenceKernels()
        total, delta = DecayingSum(6), GatedDelta(1, 2, key_dim=4, value_dim=4, conv_kernel=4)
        self.caches = (Recurrent(total, FP32), LatentKV(5, 3, FP32), Recurrent(delta, FP32))
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        self._embedding, self._head = random(VOCAB, HIDDEN), random(VOCAB, HIDDEN)
        self._total = DecayingSumWeights(total, random(6) + 3)
        conv = random(16, 4).t().contiguous()
        self._delta = GatedDeltaParams(delta, random(2) - 3, random(2), conv, None)
        self._into = random(12, HIDDEN), random(16, HIDDEN), random(20, HIDDEN)
        self._out_of = random(HIDDEN, 6), random(HIDDEN, 5), random(HIDDEN, 8)

    def forward(self, token_ids, rows, cache, kept=None):
        running = self.kernels.begin_pass(rows, cache.folded)
        total, latent, delta = cache.layers
        x = self._embedding[token_ids]
        raw = self._total.raw(rowwise(x, self._into[0]))
        x = x + rowwise(running.run(self._total, raw, total), self._out_of[0])
        x = x + rowwise(_attend(rowwise(x, self._into[1]), rows, latent), self._out_of[1])
        qkv, *gates = rowwise(x, self._into[2]).split((16, 2, 2), dim=-1)
        mixed = running.run(self._delta, RawRows(qkv, tuple(gates)), delta)
        x = x + rowwise(mixed, self._out_of[2])
        running.finish()
        return HiddenStates(kept_of(x, kept), x)

    def compute_logits(self, hidden):
        return rowwise(hidden, self._head)

    def compute_rank_logits(self, hidden):
        return self.compute_logits(hidden)


def _attend(projected: torch.Tensor, rows, latent) -> torch.Tensor:
    """One head; [T, query | vector], of which the vector is kept."""
    queries, vectors = projected.chunk(2, dim=-1)
    block_size = latent.vectors.shape[1]
    latent.vectors[rows.kv_slots // block_size, rows.kv_slots % block_size] = vectors
    out = [projected.new_empty(0, latent.rank)]
    for query, slot, position in zip(
        queries, rows.slots.tolist(), rows.positions.tolist(), strict=True
    ):
        where = torch.arange(position + 1)
        at = rows.block_table[slot, where // block_size], where % block_size
        read = latent.vectors[at]
        weights = (read * query).sum(dim=-1).softmax(dim=0)
        out.append((weights[:, None] * read[:, : latent.rank]).sum(dim=0, keepdim=True))
    return torch.cat(out)
