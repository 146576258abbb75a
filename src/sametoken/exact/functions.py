"""Kernels with gradients: a kernel runs forward, a formula in fp32 gives the gradients.

A kernel gets the arguments that it gets in the engine. The backward pass evaluates the formula
again, in plain PyTorch, from the inputs that the kernel had; nothing in between is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from sametoken.engine.modes import without_modes
from sametoken.ops.backend import AttentionShape
from sametoken.ops.weight import UnquantizedWeight
from sametoken.sampling.logprobs import log_probabilities

T = TypeVar("T")
#: One tensor or several.
Formula = Callable[..., Any]

#: Logits that are in memory at once: 1,788 rows of 150k.
SCORED_BYTES = 1 << 30


def recomputed(kernel: Callable[..., T], formula: Formula, *inputs: Tensor) -> T:
    """``kernel(*inputs)``, with the gradients of ``formula(*inputs)``.

    Args:
        kernel: its outputs share no memory with the inputs.
        formula: the same of inputs in fp32, differentiable.
        inputs: any floating dtypes.
    """
    num_inputs = len(inputs)

    def gradients_of(*kept: Tensor) -> list[Tensor | None]:
        given, of = kept[:num_inputs], kept[num_inputs:]
        return gradients(formula, given, [one.requires_grad for one in given], of)

    return derived(lambda *inputs: (kernel(*inputs), inputs), gradients_of, *inputs)


def derived(
    kernel: Callable[..., tuple[T, tuple[Tensor, ...]]],
    gradients_of: Callable[..., Sequence[Tensor | None]],
    *inputs: Tensor,
) -> T:
    """The first of what ``kernel(*inputs)`` gives, with gradients by a function of their own.

    Args:
        kernel: gives its outputs, which share no memory with the inputs, and what the backward
            pass needs.
        gradients_of: of these, and then of the outputs' gradients: the inputs' gradients, or None
            for inputs that require none.
        inputs: any floating dtypes.
    """
    out: T = _Derived.apply(  # type: ignore[no-untyped-call, unused-ignore]
        kernel, gradients_of, *inputs
    )
    return out


def embedded(rows: Callable[[Tensor], Tensor], token_ids: Tensor, matrix: Tensor) -> Tensor:
    """``rows(token_ids)`` of a packed ``matrix``, [V, hidden], with gradients for it."""

    def gradients_of(of: Tensor) -> tuple[Tensor]:
        return (
            torch.ops.aten.embedding_dense_backward(
                of.float(), token_ids, matrix.shape[0], -1, False
            ).to(matrix.dtype),
        )

    return derived(lambda matrix: (rows(token_ids), ()), gradients_of, matrix)


def product(
    packed: UnquantizedWeight,
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """``packed.matmul(x, bias, out_dtype)``, with gradients by the unpacked ``matrix``, [N, K].

    As ``recomputed``, but no product is computed twice.
    """
    biases = () if bias is None else (bias,)

    def run(x: Tensor, matrix: Tensor, *biases: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return packed.matmul(x, biases[0] if biases else None, out_dtype), (x, matrix, *biases)

    def gradients_of(x: Tensor, matrix: Tensor, *rest: Tensor) -> tuple[Tensor | None, ...]:
        *biases, of = rest
        by_biases = (of.sum(dim=0, dtype=torch.float32).to(one.dtype) for one in biases)
        return (*product_gradients(x, matrix, of), *by_biases)

    return derived(run, gradients_of, x, matrix, *biases)


def product_gradients(x: Tensor, matrix: Tensor, of: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of ``x @ matrix.T``, for those of x and the matrix that require one; ``of`` is its own."""
    # A CPU is several times slower in bf16. A GPU is 15 times faster, with sums in fp32.
    dtype = x.dtype if x.is_cuda else torch.float32
    given = of.to(dtype)
    return (
        (given @ matrix.to(dtype)).to(x.dtype) if x.requires_grad else None,
        (given.mT @ x.to(dtype)).to(matrix.dtype) if matrix.requires_grad else None,
    )


