"""The vendor's matrix products: by an algorithm that a table names, or one that it picks.

PyTorch has the library pick by row count, as if each product ran alone on a cool chip. In a
long run at the chip's power limit another algorithm may be faster, and cuBLASLt's C interface
lets one name it. It is asked for those alone that split no sum.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.kernels.gemm.tuning import CublasConfig

# Values of cublasLt.h, library_types.h and cublas_api.h.
_COMPUTE_FP32 = 68
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSED = 1
_DESCRIPTOR_TRANSPOSE_A = 3
_PREFERENCE_REDUCTIONS = 3
_PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)
_NO_REDUCTION = 0
_CONFIG_TILE, _CONFIG_CLUSTER = 1, 8

#: Bytes of which every operand's address is a multiple.
_ALIGNMENT = 16
_MOST_ALGORITHMS = 32


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes and types of ``x [rows, K] @ matrix [N, K].T``, and the device's index."""

    out_features: int
    in_features: int
    rows: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    device: int


def product(config: CublasConfig, x: Tensor, matrix: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``x @ matrix.T``: [T, K] and [N, K] to [T, N], rounded once, to x's dtype or to fp32.

    Args:
        config: names the algorithm. Where the library does not propose that one for these
            sizes, its favourite of those that split no sum serves; where ``config`` names
            none, or PyTorch has no cuBLASLt, whatever PyTorch has it pick.
        x: contiguous, bf16 or fp16.
        matrix: contiguous, of x's dtype.
        out_dtype: that of the result.
    """
    plan = None
    if config.tile is not None and (x.data_ptr() | matrix.data_ptr()) % _ALIGNMENT == 0:
        (rows, depth), features = x.shape, matrix.shape[0]
        problem = Problem(features, depth, rows, x.dtype, out_dtype, x.get_device())
        plans = _plans(problem)
        plan = plans.get(config) or next(iter(plans.values()), None)
    if plan is not None:
        return plan.run(x, matrix)
    if out_dtype != x.dtype:
        return torch.mm(x, matrix.t(), out_dtype=out_dtype)
    return torch.mm(x, matrix.t())


def algorithms(problem: Problem) -> tuple[CublasConfig, ...]:
    """The algorithms that the library proposes, its favourite first; none without cuBLASLt."""
    return tuple(_plans(problem))


@dataclass(frozen=True, slots=True)
class _Plan:
    """All that one call needs; kept as long as the process runs."""

    problem: Problem
    algorithm: _Algorithm
    handle: ctypes.c_void_p
    operation: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ...]
    one: ctypes.c_float = field(default_factory=lambda: ctypes.c_float(1.0))
    zero: ctypes.c_float = field(default_factory=lambda: ctypes.c_float(0.0))

    def run(self, x: Tensor, matrix: Tensor) -> Tensor:
        """The product, on the current stream."""
        out = x.new_empty(x.shape[0], matrix.shape[0], dtype=self.problem.out_dtype)
        weight, rows, result = self.layouts
        out_at = ctypes.c_void_p(out.data_ptr())
        # The library counts columns first: there, the result is [N, T] = matrix.T of [K, N]
        # times [K, T].
        _call(
            "cublasLtMatmul", self.handle, self.operation, ctypes.byref(self.one),
            ctypes.c_void_p(matrix.data_ptr()), weight, ctypes.c_void_p(x.data_ptr()), rows,
            ctypes.byref(self.zero), out_at, result, out_at, result,
            ctypes.byref(self.algorithm), None, ctypes.c_size_t(0),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )  # fmt: skip
        return out


@functools.cache
def _plans(problem: Problem) -> dict[CublasConfig, _Plan]:
    """A plan for each algorithm that is proposed, its favourite first."""
    if _library() is None:
        return {}
    handle, operation = _handle(problem.device), _operation()
    sizes, rows, depth = problem.out_features, problem.rows, problem.in_features
    layouts = (
        _layout(problem.dtype, depth, sizes),
        _layout(problem.dtype, depth, rows),
        _layout(problem.out_dtype, sizes, rows),
    )
    plans: dict[CublasConfig, _Plan] = {}
    for algorithm in _proposed(handle, operation, layouts):
        tile = _configured(algorithm, _CONFIG_TILE, ctypes.c_uint32())
        cluster = _configured(algorithm, _CONFIG_CLUSTER, ctypes.c_uint16())
        plan = _Plan(problem, algorithm, handle, operation, layouts)
        plans.setdefault(CublasConfig(tile, cluster), plan)
    return plans


def _proposed(
    handle: ctypes.c_void_p, operation: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...]
) -> list[_Algorithm]:
    """Algorithms that need no workspace and add each sum up in one place."""
    preference = _created("cublasLtMatmulPreferenceCreate")
    set_preference = "cublasLtMatmulPreferenceSetAttribute"
    _set(set_preference, preference, _PREFERENCE_REDUCTIONS, ctypes.c_uint32(_NO_REDUCTION))
    for attribute in _PREFERENCE_ALIGNMENTS:
        _set(set_preference, preference, attribute, ctypes.c_uint32(_ALIGNMENT))
    weight, rows, result = layouts
    proposals, count = (_Proposal * _MOST_ALGORITHMS)(), ctypes.c_int()
    _call(
        "cublasLtMatmulAlgoGetHeuristic", handle, operation, weight, rows, result, result,
        preference, ctypes.c_int(_MOST_ALGORITHMS), proposals, ctypes.byref(count),
    )  # fmt: skip
    _call("cublasLtMatmulPreferenceDestroy", preference)
    return [each.algorithm for each in proposals[: count.value] if each.status == 0]


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The cuBLASLt that PyTorch has loaded."""
    version = torch.version.cuda
    try:
        return ctypes.CDLL(f"libcublasLt.so.{version.split('.')[0]}") if version else None
    except OSError:
        return None


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    """The library's context on a device."""
    with torch.cuda.device(device):
        return _created("cublasLtCreate")


@functools.cache
def _operation() -> ctypes.c_void_p:
    """A product with sums in fp32, whose left operand lies transposed."""
    types = ctypes.c_int(_COMPUTE_FP32), ctypes.c_int(_TYPES[torch.float32])
    operation = _created("cublasLtMatmulDescCreate", *types)
    transposed = ctypes.c_int32(_TRANSPOSED)
    _set("cublasLtMatmulDescSetAttribute", operation, _DESCRIPTOR_TRANSPOSE_A, transposed)
    return operation


def _layout(dtype: torch.dtype, height: int, width: int) -> ctypes.c_void_p:
    """A matrix [height, width] whose columns are contiguous."""
    sizes = ctypes.c_uint64(height), ctypes.c_uint64(width), ctypes.c_int64(height)
    return _created("cublasLtMatrixLayoutCreate", ctypes.c_int(_TYPES[dtype]), *sizes)


def _configured(algorithm: _Algorithm, attribute: int, value: ctypes._SimpleCData[int]) -> int:
    """One of the numbers that make up an algorithm."""
    _call(
        "cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(algorithm), ctypes.c_int(attribute),
        ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)),
        ctypes.byref(ctypes.c_size_t()),
    )  # fmt: skip
    return value.value


def _set(
    function: str, owner: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData[int]
) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _call(function, owner, ctypes.c_int(attribute), ctypes.byref(value), size)


def _created(function: str, *arguments: object) -> ctypes.c_void_p:
    """What a function of the library makes behind its first argument."""
    made = ctypes.c_void_p()
    _call(function, ctypes.byref(made), *arguments)
    return made


def _call(function: str, *arguments: object) -> None:
    status = getattr(_library(), function)(*arguments)
    if status:
        raise InvariantError(f"{function} failed with status {status}")
