"""Weight protocols: a matrix owns its products, whatever its format and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sametoken.ops.layer import LayerParts, WholeLayers
    from sametoken.ops.model.low_rank import AdaptedWeight, Room, RowAdapters
    from sametoken.ops.model.low_rank_experts import AdaptedExperts, ExpertSizes


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a product rounds its activations to float8 e4m3: each row by itself.

    Attributes:
        grouped: whether a row has a scale per 128 features, rather than one.
        scale: [] fp32, one fixed scale for all rows; None: a row's or group's largest element
            becomes the largest number.
        powers: whether scales of groups are powers of two (UE8M0), the least that leave no element
            beyond the largest number.
    """

    grouped: bool = False
    scale: Tensor | None = None
    powers: bool = False

    def __post_init__(self) -> None:
        assert self.grouped or not self.powers

    @property
    def is_dynamic(self) -> bool:
        """Whether scales are those of a row's, or its groups', own largest elements."""
        return self.scale is None

    @property
    def form(self) -> tuple[bool, bool]:
        """What is known of it before a checkpoint's scales are read."""
        return self.grouped, self.powers


BY_ROW = Rounding()


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows that were rounded for a product, whose ``Rounding`` is dynamic.

    Attributes:
        values: [T, K] float8 e4m3, contiguous.
        scale: [T] or [T, groups] fp32, factors on the rows or groups.
        dtype: of the rows before, and of products.
    """

    values: Tensor
    scale: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """[T, K]."""
        return self.values.shape

    def __getitem__(self, rows: slice) -> RoundedRows:
        return RoundedRows(self.values[rows], self.scale[rows], self.dtype)


#: Rows that a projection reads: in the model's dtype, or as its weight would round them.
Normed = Tensor | RoundedRows


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A checkpoint's [N, K] matrix in float8.

    Attributes:
        values: [N, K] float8 e4m3, contiguous.
        scale: fp32, contiguous, factors on the values: [N] by row, or [N, ceil(K / 128)] by row
            and 128 features.
        rounding: how products round activations; None: they do not.
        blocks: whether scales are of groups, and alike for the rows from each multiple of 128 on,
            128 or up to the last.
    """

    values: Tensor
    scale: Tensor
    rounding: Rounding | None
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A checkpoint's [N, K] matrix in 4 bits, by groups of ``width`` features.

    An element is ``(value - zero) * scale``, with the zero and scale of its row and group; without
    zeros, values are codes of e2m1, and an element is ``number * scale`` (MXFP4, and NVFP4, whose
    rows have factors beside).

    Attributes:
        values: [N, K / 2] uint8, contiguous. Byte i of a group has the group's feature i in its
            low half, and feature i + width / 2 in its high one.
        scale: [N, K / width], of any floating dtype, contiguous.
        zero: [N, K / width] uint8, contiguous; None: values are codes of e2m1.
        order: [K] int64, the activations' feature that each column is multiplied with; None: its
            own.
        factor: [N] fp32, of the sums of each row, whose scales then are positive numbers of e4m3,
            so that elements are exact in 16 bits; None: 1.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None = None
    factor: Tensor | None = None

    @property
    def width(self) -> int:
        """Features of a group: 16, 32, 64 or 128."""
        return 2 * self.values.shape[1] // self.scale.shape[1]


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """A file's [N, K] matrix of unsigned integers, by groups of neighbouring features.

    An element is ``(code - zero) * scale``, or ``code * scale + minimum``, with the scale and
    minimum of its row and group.

    Attributes:
        codes: [N, K] uint8.
        bits: of a code, 4 to 8.
        scale: [N, groups] fp32, fp16 or bf16.
        zero: the code that stands for 0, where there are no minima: half of 2^bits.
        minimum: [N, groups], of the dtype of ``scale``, or None.
    """

    codes: Tensor
    bits: int
    scale: Tensor
    zero: int = 0
    minimum: Tensor | None = None

    @property
    def width(self) -> int:
        """Features of a group: 16, or a multiple of 32."""
        return self.codes.shape[1] // self.scale.shape[1]


