"""Weights of integers, as GGUF files have them, whose products round activations to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.ops.native.library import NativeLibrary, WeightMemory
from sametoken.ops.native.weights import (
    PACKED_ROWS,
    SCALES,
    is_bf16,
    no_fp8_products,
    outside_vocabulary,
    packed_panels,
    require,
    silu_mul,
)
from sametoken.ops.weight import IntegerMatrix, Weight

#: As in integers.c, by bits (4 or 8) and features of a group.
_CODES = {(4, 32): 0, (8, 32): 1, (8, 16): 2}


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """``UnquantizedWeight`` of an ``IntegerMatrix``, in groups of columns (integers.c).

    Products are those of ``ops.model.gemm.integers``, to the bit.

    Attributes:
        library: of the products.
        panels: uint8, the only copy, zero padded to whole groups.
        form: int64, the ``format`` of integers.c.
        dtype: of rows.
    """

    library: NativeLibrary
    panels: Tensor
    form: Tensor
    out_features: int
    in_features: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the one copy: codes, scales and minima."""
        return self.panels.numel()

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        t, k = x.shape
        n, dtype = self.out_features, out_dtype or x.dtype
        if k != self.in_features:
            raise InvariantError(f"{k} inputs do not fit a weight [{n}, {self.in_features}]")
        require(x, x.dtype)
        out = torch.empty((t, n), dtype=dtype)
        done = self.library.integer_gemm(
            x.data_ptr(),
            self.panels.data_ptr(),
            self.form.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            t,
            n,
            is_bf16(x),
            dtype is torch.bfloat16,
        )
        if not done:
            raise MemoryError(f"no memory for a product of {t} rows")
        return out

    def gated_matmul(self, x: Tensor) -> Tensor:
        return silu_mul(self.library, self.matmul(x))

    def rows(self, token_ids: Tensor) -> Tensor:
        t, n = token_ids.shape[0], self.out_features
        require(token_ids, torch.int64)
        out = torch.empty((t, self.in_features), dtype=self.dtype)
        addresses = (one.data_ptr() for one in (token_ids, self.panels, self.form, out))
        if not self.library.integer_rows(*addresses, t, n, is_bf16(out)):
            raise outside_vocabulary(n)
        return out

    def quantize_fp8(self) -> Weight:
        raise no_fp8_products()


def pack_integers(
    library: NativeLibrary, memory: WeightMemory, matrix: IntegerMatrix, dtype: torch.dtype
) -> IntegerWeight:
    """See ``Packing.pack_integers``."""
    (n, k), bits = matrix.codes.shape, 4 if matrix.bits == 4 else 8
    # Bytes are signed, and have their zero taken out: 8 bits fit around 128 only.
    if (bits, matrix.width) not in _CODES or (matrix.bits == 8 and matrix.zero != 128):
        raise InvariantError(f"no product of {matrix.bits} bits by groups of {matrix.width}")
    zero, taken_out = (matrix.zero, 0) if bits == 4 else (0, matrix.zero)
    kind, has_minima = SCALES.index(matrix.scale.dtype), matrix.minimum is not None
    form = torch.tensor([k, _CODES[bits, matrix.width], kind, has_minima, zero])
    codes = (part - taken_out for part in matrix.codes.split(PACKED_ROWS))
    functions = library.integer_bytes, library.pack_integers
    panels = packed_panels(functions, memory, form, codes, matrix.scale, matrix.minimum)
    return IntegerWeight(library, panels, form, n, k, dtype)
