"""Matrix products on a GPU by any of their kernels: Triton's, Hopper's of few rows, cuBLAS.

No kernel uses split-K, and all add over in_features in order, so a row's bits do not depend on
the row count, the tiles, or the kernel (tests/gpu/test_gemm_gpu.py). cuBLAS serves where its bits
match.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sametoken.ops.model.activation_triton import silu_mul
from sametoken.ops.model.gemm import streamed_hopper
from sametoken.ops.model.gemm import triton as gemm
from sametoken.ops.model.gemm.tuning import CublasConfig, Epilogue, GemmConfig, StreamedConfig


def product(
    config: GemmConfig,
    x: Tensor,
    matrix: Tensor,
    epilogue: Epilogue = "none",
    bias: Tensor | None = None,
) -> Tensor:
    """One product by one given kernel.

    Args:
        config: the kernel.
        x: [T, K], contiguous.
        matrix: [N, K], contiguous, of x's dtype.
        epilogue: "silu_mul" gives [T, N / 2], "logits" fp32.
        bias: [N], for the epilogue "bias".
    """
    assert x.is_contiguous()
    assert matrix.is_contiguous()
    assert x.shape[1] == matrix.shape[1]
    assert x.dtype == matrix.dtype
    assert (bias is not None) == (epilogue == "bias")
    if isinstance(config, CublasConfig):
        return _cublas_product(x, matrix, epilogue, bias)
    if isinstance(config, StreamedConfig):
        return streamed_hopper.product(config, x, matrix, epilogue, bias)
    return gemm.tiled_product(config, x, matrix, epilogue, bias)


def _cublas_product(x: Tensor, matrix: Tensor, epilogue: Epilogue, bias: Tensor | None) -> Tensor:
    if epilogue == "logits":
        return torch.mm(x, matrix.t(), out_dtype=torch.float32)
    if epilogue == "bias":
        return F.linear(x, matrix, bias)
    out = torch.mm(x, matrix.t())
    return silu_mul(out) if epilogue == "silu_mul" else out
