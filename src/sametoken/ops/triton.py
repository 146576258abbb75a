"""The Triton backend: every kernel on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.ops.backend import (
    AttentionShape,
    LayerKV,
    Norm,
    QueryRows,
)
from sametoken.ops.hopper import is_hopper, shared_memory_of_device
from sametoken.ops.layer import LayerParts
from sametoken.ops.model import activation_triton as activation
from sametoken.ops.model import embedding as embedding_reference
from sametoken.ops.model import embedding_triton, moe_gate_triton
from sametoken.ops.model import norm_triton as norm
from sametoken.ops.model import partial_sum_triton as partial_sum_op
from sametoken.ops.model import rope_triton as rope
from sametoken.ops.model.attention import hopper
from sametoken.ops.model.attention import triton as attention
from sametoken.ops.model.gemm.fp8 import quantize
from sametoken.ops.model.gemm.fp8_triton import Fp8DeviceWeight
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.gemm.int4_triton import FEW_ROWS, Int4DeviceWeight
from sametoken.ops.model.gemm.product import product
from sametoken.ops.model.gemm.quantized_selfcheck import QuantizedCheck
from sametoken.ops.model.gemm.reference import MatrixWeight
from sametoken.ops.model.gemm.selfcheck import GemmReport, ProvenTable
from sametoken.ops.model.gemm.stacked import StackedWeight
from sametoken.ops.model.gemm.triton import epilogue_of
from sametoken.ops.model.gemm.tuning import (
    FLOAT32,
    Epilogue,
    GemmChooser,
    GemmShape,
    GemmTable,
)
from sametoken.ops.model.latent_attention import hopper as latent_hopper
from sametoken.ops.model.latent_attention import rope_triton as latent_rope
from sametoken.ops.model.latent_attention import triton as latent_attention
from sametoken.ops.model.latent_attention.heads_triton import DeviceHeadWeights
from sametoken.ops.model.latent_attention.shape import LatentShape, LayerLatent
from sametoken.ops.model.low_rank import AdaptedWeight, Room, RowAdapters
from sametoken.ops.model.low_rank_experts import ExpertSizes
from sametoken.ops.model.low_rank_experts_triton import AdaptedStackedExperts
from sametoken.ops.model.low_rank_triton import StackedUpdates
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_triton import StackedExperts
from sametoken.ops.model.recurrent import triton as recurrent
from sametoken.ops.sampling import logits_rules_triton as logits_rules
from sametoken.ops.sampling import sample_triton as sampling
from sametoken.ops.sampling import truncation_triton as truncation_op
from sametoken.ops.triton_versions import TRITON_VERSION
from sametoken.ops.weight import (
    ExpertForm,
    Experts,
    Fp8Matrix,
    Int4Matrix,
    IntegerMatrix,
    UnquantizedWeight,
    Weight,
)

MAX_HEAD_DIM = 512
#: Tiles of wider heads, and of latents, take this much shared memory.
NARROW_HEAD_DIM, LARGE_TILES = 256, 96 << 10
#: Elements of a latent, and of its rotated key, whose tiles fit in shared memory.
MAX_RANK, MAX_ROPE_DIM = 512, 64


@dataclass(frozen=True, slots=True)
class DeviceWeight(MatrixWeight):
    """``UnquantizedWeight`` on a GPU, in the checkpoint's layout.

    Attributes:
        table: the kernel of each row count.
    """

    table: GemmChooser

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return self._product(x, epilogue_of(bias, out_dtype), bias)

    def gated_matmul(self, x: Tensor) -> Tensor:
        return self._product(x, "silu_mul")

    def rows(self, token_ids: Tensor) -> Tensor:
        return embedding_triton.embedding(token_ids, self.matrix)

    def quantize_fp8(self) -> Fp8DeviceWeight:
        return Fp8DeviceWeight(*quantize(self.matrix))

    def _product(self, x: Tensor, epilogue: Epilogue, bias: Tensor | None = None) -> Tensor:
        shape = GemmShape(self.out_features, self.in_features, epilogue)
        config = FLOAT32 if x.dtype == torch.float32 else self.table.choose(shape, x.shape[0])
        return product(config, x, self.matrix, epilogue, bias)


def require_compiler(capability: tuple[int, int]) -> None:
    """Refuse a compute capability for which this Triton does not compile attention."""
    if capability[0] == 10 and TRITON_VERSION < (3, 8):
        raise UnsupportedError(
            "Triton before 3.8 compiles no attention for compute capability 10",
            "install torch 2.14 or later, which comes with a newer one",
        )


def _require_large_tiles(what: str) -> None:
    """Refuse a GPU whose programs have less shared memory than these take (capability 7.5)."""
    if shared_memory_of_device() < LARGE_TILES:
        raise UnsupportedError(
            f"{what} take more shared memory than programs have on this GPU", "use device 'cpu'"
        )


def device_table() -> GemmTable:
    """The kernels of the current GPU."""
    return GemmTable(hopper=is_hopper(torch.device("cuda")))


class TritonKernels:
    """``Kernels`` in Triton; contracts are those of the protocol.

    Args:
        table: the GEMM kernel of each shape; by default by the rules of this device.
    """

    name = "triton"

    rms_norm = staticmethod(norm.rms_norm)
    gated_rms_norm = staticmethod(norm.gated_rms_norm)
    gated_group_norm = staticmethod(norm.gated_group_norm)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    rounding_rms_norm = staticmethod(norm.rounding_rms_norm)
    sigmoid_mul = staticmethod(activation.sigmoid_mul)
    gelu_mul = staticmethod(activation.gelu_mul)
    clamped_swiglu = staticmethod(activation.clamped_swiglu)
    soft_cap = staticmethod(activation.soft_cap)
    silu_mul = staticmethod(activation.silu_mul)
    relu_squared = staticmethod(activation.relu_squared)
    partial_sum = staticmethod(partial_sum_op.partial_sum)
    moe_gate = staticmethod(moe_gate_triton.moe_gate)
    rope_and_cache = staticmethod(rope.rope_and_cache)
    latent_rope_and_cache = staticmethod(latent_rope.rope_and_cache)
    require_rule = staticmethod(recurrent.require_rule)
    begin_pass = staticmethod(recurrent.TritonPass.begin)
    apply_rules = staticmethod(logits_rules.apply_rules)
    truncate = staticmethod(truncation_op.truncate)
    token_keys = staticmethod(sampling.token_keys)
    sample = staticmethod(sampling.sample)

    def __init__(self, table: GemmTable | None = None) -> None:
        self.table = ProvenTable(table or device_table())
        # One matrix per shape that is still in use.
        self._matrices: WeakValueDictionary[tuple[int, ...], Tensor] = WeakValueDictionary()
        self._quantized = QuantizedCheck()
        # Made by the first pass, which no graph captures.
        self._arrived: Tensor | None = None

    def prove_quantized(
        self, row_counts: Iterable[int], dtype: torch.dtype, device: torch.device
    ) -> int:
        """See ``QuantizedCheck``; the number of forms. After ``prove``, which chooses kernels."""
        return self._quantized.prove(tuple(row_counts), dtype, device)

    def prove(self, row_counts: Iterable[int], dtype: torch.dtype) -> tuple[GemmReport, ...]:
        """Compare the chosen GEMMs of the packed weights with the canonical one on this chip.

        cuBLAS serves a row count only after it passes here.

        Args:
            row_counts: the row counts of captured steps.
            dtype: of activations, which 4-bit weights are expanded to before many rows.
        """
        return tuple(
            report
            for matrices, counts in self._products(tuple(row_counts), dtype)
            for report in self.table.prove(matrices, counts)
        )

    def run_candidates(self, row_counts: Iterable[int], dtype: torch.dtype) -> None:
        """Run each kernel that ``prove`` would compare once, so that it is compiled."""
        for matrices, counts in self._products(tuple(row_counts), dtype):
            self.table.run_candidates(matrices, counts)

    def _products(
        self, row_counts: tuple[int, ...], dtype: torch.dtype
    ) -> Iterator[tuple[Iterable[Tensor], tuple[int, ...]]]:
        """One matrix of each shape, and the row counts at which the table chooses for it."""
        yield self._matrices.values(), row_counts
        many = tuple(count for count in row_counts if count > FEW_ROWS)
        expanded = (
            panels.expanded(dtype)
            for panels in self._quantized.four_bit_matrices()
            if many and (panels.out_features, panels.in_features) not in self._matrices
        )
        yield expanded, many

    def require(self, shape: AttentionShape) -> None:
        if shape.head_dim > MAX_HEAD_DIM:
            raise UnsupportedError(
                f"head_dim {shape.head_dim} is above {MAX_HEAD_DIM}", "use device 'cpu'"
            )
        if shape.head_dim > NARROW_HEAD_DIM:
            _require_large_tiles(f"heads of {shape.head_dim}")

    def pack(self, weight: Tensor) -> DeviceWeight:
        matrix = weight.contiguous()
        self._matrices.setdefault(tuple(matrix.shape), matrix)
        return DeviceWeight(matrix, self.table)

    def take_rows(self, states: Tensor, rows: Tensor | None) -> Tensor:
        return states if rows is None else embedding_triton.embedding(rows, states)

    def embed_beside(
        self,
        token_ids: Tensor,
        embedding: UnquantizedWeight,
        embedding_norm: Norm,
        hidden: Tensor,
        hidden_norm: Norm,
    ) -> Tensor:
        if not isinstance(embedding, DeviceWeight):
            norms = embedding_norm, hidden, hidden_norm
            return embedding_reference.embed_beside(self, token_ids, embedding, *norms)
        matrix = embedding.matrix
        return embedding_triton.embed_beside(token_ids, matrix, embedding_norm, hidden, hidden_norm)

    def pack_fp8(self, matrix: Fp8Matrix, dtype: torch.dtype) -> Fp8DeviceWeight:
        _require_float8(matrix.values.device)
        parts = matrix.values, matrix.scale, matrix.rounding, matrix.blocks
        return self._quantized.watch(Fp8DeviceWeight(*parts))

    def pack_int4(self, matrix: Int4Matrix | IntegerMatrix, dtype: torch.dtype) -> Int4DeviceWeight:
        return self._quantized.watch(Int4DeviceWeight.of(matrix, self.table, dtype))

    pack_integers = pack_int4

    def require_integer_experts(self) -> None:
        raise UnsupportedError(
            "experts in the bits of a GGUF file have no products on a GPU, except in MXFP4",
            "use load_format 'gguf', which expands them, or device 'cpu'",
        )

    def whole_layers(self, parts: Sequence[LayerParts | None]) -> None:
        """None: captured graphs launch a step's kernels at once."""

    def stack(self, weights: Sequence[Weight]) -> StackedWeight:
        return StackedWeight(tuple(weights), self.silu_mul)

    def adapt(
        self, weight: Weight, sizes: Sequence[int], room: Room, rows: RowAdapters
    ) -> AdaptedWeight:
        updates = StackedUpdates.of(weight.in_features, sizes, room)
        return AdaptedWeight(weight, updates, rows, self.silu_mul)

    def pack_experts(
        self,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        form: ExpertForm | None = None,
    ) -> StackedExperts:
        return self._quantized.watch(StackedExperts(_stacked(gate_up), _stacked(down), form))

    def adapt_experts(
        self, experts: Experts, sizes: ExpertSizes, room: Room, rows: RowAdapters
    ) -> AdaptedStackedExperts:
        assert isinstance(experts, StackedExperts)
        return AdaptedStackedExperts.of(experts, sizes, room, rows)

    def attention(
        self,
        q: Tensor,
        shape: AttentionShape,
        rows: QueryRows,
        kv: LayerKV,
        sinks: Tensor | None = None,
    ) -> Tensor:
        stored = kv.keys.dtype
        if hopper.serves(shape, q.dtype, stored, kv.keys.shape[2], q.device):
            if self._arrived is None:
                self._arrived = hopper.counters(q.device)
            return hopper.attention(q, shape, rows, kv, self._arrived, sinks)
        return attention.attention(q, shape, rows, kv, sinks)

    def require_latent(self, shape: LatentShape) -> None:
        fits = shape.rank <= MAX_RANK and shape.rope_dim <= MAX_ROPE_DIM
        if not fits or shape.rank % 8 or shape.rope_dim % 8:
            raise UnsupportedError(
                f"latents of {shape.rank} + {shape.rope_dim} elements are not multiples of 8 up "
                f"to {MAX_RANK} + {MAX_ROPE_DIM}",
                "use device 'cpu'",
            )
        _require_large_tiles("latents")

    def pack_heads(self, weight: Tensor) -> DeviceHeadWeights:
        return DeviceHeadWeights(weight.contiguous())

    def latent_attention(
        self, q: Tensor, scale: float, rows: QueryRows, memory: LayerLatent
    ) -> Tensor:
        (block_size, width), stored = memory.vectors.shape[1:], memory.vectors.dtype
        if latent_hopper.serves(memory.rank, width, q.dtype, stored, block_size, q.device):
            return latent_hopper.attention(q, scale, rows, memory)
        return latent_attention.attention(q, scale, rows, memory)


