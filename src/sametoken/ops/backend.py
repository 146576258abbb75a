"""The kernel protocol that models run on, and the types it takes.

Every implementation is batch invariant: the bits of output row i depend on row i's inputs and,
for attention, on the KV it may see, never on the number, order or content of other rows
(tests/unit/ops/test_batch_invariance.py). Bits may differ between backends; an engine uses one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from sametoken.ops.model.attention.kv import LayerKV as LayerKV
from sametoken.ops.model.attention.shape import AttentionShape as AttentionShape
from sametoken.ops.model.attention.shape import QKNorm as QKNorm
from sametoken.ops.model.attention.shape import RotaryTable as RotaryTable
from sametoken.ops.model.latent_attention.shape import (
    HeadWeights,
    LatentRotary,
    LatentShape,
    LayerLatent,
)
from sametoken.ops.model.recurrent.rule import FastPrompts as FastPrompts
from sametoken.ops.model.recurrent.rule import Folded, RecurrentPass, RecurrentRule
from sametoken.ops.sampling.logits_rules import CommittedTokens, LogitsRules, Truncation
from sametoken.ops.weight import BY_ROW, Packing, RoundedRows, Rounding, UnquantizedWeight

if TYPE_CHECKING:
    from sametoken.ops.expanded_rows import ExpandedRows


class RunGroup(NamedTuple):
    """Adjacent runs of one launch: ``num_runs`` from run ``first`` on."""

    first: int
    num_runs: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Runs of adjacent rows of one slot each. They shape launches and change no bits.

    Rows after the last run, and rows of a run on the reserved slot, are dead: their results are
    undefined. Dead rows come last in a run.

    Attributes:
        count: R.
        max_rows: the most rows in a run.
        starts: [R + 1] int64, ascending: run i has rows ``starts[i] .. starts[i + 1] - 1``,
            possibly none; None: each run has ``max_rows``, all dead or all live.
        num_short: how many runs are short (windows); they come before the long ones (chunks of
            prompts).
        max_short: the most rows in a short run.
    """

    count: int
    max_rows: int
    starts: Tensor | None
    num_short: int
    max_short: int

    @classmethod
    def even(cls, count: int, rows: int) -> RowRuns:
        """``count`` short runs of ``rows`` rows each."""
        return cls(count, rows, None, count, rows)

    @property
    def groups(self) -> tuple[RunGroup, ...]:
        """The short runs and the long runs, without empty groups."""
        short = RunGroup(0, self.num_short, self.max_short)
        long = RunGroup(self.num_short, self.count - self.num_short, self.max_rows)
        return tuple(group for group in (short, long) if group.num_runs and group.max_rows)

    def are_long(self, group: RunGroup) -> bool:
        """Whether these are the long runs."""
        return group.first == self.num_short


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Slots, positions and KV addresses of a forward pass's T rows; S slots, the last reserved.

    Attributes:
        positions: [T] int64, absolute positions. Row i attends to positions 0..positions[i].
        slots: [T] int64, the slot of each row. Rows of one slot are adjacent and ascending.
        kv_slots: [T] int64, ``block_id * block_size + offset`` where the row's KV is written.
        block_table: [S, max_blocks] int64, read-only.
        runs: the rows by slot; None on a CPU, whose kernels need none.
        committed: [T] bool, whether the row's token is committed; None: all are. A slot's
            committed rows come first. Only layers with recurrent state read it.
        expanded: the rows whose latents are expanded; None: none.
        fast_prompts: which positions recurrent layers run in the fast form; None: none.
    """

    positions: Tensor
    slots: Tensor
    kv_slots: Tensor
    block_table: Tensor
    runs: RowRuns | None = None
    committed: Tensor | None = None
    expanded: ExpandedRows | None = None
    fast_prompts: FastPrompts | None = None


@dataclass(frozen=True, slots=True)
class KeptRows:
    """R rows of a forward pass whose results are wanted; the others run only for their memory.

    Attributes:
        index: [R] int64, their places among the pass's rows.
        positions, slots, block_table, runs: as in ``AttentionRows``, of these rows alone.
    """

    index: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    runs: RowRuns | None = None


#: Rows that read memory.
QueryRows = AttentionRows | KeptRows


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits choose a row's experts, and their weights.

    Attributes:
        top_k: experts per row.
        normalise: whether a row's weights are divided by their sum.
        scoring: "softmax" over all experts, or "sigmoid" of each (DeepSeek-V3).
        num_groups: equal groups of adjacent experts; 1: all are one group.
        top_groups: a row's experts lie in this many groups, the best by ``group_best``.
        group_best: a group's score is the sum of its best scores, this many.
        scale: factor on the weights, after the division.
    """

    top_k: int
    normalise: bool
    scoring: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    scale: float = 1.0


