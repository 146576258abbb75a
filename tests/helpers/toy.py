"""A toy target whose logits depend on every KV entry it may see, and on nothing else.

Its KV holds token ids. The hidden state of a row is a hash of the tokens read back from
the row's KV, so any wrong address, stale block or rejected row changes the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sametoken.layers.residual import kept_of
from sametoken.models.base import HiddenStates, ModelConfig
from sametoken.models.heads.base import HeadStates
from sametoken.models.heads.state_head import StateHead
from sametoken.ops.cache_types import PagedKV

MODULUS = 1_000_003


def toy_config(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        architecture="ToyForCausalLM",
        vocab_size=vocab_size,
        hidden_size=2,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        rms_norm_eps=0.0,
        max_position_embeddings=512,
        rope={},
        tie_word_embeddings=False,
        attention_bias=False,
        eos_token_ids=(),
        bos_token_id=None,
        dtype=torch.float64,
        extra={},
    )


class ToyModel:
    """``CausalLM`` over float64; greedy continuations are chaotic in all that a row sees."""

    def __init__(self, vocab_size: int = 11, salt: int = 1, window: int | None = None) -> None:
        self.config = toy_config(vocab_size)
        self.caches = (PagedKV(1, 1, 1, torch.float64, window),)
        self.salt = salt
        self._of_tokens = torch.arange(vocab_size, dtype=torch.int64) * 104_729 + salt
        self.seen: list[tuple[int, ...]] = []

    def forward(self, token_ids, rows, kv, kept=None):
        layer = kv.kv(0)
        block_size = layer.keys.shape[2]
        flat = layer.keys[:, 0, :, 0]
        flat[rows.kv_slots // block_size, rows.kv_slots % block_size] = token_ids.double()
        memory, tables, hashes = flat.numpy(), rows.block_table.numpy(), []
        for slot, position in zip(rows.slots.tolist(), rows.positions.tolist(), strict=True):
            window = self.caches[0].window or position + 1
            where = np.arange(max(0, position + 1 - window), position + 1)
            visible = memory[tables[slot, where // block_size], where % block_size]
            assert not np.isnan(visible).any(), "a row reads KV that nobody wrote"
            hashes.append(self._hash(visible.astype(np.int64).tolist()))
        last = torch.tensor([[h, 1.0] for h in hashes], dtype=torch.float64).view(-1, 2)
        return HiddenStates(kept_of(last, kept), last)

    def compute_logits(self, hidden):
        mixed = (hidden[:, :1].long() * 7919 + self._of_tokens) % MODULUS
        mixed = mixed * mixed % MODULUS
        return (mixed.double() / MODULUS * 6 - 3).float()

    def compute_rank_logits(self, hidden):
        return self.compute_logits(hidden)

    def next_token(self, tokens) -> int:
        """The greedy continuation of ``tokens``, from scratch."""
        hidden = torch.tensor([[float(self._hash(tokens)), 1.0]], dtype=torch.float64)
        return int(self.compute_logits(hidden).argmax())

    def _hash(self, tokens) -> int:
        value = self.salt
        for token in tokens:
            value = (value * 31_337 + token + 17) % MODULUS
        return value


@dataclass(frozen=True)
class ToyHead(StateHead):
    """The toy target as a head without KV: its state is the hash of all tokens before."""

    model: ToyModel

    def forward(self, index, token_ids, states):
        hashes = (states[:, 0].nan_to_num().long() * 31_337 + token_ids + 17) % MODULUS
        state = torch.stack((hashes.double(), torch.ones(len(hashes))), dim=1)
        return HeadStates(state, state)

    def compute_logits(self, index, last):
        return self.model.compute_logits(last)
