"""What Hopper kernels in Gluon share: layouts, boxes that TMA loads, names that Tritons changed."""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
from __future__ import annotations

from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Names that later Tritons changed: three in 3.9, one in 3.7.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
if not hasattr(gl.shared_memory_descriptor, "_reinterpret"):
    gl.shared_memory_descriptor._reinterpret = gl.shared_memory_descriptor.reinterpret


@gluon.constexpr_function
def _in_lines(bits, rank=2, line_bytes=128):
    """Lines of 128 or 64 bytes, swizzled, whose elements have this number of bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=line_bytes, element_bitwidth=bits, rank=rank)


@gluon.constexpr_function
def swizzled(dtype, rank=2, line_bytes=128):
    """The shared memory of a tile of this dtype, as TMA writes and wgmma reads it."""
    return _in_lines(dtype.primitive_bitwidth, rank, line_bytes)


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers in shared memory, each for COUNT arrivals."""
    memory = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for one in gl.static_range(NUMBER):
        mbarrier.init(memory.index(one), count=COUNT)
    return memory


@gluon.constexpr_function
def products(columns, depth=16):
    """Registers of a warp group's products [64, columns] (wgmma), of 32 bytes of depth."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth]
    )


#: Of the host, which describes memory at every launch.
_lines_of_memory = cache(_in_lines)


def boxes(memory: Tensor, height: int, line_bytes: int = 128) -> TensorDescriptor:
    """What one TMA load reads: ``height`` rows [..., columns] of a line; 0 beyond the last."""
    lines = memory.view(-1, memory.shape[-1])
    assert len(lines) < 2**31
    layout = _lines_of_memory(8 * memory.itemsize, 2, line_bytes)
    return TensorDescriptor.from_tensor(lines, [height, line_bytes // memory.itemsize], layout)


def boxes_of_halves(memory: Tensor) -> TensorDescriptor:
    """As ``boxes`` of 64 rows, in turns 8 of the first half of [2 N, columns] and 8 of the second.

    A box is [4, 2, 8, columns], and N a multiple of 8.
    """
    rows, columns = len(memory) // 2, memory.shape[1]
    assert len(memory) % 16 == 0
    turns = memory.view(2, rows // 8, 8, columns).transpose(0, 1)
    box = [4, 2, 8, 128 // memory.itemsize]
    return TensorDescriptor.from_tensor(turns, box, _lines_of_memory(8 * memory.itemsize, 4))
