"""Weights of the C kernels: thin wrappers that pass tensors' addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.errors import InvariantError, UnsupportedError
from sametoken.ops.model.gemm.fp8 import GROUP
from sametoken.ops.model.gemm.int4 import unpacked_int4
from sametoken.ops.native.library import NativeLibrary, WeightMemory
from sametoken.ops.weight import Fp8Matrix, Int4Matrix, IntegerMatrix, Rounding, Weight

#: As in quantized.c.
_INT4, _FP8, _E2M1 = range(3)
_ONE_ZERO, _ZEROS, _FACTORS = range(3)
_AS_IS, _BY_ROW, _BY_GROUP, _FIXED, _POWERS = range(5)

#: As in integers.c, by bits (4 or 8) and features of a group.
_INTEGERS = {(4, 32): 0, (8, 32): 1, (8, 16): 2}

#: As in scales.h.
_SCALES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)

#: Rows of a matrix that are packed at once, a multiple of every group of columns.
_PACKED_ROWS = 1024


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """``UnquantizedWeight`` packed in contiguous groups of columns (tile.h).

    Attributes:
        library: of the products.
        panels: uint8, the only copy, zero padded to whole groups.
        address: of ``panels``, cached.
        dtype: bfloat16 or float32.
    """

    library: NativeLibrary
    panels: Tensor
    address: int
    out_features: int
    in_features: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the one copy."""
        return self.panels.numel()

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        t, k = x.shape
        n, dtype = self.out_features, out_dtype or x.dtype
        require(x, self.dtype)
        if k != self.in_features:
            raise InvariantError(f"{k} inputs do not fit a weight [{n}, {self.in_features}]")
        out = torch.empty((t, n), dtype=dtype)
        self.library.gemm(
            x.data_ptr(),
            self.address,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            t,
            n,
            k,
            self.dtype is torch.bfloat16,
            dtype is torch.bfloat16,
        )
        return out

    def gated_matmul(self, x: Tensor) -> Tensor:
        return gated(self.library.silu_mul, self.matmul(x))

    def rows(self, token_ids: Tensor) -> Tensor:
        t, n, k = token_ids.shape[0], self.out_features, self.in_features
        require(token_ids, torch.int64)
        out = torch.empty((t, k), dtype=self.dtype)
        bf16 = self.dtype is torch.bfloat16
        ids = token_ids.data_ptr()
        if not self.library.embedding(ids, self.address, out.data_ptr(), t, n, k, bf16):
            raise _outside_vocabulary(n)
        return out

    def quantize_fp8(self) -> Weight:
        raise _no_fp8_products()


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """``UnquantizedWeight`` in its checkpoint's bits, packed in groups of columns.

    Products of quantized.c widen codes to fp32, those of integers.c are, to the bit, those of
    ``ops.model.gemm.integers``.

    Attributes:
        library: of the products.
        products: of C: the product, and the rows of tokens.
        panels: uint8, the only copy, zero padded to whole groups.
        form: int64, the ``format`` of these functions.
        dtype: of rows.
        rounding: how activations become float8, the product's last arguments: the kind in
            quantized.c, and a fixed scale or 0. Empty for integers.c.
        order: as in ``Int4Matrix``.
    """

    library: NativeLibrary
    products: tuple[Callable[..., int], Callable[..., int]]
    panels: Tensor
    form: Tensor
    out_features: int
    in_features: int
    dtype: torch.dtype
    rounding: tuple[int | float, ...]
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the one copy: codes, scales, and zeros or minima."""
        return self.panels.numel()

    @property
    def num_elements(self) -> int:
        """See ``PackedMatrix``."""
        return self.out_features * self.in_features

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        t, k = x.shape
        n, dtype = self.out_features, out_dtype or x.dtype
        if k != self.in_features:
            raise InvariantError(f"{k} inputs do not fit a weight [{n}, {self.in_features}]")
        if self.order is not None:
            x = x[:, self.order]
        require(x, x.dtype)
        out = torch.empty((t, n), dtype=dtype)
        done = self.products[0](
            x.data_ptr(),
            self.panels.data_ptr(),
            self.form.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            t,
            n,
            is_bf16(x),
            dtype is torch.bfloat16,
            *self.rounding,
        )
        if not done:
            raise MemoryError(f"no memory for a product of {t} rows")
        return out

    def gated_matmul(self, x: Tensor) -> Tensor:
        return gated(self.library.silu_mul, self.matmul(x))

    def rows(self, token_ids: Tensor) -> Tensor:
        t, n = token_ids.shape[0], self.out_features
        require(token_ids, torch.int64)
        out = torch.empty((t, self.in_features), dtype=self.dtype)
        addresses = (one.data_ptr() for one in (token_ids, self.panels, self.form, out))
        if not self.products[1](*addresses, t, n, is_bf16(out)):
            raise _outside_vocabulary(n)
        return out if self.order is None else out[:, self.order.argsort()]

    def quantize_fp8(self) -> Weight:
        raise _no_fp8_products()


def _outside_vocabulary(n: int) -> InvariantError:
    """Of a token id that is no row of an embedding."""
    return InvariantError(f"a token id lies outside the vocabulary 0..{n - 1}")


def _no_fp8_products() -> UnsupportedError:
    """Of draft heads in float8."""
    return UnsupportedError(
        "the native kernels have no products with fp8 weights", 'leave "quantization" out'
    )


def pack_fp8(
    library: NativeLibrary, memory: WeightMemory, matrix: Fp8Matrix, dtype: torch.dtype
) -> QuantizedWeight:
    """See ``Packing.pack_fp8``."""
    n, k = matrix.values.shape
    scale = matrix.scale.view(n, -1)
    numbers = [k, k if matrix.scale.dim() == 1 else GROUP, _FP8, 0, _ONE_ZERO, 0]
    form = torch.tensor(numbers, dtype=torch.int64)
    codes = matrix.values.view(torch.uint8).split(_PACKED_ROWS)
    functions = library.quantized_bytes, library.pack_quantized
    panels = _packed_panels(functions, memory, form, codes, scale, None)
    products, rounding = (library.quantized_gemm, library.quantized_rows), matrix.rounding
    return QuantizedWeight(library, products, panels, form, n, k, dtype, _rounding(rounding))


def pack_int4(
    library: NativeLibrary, memory: WeightMemory, matrix: Int4Matrix, dtype: torch.dtype
) -> QuantizedWeight:
    """See ``Packing.pack_int4``."""
    n, k = matrix.values.shape[0], 2 * matrix.values.shape[1]
    scale, zero, first = matrix.scale, matrix.zero, 0
    if scale.dtype not in _SCALES:
        # E8M0 has bf16's exponents.
        scale = scale.bfloat16() if scale.dtype == torch.float8_e8m0fnu else scale.float()
    if zero is not None:
        first = int(zero[0, 0])
        zero = None if bool((zero == first).all()) else zero
    kind, offsets = _SCALES.index(scale.dtype), _ONE_ZERO if zero is None else _ZEROS
    if matrix.factor is not None:
        zero, offsets = matrix.factor[:, None], _FACTORS
    numbers = _E2M1 if matrix.zero is None else _INT4
    form = torch.tensor([k, matrix.width, numbers, kind, offsets, first], dtype=torch.int64)
    codes = (unpacked_int4(part, matrix.width) for part in matrix.values.split(_PACKED_ROWS))
    functions = library.quantized_bytes, library.pack_quantized
    panels = _packed_panels(functions, memory, form, codes, scale, zero)
    products, rounding = (library.quantized_gemm, library.quantized_rows), _rounding(None)
    return QuantizedWeight(library, products, panels, form, n, k, dtype, rounding, matrix.order)


def pack_integers(
    library: NativeLibrary, memory: WeightMemory, matrix: IntegerMatrix, dtype: torch.dtype
) -> QuantizedWeight:
    """See ``Packing.pack_integers``."""
    (n, k), bits = matrix.codes.shape, 4 if matrix.bits == 4 else 8
    # Bytes are signed, and have their zero taken out: 8 bits fit around 128 only.
    if (bits, matrix.width) not in _INTEGERS or (matrix.bits == 8 and matrix.zero != 128):
        raise InvariantError(f"no product of {matrix.bits} bits by groups of {matrix.width}")
    zero, taken_out = (matrix.zero, 0) if bits == 4 else (0, matrix.zero)
    kind, has_minima = _SCALES.index(matrix.scale.dtype), matrix.minimum is not None
    numbers = [k, _INTEGERS[bits, matrix.width], kind, has_minima, zero]
    form = torch.tensor(numbers, dtype=torch.int64)
    codes = (part - taken_out for part in matrix.codes.split(_PACKED_ROWS))
    functions = library.integer_bytes, library.pack_integers
    panels = _packed_panels(functions, memory, form, codes, matrix.scale, matrix.minimum)
    products = library.integer_gemm, library.integer_rows
    return QuantizedWeight(library, products, panels, form, n, k, dtype, rounding=())


def _packed_panels(
    functions: tuple[Callable[[int, int], int], Callable[..., None]],
    memory: WeightMemory,
    form: Tensor,
    codes: Iterable[Tensor],
    scale: Tensor,
    offset: Tensor | None,
) -> Tensor:
    """Panels of [N, K] uint8 codes, with scales and offsets by group.

    Args:
        functions: of C: the bytes of a number of rows, and the packing of some.
        memory: that the panels are taken from.
        form: the format that both functions are given.
        codes: of ``_PACKED_ROWS`` rows at a time.
        scale: [N, groups].
        offset: [N, groups], [N, 1] or None.
    """
    bytes_of, pack = functions
    address = form.data_ptr()
    panels = memory.take(bytes_of(address, scale.shape[0]))
    first = 0
    for part in codes:
        rows = slice(first, first + part.shape[0])
        own = part.contiguous(), scale[rows].contiguous()
        offsets = None if offset is None else offset[rows].contiguous()
        pack(
            *(one.data_ptr() for one in own),
            None if offsets is None else offsets.data_ptr(),
            panels.data_ptr() + bytes_of(address, first),
            address,
            part.shape[0],
        )
        first += part.shape[0]
    return panels


def _rounding(rounding: Rounding | None) -> tuple[int, float]:
    if rounding is None:
        return _AS_IS, 0.0
    if rounding.scale is not None:
        return _FIXED, float(rounding.scale)
    if rounding.powers:
        return _POWERS, 0.0
    return (_BY_GROUP if rounding.grouped else _BY_ROW), 0.0


def gated(function: Callable[..., None], gate_up: Tensor, *limits: float) -> Tensor:
    """[T, 2I] = [gate | up] -> [T, I], by a function of C that may have limits of its own."""
    t, width = gate_up.shape
    require(gate_up, gate_up.dtype)
    out, bf16 = gate_up.new_empty(t, width // 2), is_bf16(gate_up)
    function(gate_up.data_ptr(), out.data_ptr(), t, width // 2, *limits, bf16)
    return out


def is_bf16(x: Tensor) -> bool:
    """Whether a tensor is bf16 rather than fp32.

    Raises:
        UnsupportedError: it is neither.
    """
    dtype = x.dtype
    if dtype is torch.bfloat16:
        return True
    if dtype is torch.float32:
        return False
    raise UnsupportedError(f"the CPU kernels have no {dtype}", "use bfloat16 or float32")


def require(x: Tensor, dtype: torch.dtype) -> None:
    """Refuse a wrong dtype and strided rows: C code reads raw memory.

    Raises:
        InvariantError: refused.
    """
    if x.dtype is not dtype or not x.is_contiguous():
        raise InvariantError(f"a kernel needs contiguous {dtype}, got {x.dtype} {x.stride()}")
