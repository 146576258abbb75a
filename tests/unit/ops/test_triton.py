"""What the Triton backend refuses before it compiles anything."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest

from sametoken.errors import UnsupportedError
from sametoken.ops import triton
from sametoken.ops.backend import AttentionShape
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.model.latent_attention.shape import LatentShape
from sametoken.ops.triton import TritonKernels


@pytest.mark.parametrize(
    ("capability", "version", "refused"),
    [
        ((10, 0), (3, 7), True),
        ((10, 3), (3, 8), False),
        ((9, 0), (3, 6), False),
        ((12, 0), (3, 6), False),
    ],
)
def test_a_compiler_that_does_not_know_the_gpu_is_refused(
    capability, version, refused, monkeypatch
):
    monkeypatch.setattr(triton, "TRITON_VERSION", version)
    if not refused:
        triton.require_compiler(capability)
        return
    with pytest.raises(UnsupportedError, match="Install torch"):
        triton.require_compiler(capability)


@pytest.mark.parametrize("kib", [64, 99])
def test_tiles_that_a_gpu_has_no_memory_for_are_refused(kib, monkeypatch):
    """An RTX 2080 or T4 has 64 KiB for a program."""
    monkeypatch.setattr(triton, "shared_memory_of_device", lambda: kib << 10)
    kernels = TritonKernels(GemmTable())
    kernels.require(AttentionShape(8, 1, 256))
    large = (
        partial(kernels.require, AttentionShape(8, 1, 512)),
        partial(kernels.require_latent, LatentShape(16, 512, 64, 1.0)),
    )
    for require in large:
        with nullcontext() if kib == 99 else pytest.raises(UnsupportedError, match="than programs"):
            require()