def _device_weight(weight: Weight) -> DeviceWeight:
    if not isinstance(weight, DeviceWeight):
        raise UnsupportedError(
            f"a layer needs a plain matrix and got {type(weight).__name__}",
            "use a checkpoint that does not quantize it, or quantizes all experts alike",
        )
    return weight


def _stacked(weights: Sequence[Weight]) -> ExpertStack | Int4Panels:
    """Matrices of equal form in one tensor for each of their parts.

    Raises:
        UnsupportedError: their forms differ, or 4-bit ones are in act-order.
    """
    first = weights[0]
    if isinstance(first, Fp8DeviceWeight):
        same = [one for one in weights if isinstance(one, Fp8DeviceWeight) and _alike(one, first)]
        _require_alike(len(same), len(weights))
        bits = torch.stack([one.matrix.view(torch.uint8) for one in same])
        scales = torch.stack([one.scale for one in same])
        whole = all(one.blocks for one in same)
        return ExpertStack(bits.view(torch.float8_e4m3fn), scales, first.rounding, whole)
    if isinstance(first, Int4DeviceWeight):
        return _stacked_int4(
            [one for one in weights if isinstance(one, Int4DeviceWeight)], len(weights)
        )
    return ExpertStack(torch.stack([_device_weight(one).matrix for one in weights]))


