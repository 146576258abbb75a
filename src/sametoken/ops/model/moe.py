"""MoE routing and weighted expert sum in plain PyTorch; also the CPU path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.ops.backend import Routing
from sametoken.ops.model import activation
from sametoken.ops.weight import ClampedExperts, ExpertForm, GeluExperts, Weight

#: Added to a sum of weights, so that rows whose scores are all 0 get weights of 0.
TINY = 1e-20


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """``Experts`` as separate weights: [gate | up], or up alone, and down of each expert.

    Attributes:
        relu_squared: the activation of experts without gates.
        clamped_swiglu, gelu_mul: those of ``ClampedExperts`` and ``GeluExperts``.
        form: which of the two they are; None: neither.
    """

    gate_up: Sequence[Weight]
    down: Sequence[Weight]
    relu_squared: Callable[[Tensor], Tensor] = activation.relu_squared
    clamped_swiglu: Callable[[Tensor, float, float], Tensor] = activation.clamped_swiglu
    gelu_mul: Callable[[Tensor], Tensor] = activation.gelu_mul
    form: ExpertForm | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and biases."""
        biases = 0 if self.form is None else self.form.nbytes
        return sum(weight.nbytes for weight in (*self.gate_up, *self.down)) + biases

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        out_dtype: torch.dtype | None = None,
        beside: Tensor | None = None,
    ) -> Tensor:
        """Weighted sum of every row's experts, added in fp32 in the order of their ids."""
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            rows, places = torch.nonzero(chosen == expert, as_tuple=True)
            output = self.of_expert(expert, x, rows, out_dtype)
            out[rows] += output.float() * weights[rows, places, None]
        out = out.to(out_dtype or x.dtype)
        return out if beside is None else out + beside

    def of_expert(
        self, expert: int, x: Tensor, rows: Tensor, out_dtype: torch.dtype | None
    ) -> Tensor:
        """What an expert makes of the rows that chose it, [rows, H]."""
        return self._outer(expert, self._inner(expert, x[rows]), out_dtype)

    def _inner(self, expert: int, x: Tensor) -> Tensor:
        first, second, form = self.gate_up[expert], self.down[expert], self.form
        if isinstance(form, ClampedExperts):
            gate_up = first.matmul(x, form.gate_up[expert])
            return self.clamped_swiglu(gate_up, form.alpha, form.limit)
        if isinstance(form, GeluExperts):
            return self.gelu_mul(first.matmul(x))
        if first.out_features == second.in_features:
            return self.relu_squared(first.matmul(x))
        return first.gated_matmul(x)

    def _outer(self, expert: int, inner: Tensor, out_dtype: torch.dtype | None) -> Tensor:
        second, form = self.down[expert], self.form
        if not isinstance(form, ClampedExperts):
            return second.matmul(inner, out_dtype=out_dtype)
        if out_dtype is None:
            return second.matmul(inner, form.down[expert])
        return second.matmul(inner, out_dtype=out_dtype) + form.down[expert]


def moe_gate(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``Kernels.moe_gate``."""
    scores = gate_scores(logits, routing)
    ranked = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        ranked = ranked.masked_fill(~_in_best_groups(ranked, routing), float("-inf"))
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    if out is not None:
        chosen = out.copy_(chosen)
    return chosen, gate_weights(scores, chosen, routing).to(logits.dtype).float()


def gate_scores(logits: Tensor, routing: Routing) -> Tensor:
    """[T, E] logits to fp32 scores."""
    values = logits.float()
    is_sigmoid = routing.scoring == "sigmoid"
    return activation.sigmoid(values) if is_sigmoid else values.softmax(dim=-1)


def gate_weights(scores: Tensor, chosen: Tensor, routing: Routing) -> Tensor:
    """The weights of the chosen experts, [T, top_k] fp32."""
    weights = scores.gather(1, chosen)
    if routing.normalise:
        # Column by column: the order of a library's sum may depend on the number of rows.
        total = torch.full_like(weights[:, 0], TINY)
        for column in weights.unbind(dim=-1):
            total = total + column
        weights = weights / total[:, None]
    return weights * routing.scale


def _in_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """[T, E] bool: whether an expert is in one of its row's best groups.

    Experts of other groups are out of the choice, as in DeepSeek's code; transformers gives them
    the score 0, which beats a negative one.
    """
    groups = ranked.unflatten(1, (routing.num_groups, -1))
    best = groups.sort(dim=2, descending=True, stable=True).values[:, :, : routing.group_best]
    score = best.select(2, 0)
    for column in best.unbind(dim=2)[1:]:
        score = score + column
    winners = score.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_groups]
    inside = torch.zeros_like(score, dtype=torch.bool).scatter_(1, winners, True)
    return inside[:, :, None].expand_as(groups).flatten(1)
