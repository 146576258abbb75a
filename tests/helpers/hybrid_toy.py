"""A toy target with recurrent state alone: its logits depend on every token so far."""

from __future__ import annotations

import numpy as np
import torch

from helpers.toy import toy_config
from sametoken.layers.residual import kept_of
from sametoken.models.base import HiddenStates
from sametoken.ops.cache_types import PagedKV, Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.recurrent.rule import RawRows
from sametoken.ops.reference import ReferenceKernels

VOCAB, HIDDEN = 11, 12


class HybridToy:
    """``CausalLM`` of two Gated DeltaNet layers; every product adds in one order.

    Args:
        pull: how much each token prefers one successor. Strong, outputs repeat, so that
            n-grams are found; the state makes them deviate.
        kernels: what runs the recurrent layers.
    """

    def __init__(self, pull: float = 0.0, kernels=None) -> None:
        self.config = toy_config(VOCAB)
        rule = GatedDelta(1, 2, key_dim=4, value_dim=4, conv_kernel=4)
        # The last layer keeps KV for swaps to move, and does nothing else.
        kv = PagedKV(1, 1, 1, torch.float32)
        self.caches = (*(Recurrent(rule, torch.float32),) * 2, kv)
        self.kernels = kernels or ReferenceKernels()
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        self._embedding = random(VOCAB, HIDDEN)
        self._layers = [
            (
                random(16 + 4, HIDDEN),
                # A slow decay: what was folded once is seen for long.
                GatedDeltaParams(
                    rule, random(2) - 3, random(2), random(16, 4).t().contiguous(), None
                ),
                random(HIDDEN, 8),
            )
            for _ in range(2)
        ]
        self._head = random(VOCAB, HIDDEN)
        self._pull = pull * torch.eye(VOCAB)[torch.randperm(VOCAB, generator=generator)]

    def forward(self, token_ids, rows, cache, kept=None):
        running = self.kernels.begin_pass(rows, cache.folded)
        x = self._embedding[token_ids]
        for index, (projection, params, output) in enumerate(self._layers):
            qkv, a, b = rowwise(x, projection).split((16, 2, 2), dim=-1)
            mixed = running.run(params, RawRows(qkv, (a, b)), cache.layers[index])
            x = x + rowwise(mixed, output)
        running.finish()
        # The last column says which successor is preferred.
        last = torch.cat((x, token_ids[:, None].float()), dim=1)
        return HiddenStates(kept_of(last, kept), last)

    def compute_logits(self, hidden):
        return rowwise(hidden[:, :-1], self._head) + self._pull[hidden[:, -1].nan_to_num().long()]

    def compute_rank_logits(self, hidden):
        return self.compute_logits(hidden)


def rowwise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product that adds its columns in order: a row's bits do not depend on other rows."""
    # numpy takes less than half the time of torch on few numbers.
    columns, out = x.numpy().T, np.zeros((x.shape[0], weight.shape[0]), np.float32)
    # Dead rows may hold any number.
    with np.errstate(all="ignore"):
        for column, factors in zip(columns, weight.numpy().T, strict=True):
            out += column[:, None] * factors
    return torch.from_numpy(out)