def packed_attention(
    kernel: Callable[[Tensor], Tensor],
    qkv: Sequence[Tensor],
    shape: AttentionShape,
    lengths: Sequence[int],
) -> Tensor:
    """A kernel's causal attention over packed sequences, with gradients sequence by sequence.

    The backward pass has the weights of one sequence of length n in memory: n^2 per head, in fp32.

    Args:
        kernel: of q; reads the same k and v from KV memory.
        qkv: q, k and v, [T, heads, head_dim] each.
        shape: of the layer.
        lengths: of the sequences, T in total.
    """

    def gradients_of(*kept: Tensor) -> list[Tensor | None]:
        needed = [tensor.requires_grad for tensor in kept[:3]]
        columns = [torch.split(tensor, [*lengths]) for tensor in kept]
        parts: list[list[Any]] = [
            gradients(lambda q, k, v: attended(q, k, v, shape), sequence, needed, [of])
            for *sequence, of in zip(*columns, strict=True)
        ]
        by_input = zip(*parts, strict=True)
        return [torch.cat(pieces) if pieces[0] is not None else None for pieces in by_input]

    return derived(lambda *qkv: (kernel(qkv[0]), qkv), gradients_of, *qkv)


def token_logprobs(
    compute_logits: Callable[[Tensor], Tensor], hidden: Tensor, matrix: Tensor, chosen: Tensor
) -> Tensor:
    """Log-probabilities of chosen tokens, with ``SCORED_BYTES`` of logits in memory.

    The backward pass computes the logits again, by the same kernels, and adds the gradients of the
    head's matrix in fp32.

    Args:
        compute_logits: [L, hidden] to [L, V] fp32, differentiable; multiplies by ``matrix``.
        hidden: [L, hidden], after the final norm.
        matrix: [V, hidden], the head's.
        chosen: [L] int64.

    Returns:
        [L] fp32.
    """
    num_rows = max(SCORED_BYTES // (matrix.shape[0] * torch.float32.itemsize), 1)

    def run(hidden: Tensor, matrix: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        pairs = zip(torch.split(hidden, num_rows), torch.split(chosen, num_rows), strict=True)
        found = [_chosen_logprobs(compute_logits(rows), ids) for rows, ids in pairs]
        return torch.cat(found), (chosen, hidden, matrix)

    def gradients_of(
        chosen: Tensor, hidden: Tensor, matrix: Tensor, of: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        by_hidden = torch.empty_like(hidden)
        by_matrix = torch.zeros_like(matrix, dtype=torch.float32) if matrix.requires_grad else None
        for first in range(0, hidden.shape[0], num_rows):
            at = slice(first, first + num_rows)
            rows = hidden[at].detach().requires_grad_()
            with torch.enable_grad():
                logprobs = _chosen_logprobs(compute_logits(rows), chosen[at])
            wanted = (rows,) if by_matrix is None else (rows, matrix)
            by_hidden[at], *rest = torch.autograd.grad(logprobs, wanted, of[at])
            if by_matrix is not None:
                by_matrix += rest[0]
        of_matrix = None if by_matrix is None else by_matrix.to(matrix.dtype)
        return by_hidden if hidden.requires_grad else None, of_matrix

    return derived(run, gradients_of, hidden, matrix)


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
    # Some outputs depend on inputs alone whose gradient nobody wants.
    pairs = [(out, one.float()) for out, one in zip(outputs, of, strict=True) if out.requires_grad]
    outputs, of = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, of))
    return [
        next(found).to(tensor.dtype) if wants else None
        for tensor, wants in zip(inputs, needed, strict=True)
    ]


def attended(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
    """Causal attention within one sequence: [n, heads, head_dim] each -> [n, q_size]."""
    grouped = torch.unflatten(q, 1, (shape.num_kv_heads, -1))
    scores = torch.einsum("ngrd,mgd->grnm", grouped, k) * shape.scale
    places = torch.arange(q.shape[0], device=q.device)
    behind = places[:, None] - places
    unseen = (behind < 0) | (behind >= (shape.sliding_window or q.shape[0]))
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
    return torch.einsum("grnm,mgd->ngrd", weights, v).flatten(1)


class _Derived(Function):
    @staticmethod
    def forward(ctx: Any, kernel: Formula, gradients_of: Formula, *inputs: Tensor) -> Any:
        out, kept = kernel(*inputs)
        ctx.gradients_of = gradients_of
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    @without_modes()
    def backward(ctx: Any, *of: Tensor) -> Any:
        return None, None, *ctx.gradients_of(*ctx.saved_tensors, *of)


def _chosen_logprobs(logits: Tensor, chosen: Tensor) -> Tensor:
    return log_probabilities(logits).gather(1, chosen[:, None]).squeeze(1)
