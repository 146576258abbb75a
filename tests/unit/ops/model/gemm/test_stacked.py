"""Weights of different formats as one."""

from __future__ import annotations

import torch

from sametoken.ops.reference import ReferenceKernels

KERNELS = ReferenceKernels()


def test_a_stack_gives_what_its_parts_give():
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(rows, 12, generator=generator) for rows in (4, 2, 6)]
    x, bias = torch.randn(5, 12, generator=generator), torch.randn(12, generator=generator)
    parts = [KERNELS.pack(matrix.clone()) for matrix in matrices]
    stack = KERNELS.stack([parts[0], parts[1].quantize_fp8(), parts[2]])
    assert (stack.out_features, stack.in_features) == (12, 12)
    assert stack.nbytes == sum(part.nbytes for part in stack.parts)
    whole = stack.matmul(x, bias)
    assert torch.equal(whole[:, :4], parts[0].matmul(x, bias[:4]))
    assert torch.equal(whole[:, 4:6], parts[1].quantize_fp8().matmul(x, bias[4:6]))
    assert torch.equal(stack.matmul(x, out_dtype=torch.float32)[:, 6:], parts[2].matmul(x))
    gate, up = stack.matmul(x).chunk(2, dim=1)
    assert torch.allclose(stack.gated_matmul(x), torch.nn.functional.silu(gate) * up)