class Weight(Protocol):
    """A matrix in the layout of its products, and those products.

    Holds the only copy of the checkpoint's [N, K] matrix; ``out_features`` is N, ``in_features`` K.
    """

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """``x @ weight.T (+ bias)``, rounded once: [T, K] -> [T, N] in x's dtype.

        With ``out_dtype`` torch.float32 and no bias, returns unrounded sums: for logits, and for
        products that are added to others.
        """
        ...

    def gated_matmul(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` with [gate | up] = ``matmul(x)`` [T, 2I]: [T, K] -> [T, I].

        Gate and up are rounded to x's dtype before the product.
        """
        ...


@runtime_checkable
class UnquantizedWeight(Weight, Protocol):
    """A weight in the model's dtype, or in bits that this device can look up, as an embedding."""

    def rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the matrix in the model's dtype: [T] int64 -> [T, K]."""
        ...

    def quantize_fp8(self) -> Weight:
        """An fp8 copy whose products round activations too; never for the target's logits.

        Draft heads only. A matrix of integers is itself: a copy would have hardly fewer bits.

        Raises:
            UnsupportedError: this backend has no fp8 products.
        """
        ...


@runtime_checkable
class RoundingWeight(Weight, Protocol):
    """A quantized weight whose products take rows that others have rounded, with the same bits."""

    @property
    def rounding(self) -> Rounding | None: ...

    def matmul_rounded(self, rows: RoundedRows, bias: Tensor | None = None) -> Tensor:
        """``matmul`` of the rows before they were rounded, by ``rounding``, which is dynamic."""
        ...

    def gated_matmul_rounded(self, rows: RoundedRows) -> Tensor:
        """``gated_matmul``, likewise."""
        ...


@runtime_checkable
class CutWeight(Weight, Protocol):
    """A quantized weight whose rows can be copied in their bits."""

    def cut(self, token_ids: Tensor) -> Weight:
        """The rows of these tokens in the same bits; ``token_ids`` is [V'] int64."""
        ...


@runtime_checkable
class ExpandedWeight(Weight, Protocol):
    """A weight whose matrix a GPU expands in memory before products of many rows."""

    @property
    def num_expanded(self) -> int:
        """Elements of that matrix, in the dtype of the activations."""
        ...


@runtime_checkable
class PackedMatrix(Protocol):
    """A matrix in few bits, of a weight or of experts: many rows take the time of one in 16."""

    @property
    def nbytes(self) -> int: ...

    @property
    def num_elements(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ClampedExperts:
    """What gpt-oss's experts have beside their matrices: biases, and a gate within limits.

    Attributes:
        alpha, limit: as in ``Kernels.clamped_swiglu``.
        gate_up: [E, 2I] = [gate | up], the first product's biases.
        down: [E, H], the second's; zeros on all ranks but one, as partial sums are added.
    """

    alpha: float
    limit: float
    gate_up: Tensor
    down: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the biases."""
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class GeluExperts:
    """Experts without biases whose gate is gelu, as in ``Kernels.gelu_mul`` (Gemma 4)."""

    nbytes: ClassVar[int] = 0


#: What experts have in place of silu's gate without biases.
ExpertForm = ClampedExperts | GeluExperts


class Experts(Protocol):
    """The experts of a mixture-of-experts layer, in the layout of their products."""

    @property
    def nbytes(self) -> int: ...

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        out_dtype: torch.dtype | None = None,
        beside: Tensor | None = None,
    ) -> Tensor:
        """Weighted sum of ``down.matmul(gate_up.gated_matmul(x))`` over each row's experts.

        Without gates, of ``down.matmul(relu_squared(up.matmul(x)))``; with ``ClampedExperts``, of
        ``down.matmul(clamped_swiglu(gate_up.matmul(x)))``, biases added to both; with
        ``GeluExperts``, of ``down.matmul(gelu_mul(gate_up.matmul(x)))``.

        Added in fp32, in an order that depends on the row only, and rounded once: [T, H] ->
        [T, H] in x's dtype. With ``out_dtype`` torch.float32 nothing is rounded after the gated
        products, so that tensor-parallel partial sums can be added first. ``beside``, [T, H] in
        the result's dtype, is added to it, rounded again. ``chosen`` and ``weights`` come from
        ``Kernels.moe_gate``.
        """
        ...


class Packing(Protocol):
    """How a backend takes over matrices, each in the layout of its products."""

    def pack(self, weight: Tensor) -> UnquantizedWeight:
        """Take over a [N, K] weight; the caller drops its own reference."""
        ...

    def pack_fp8(self, matrix: Fp8Matrix, dtype: torch.dtype) -> Weight:
        """Take over a float8 matrix, for activations of ``dtype``.

        Products add the features of each scale in order, in fp32, then the scaled sums in order
        (docs/decisions/0029-products-of-quantized-weights.md).

        Raises:
            UnsupportedError: this device has no such products.
        """
        ...

    def pack_int4(self, matrix: Int4Matrix, dtype: torch.dtype) -> Weight:
        """Take over a 4-bit matrix, for activations of ``dtype``; sums and errors as ``pack_fp8``.

        Activations are not rounded.
        """
        ...

    def pack_integers(self, matrix: IntegerMatrix, dtype: torch.dtype) -> UnquantizedWeight:
        """Take over a matrix of integers; arguments, sums and errors as ``pack_int4``.

        The C kernels round activations to 8 bits (``ops.model.gemm.integers``).
        """
        ...

    def require_integer_experts(self) -> None:
        """Refuse experts of ``pack_integers``, before weights are loaded.

        Raises:
            UnsupportedError: this device has no such products.
        """
        ...

    def whole_layers(self, parts: Sequence[LayerParts | None]) -> WholeLayers | None:
        """Layers that this backend runs in one call; None: it has none for any of these parts."""
        ...

    def stack(self, weights: Sequence[Weight]) -> Weight:
        """Weights of equal in_features as one, with their rows in this order."""
        ...

    def adapt(
        self, weight: Weight, sizes: Sequence[int], room: Room, rows: RowAdapters
    ) -> AdaptedWeight:
        """A weight beside which each row adds its adapter's product.

        Args:
            weight: the checkpoint's [N, K].
            sizes: output features of its parts, N in total.
            room: for adapters.
            rows: the place of each row's adapter.
        """
        ...

    def pack_experts(
        self,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        form: ExpertForm | None = None,
    ) -> Experts:
        """Take over [gate | up] and down of E experts; the caller drops its own references.

        Experts whose first matrix is as wide as the second is deep are not gated: up and down,
        with ``relu_squared`` between. ``form`` gives gated ones another gate, and biases.
        """
        ...

    def adapt_experts(
        self, experts: Experts, sizes: ExpertSizes, room: Room, rows: RowAdapters
    ) -> AdaptedExperts:
        """Experts of ``pack_experts`` beside which each row adds its adapter's products.

        Args:
            experts: the checkpoint's.
            sizes: theirs.
            room, rows: as for ``adapt``.
        """
        ...
