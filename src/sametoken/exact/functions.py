"""Kernels with gradients: a kernel runs forward, a formula in fp32 gives the gradients.

A kernel gets the arguments that it gets in the engine. The backward pass evaluates the formula
again, in plain PyTorch, so a kernel's outputs are rounded and its gradients' inputs are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sametoken.ops.backend import AttentionShape
from sametoken.ops.weight import UnquantizedWeight
from sametoken.sampling.logprobs import log_probabilities

Formula = Callable[..., Tensor | tuple[Tensor, ...]]

#: Rows whose logits are in memory at once: 256 of 150k are 154 MB.
SCORED_ROWS = 256


def gradients(
    formula: Formula, inputs: Sequence[Tensor], needed: Sequence[bool], of: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of a formula at the inputs, in fp32, each rounded once to its input's dtype.

    Args:
        formula: of the inputs in fp32.
        inputs: any floating dtypes.
        needed: the inputs whose gradient is wanted; None is returned for the others.
        of: the gradients of the formula's outputs.
    """
    leaves = [tensor.detach().float() for tensor in inputs]
    wanted = [leaf.requires_grad_() for leaf, wants in zip(leaves, needed, strict=True) if wants]
    with torch.enable_grad():
        outputs = formula(*leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    found = iter(torch.autograd.grad(outputs, wanted, [one.float() for one in of]))
    return [
        next(found).to(tensor.dtype) if wants else None
        for tensor, wants in zip(inputs, needed, strict=True)
    ]


class Recomputed(Function):
    """``kernel(*inputs)``, with the gradients of ``formula(*inputs)``."""

    @staticmethod
    def forward(ctx: Any, kernel: Formula, formula: Formula, *inputs: Tensor) -> Any:
        """The kernel's outputs, which share no memory with the inputs."""
        ctx.formula = formula
        ctx.save_for_backward(*inputs)
        return kernel(*inputs)

    @staticmethod
    def backward(ctx: Any, *of: Tensor) -> Any:
        """Of the inputs alone."""
        needed = ctx.needs_input_grad[2:]
        return None, None, *gradients(ctx.formula, ctx.saved_tensors, needed, of)


class Product(Function):
    """``packed.matmul(x, bias, out_dtype)``, with gradients from the unpacked ``matrix``, [N, K].

    Unlike ``Recomputed`` it computes no product twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        packed: UnquantizedWeight,
        out_dtype: torch.dtype | None,
        x: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
    ) -> Any:
        """[T, K] -> [T, N]."""
        ctx.save_for_backward(x, matrix)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return packed.matmul(x, bias, out_dtype)

    @staticmethod
    def backward(ctx: Any, of: Tensor) -> Any:
        """Of x, the matrix and the bias."""
        x, matrix = ctx.saved_tensors
        _, _, of_x, of_matrix, of_bias = ctx.needs_input_grad
        wide = of.float()
        return (
            None,
            None,
            (wide @ matrix.float()).to(x.dtype) if of_x else None,
            (wide.mT @ x.float()).to(matrix.dtype) if of_matrix else None,
            wide.sum(dim=0).to(ctx.bias_dtype) if of_bias else None,
        )


class PackedAttention(Function):
    """A kernel's causal attention over packed sequences, with gradients sequence by sequence.

    The backward pass has the weights of one sequence of length n in memory: n^2 per head, in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Callable[[Tensor], Tensor],
        shape: AttentionShape,
        lengths: Sequence[int],
        *qkv: Tensor,
    ) -> Any:
        """[T, heads, head_dim] q, k and v -> [T, q_size]; the kernel reads k and v as it wrote them.

        ``lengths`` are those of the sequences, T in total.
        """
        ctx.shape, ctx.lengths = shape, lengths
        ctx.save_for_backward(*qkv)
        return kernel(qkv[0])

    @staticmethod
    def backward(ctx: Any, of: Tensor) -> Any:
        """Of q, k and v."""
        needed = ctx.needs_input_grad[3:]
        pieces = zip(*(tensor.split(ctx.lengths) for tensor in (*ctx.saved_tensors, of)), strict=True)

        def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attended(q, k, v, ctx.shape)

        parts = [gradients(formula, qkv, needed, [piece]) for *qkv, piece in pieces]
        joined = (torch.cat(column) if column[0] is not None else None for column in zip(*parts))
        return None, None, None, *joined


def attended(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
    """Causal attention within one sequence: [n, heads, head_dim] each -> [n, q_size]."""
    grouped = q.unflatten(1, (shape.num_kv_heads, -1))
    scores = torch.einsum("ngrd,mgd->grnm", grouped, k) * shape.scale
    places = torch.arange(q.shape[0], device=q.device)
    behind = places[:, None] - places
    hidden = (behind < 0) | (behind >= (shape.sliding_window or q.shape[0]))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("grnm,mgd->ngrd", weights, v).flatten(1)


class TokenLogprobs(Function):
    """Log-probabilities of chosen tokens, with the logits of ``SCORED_ROWS`` rows in memory.

    The backward pass computes the logits again, by the same kernels, and adds the gradients of the
    head's matrix in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute_logits: Callable[[Tensor], Tensor],
        chosen: Tensor,
        hidden: Tensor,
        matrix: Tensor,
    ) -> Any:
        """[L, hidden] states and [L] int64 tokens -> [L] fp32.

        ``compute_logits`` is differentiable, and multiplies by ``matrix``.
        """
        ctx.compute_logits = compute_logits
        ctx.save_for_backward(chosen, hidden, matrix)
        pairs = zip(hidden.split(SCORED_ROWS), chosen.split(SCORED_ROWS), strict=True)
        return torch.cat([_chosen_logprobs(compute_logits(rows), ids) for rows, ids in pairs])

    @staticmethod
    def backward(ctx: Any, of: Tensor) -> Any:
        """Of the hidden states and the matrix."""
        chosen, hidden, matrix = ctx.saved_tensors
        _, _, of_hidden, of_matrix = ctx.needs_input_grad
        by_hidden = torch.zeros_like(hidden)
        by_matrix = torch.zeros_like(matrix, dtype=torch.float32) if of_matrix else None
        for first in range(0, hidden.shape[0], SCORED_ROWS):
            at = slice(first, first + SCORED_ROWS)
            rows = hidden[at].detach().requires_grad_()
            with torch.enable_grad():
                logprobs = _chosen_logprobs(ctx.compute_logits(rows), chosen[at])
            wanted = (rows, matrix) if of_matrix else (rows,)
            by_hidden[at], *rest = torch.autograd.grad(logprobs, wanted, of[at])
            if by_matrix is not None:
                by_matrix += rest[0]
        of_matrices = None if by_matrix is None else by_matrix.to(matrix.dtype)
        return None, None, by_hidden if of_hidden else None, of_matrices


def _chosen_logprobs(logits: Tensor, chosen: Tensor) -> Tensor:
    return log_probabilities(logits).gather(1, chosen[:, None]).squeeze(1)