def _stacked_int4(found: Sequence[Int4DeviceWeight], count: int) -> Int4Panels:
    if any(one.order is not None for one in found):
        raise UnsupportedError(
            "experts in act-order have no products on a GPU",
            "use device 'cpu', or a checkpoint without act-order",
        )
    alike = [one.panels for one in found if one.panels.is_like(found[0].panels)]
    _require_alike(len(alike), count)
    return Int4Panels.stacked(alike)


def _require_alike(num_alike: int, count: int) -> None:
    if num_alike < count:
        raise UnsupportedError(
            "the experts of a layer are quantized in different formats",
            "use a checkpoint that quantizes them alike",
        )


def _require_float8(device: torch.device) -> None:
    """Refuse a GPU without float8 conversions."""
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < (8, 9):
        raise UnsupportedError(
            f"float8 weights need a GPU of compute capability 8.9, this one has {found}",
            "use a checkpoint of unquantized weights, or of 4 bits",
        )


def _alike(one: Fp8DeviceWeight, other: Fp8DeviceWeight) -> bool:
    """Whether two weights have scales of one shape and round activations alike."""
    if one.scale.shape != other.scale.shape or one.rounding is None or other.rounding is None:
        return one.scale.shape == other.scale.shape and one.rounding is other.rounding
    fixed = [None if r.scale is None else float(r.scale) for r in (one.rounding, other.rounding)]
    return one.rounding.form == other.rounding.form and fixed[0] == fixed[1]