class Norm(Protocol):
    """An RMS norm: ``weight`` [H], in the activations' dtype or fp32, and ``eps``."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Slots and positions of L logits rows; the rows of a window are adjacent and in order.

    Dead rows may lie between windows and after a window's live rows.

    Attributes:
        index: [L] int64, their rows in the step; None: all rows, in order.
        slots: [L] int64; dead rows hold the reserved slot, which never has rules.
        positions: [L] int64, of the row's own token; the sampled token stands one later.
        token_ids: [L] int64, the row's own token: the last committed one, or a draft.
        offsets: [L] int64, r, the row's index in its window: the drafts before the sampled
            token are ``token_ids[l - r + 1 .. l]``.
    """

    index: Tensor | None
    slots: Tensor
    positions: Tensor
    token_ids: Tensor
    offsets: Tensor


class Kernels(Packing, Protocol):
    """The operations of a decoder layer. T rows, L logits rows, V vocabulary.

    Activations have the model's dtype (bf16 or fp32) and are contiguous; only ``qkv`` and
    ``gate``, parts of a fused projection, may be strided. Sums run in fp32 and round once.
    """

    name: str

    def require(self, shape: AttentionShape) -> None:
        """Refuse an attention shape that this backend cannot run, before weights are loaded.

        Raises:
            UnsupportedError: with the reason.
        """
        ...

    def take_rows(self, states: Tensor, rows: Tensor | None) -> Tensor:
        """Copies of the given rows, [R] int64, of [T, W]; None: ``states`` itself."""
        ...

    def partial_sum(
        self, partials: Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """``partials[0] + partials[1] + ... (+ bias)`` in fp32, in that order, rounded once.

        [size, T, N] fp32, contiguous, and [N] of any floating dtype -> [T, N]. Element-wise, so
        a row's bits depend on that row's partial products only.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` per row, rounded once: [T, H] -> [T, H].

        All norm weights have x's dtype or are fp32. Rows of ``x`` may lie apart.
        """
        ...

    def embed_beside(
        self,
        token_ids: Tensor,
        embedding: UnquantizedWeight,
        embedding_norm: Norm,
        hidden: Tensor,
        hidden_norm: Norm,
    ) -> Tensor:
        """Concatenate normed embeddings and hidden states: [T] int64 and [T, H] -> [T, 2H].

        Both halves have the bits of ``rms_norm``; the left one norms ``embedding.rows(token_ids)``.
        """
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """``r = x + residual`` (rounded to dtype); returns ``(rms_norm(r), r)``.

        May reuse the memory of ``x`` and ``residual``.
        """
        ...

    def rounding_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        rounding: Rounding = BY_ROW,
    ) -> tuple[RoundedRows, Tensor]:
        """``rms_norm`` or, with a residual, ``add_rms_norm``, its rows rounded for a product.

        The rows have the bits of a norm in x's dtype that is rounded after; ``rounding`` is
        dynamic.
        """
        ...

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``rms_norm(x) * silu(gate)`` per head, rounded once: two [T, H * D] -> [T, H * D].

        ``weight`` is [D].
        """
        ...

    def gated_group_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float
    ) -> Tensor:
        """``rms_norm(x * silu(gate))`` by equal groups, rounded once: two [T, W] -> [T, W].

        ``weight`` is [W].
        """
        ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """``x * sigmoid(gate)``, rounded once: two [T, W] -> [T, W]."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """``gelu(gate) * up``, rounded once: [T, 2I] = [gate | up] -> [T, I].

        gelu is the approximation by tanh, ``x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))``.
        """
        ...

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """``(u + 1) * g * sigmoid(alpha * g)``, rounded once: [T, 2I] = [gate | up] -> [T, I].

        g is the gate, at most ``limit``, and u is up, from ``-limit`` to ``limit``.
        """
        ...

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        """``cap * tanh(logits / cap)`` of [L, V] fp32."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of [T, 2I] = [gate | up], rounded once: [T, I]."""
        ...

    def relu_squared(self, x: Tensor) -> Tensor:
        """``relu(x)^2``, rounded once: [T, W] -> [T, W]."""
        ...

    def moe_gate(
        self,
        logits: Tensor,
        routing: Routing,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[T, E] logits to [T, top_k] int64 expert ids and fp32 weights, by descending score.

        Experts and groups are chosen by score plus ``bias``, [E] fp32; the weights are scores
        without it, rounded to the dtype of ``logits``. The lowest id comes first among equals.
        ``out``, contiguous, gets the ids; without it they are in new memory.
        """
        ...

    def rope_and_cache(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        rotary: RotaryTable,
        rows: AttentionRows,
        kv: LayerKV,
        qk_norm: QKNorm | None,
    ) -> Tensor:
        """Norm and rotate q and k of [T, q|k|v], write k and v at ``rows.kv_slots``.

        Returns q as [T, num_heads, head_dim]. A layer without KV heads of its own writes nothing.
        """
        ...

    def attention(
        self,
        q: Tensor,
        shape: AttentionShape,
        rows: QueryRows,
        kv: LayerKV,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of each row over its slot's KV: [T, H, D] -> [T, H * D].

        KV is read in splits of fixed size anchored at position 0, merged in order, so decode,
        verify and prefill rows of equal position have equal bits. ``sinks``, [H] fp32, finite and
        contiguous, is a logit per head that takes part in the softmax and has no value: it joins
        the merged splits once, as a last split of total weight 1 whose values are 0.
        """
        ...

    def require_latent(self, shape: LatentShape) -> None:
        """As ``require``, for latent attention."""
        ...

    def pack_heads(self, weight: Tensor) -> HeadWeights:
        """Take over [H, N, K], one matrix per head; the caller drops its own reference."""
        ...

    def latent_rope_and_cache(
        self,
        q: Tensor,
        latent: Tensor,
        rotary: LatentRotary,
        rows: AttentionRows,
        memory: LayerLatent,
        out: Tensor,
    ) -> None:
        """Rotate q, [T, H, rope_dim], into ``out``; write vectors at ``rows.kv_slots``.

        A vector is the normed and the rotated part of ``latent``, [T, rank + rope_dim]. q,
        ``latent`` and ``out`` may be strided, except in the last dimension.
        """
        ...

    def latent_attention(
        self, q: Tensor, scale: float, rows: QueryRows, memory: LayerLatent
    ) -> Tensor:
        """Causal attention of all heads over their slot's vectors, as ``attention``.

        [T, H, rank + rope_dim] -> [T, H, rank]: the values are the vectors' first elements.
        """
        ...

    def require_rule(self, rule: RecurrentRule) -> None:
        """Refuse a recurrent rule that this backend cannot run, before weights are loaded.

        Raises:
            UnsupportedError: names the rule.
        """
        ...

    def begin_pass(self, rows: AttentionRows, folded: Folded) -> RecurrentPass:
        """Derive from positions what a pass over ``rows`` folds, runs and leaves pending.

        Raises:
            InvariantError: a slot's rows do not follow its folded and pending rows; a GPU gives
                NaN for them instead.
        """
        ...

    def apply_rules(
        self, logits: Tensor, rows: SampledRows, committed: CommittedTokens, rules: LogitsRules
    ) -> None:
        """Mask, bias and penalise [L, V] fp32 logits by their slots' rules, in place.

        Row r of a window is processed as if its r drafts were committed. Rules that no slot has
        launch nothing, and a GPU backend reads nothing back to the host.
        """
        ...

    def truncate(self, logits: Tensor, slots: Tensor, truncation: Truncation) -> None:
        """Write -inf into [L, V] fp32 logits for truncated tokens; ``slots`` [L] int64, by row."""
        ...

    def token_keys(
        self, logits: Tensor, temperature: Tensor, seeds: Tensor, rows: SampledRows
    ) -> Tensor:
        """The target's choice at each sampled row, as ``sample`` makes it: [L, tiles] int64.

        A row's largest key (``ops.sampling.sample``) encodes the token, and whether the row holds
        NaN or only -inf.

        Args:
            logits: [L, V] fp32, not written.
            temperature, seeds: [S] fp32 and int64, by slot.
            rows: slots and positions of the rows; a sampled token stands one position later.
        """
        ...

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        token_ids: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Keyed sampling (docs/lossless.md): [L, V'] fp32 -> [L] int64.

        Gumbel-max trick: ``argmax(logits / T + gumbel(seed, position, token id))``, plain argmax
        where ``temperature`` is 0; the lowest id wins among equal values. ``temperature`` [L]
        fp32, ``seeds`` [L] int64, ``positions`` [L] int64 (of the sampled token). ``token_ids``
        [V'] int64, ascending, holds the token of each column, as if all other tokens had -inf;
        None: column i is token i. With ``slots`` [L] int64, ``temperature`` and ``seeds`` are
        [S], and row l takes those of ``slots[l]``. No argument is written.
        """
        ...
