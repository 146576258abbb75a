"""Triton's kernels compiled ahead on a GPU; the rest in tests/unit/ops/test_compile_ahead.py."""

# mypy: disallow-untyped-decorators=false
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl

from sametoken.ops.compile_ahead import compiled_ahead
from sametoken.ops.triton_versions import FUSED


@triton.jit
def _add_kernel(x, NUMBER: tl.constexpr):
    tl.atomic_add(x, NUMBER)


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels compiled or found in the cache."""
    names = []
    listener = lambda *, src, **others: names.append(src.name)  # noqa: E731
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    return names


def test_launches_of_new_kernels_compile_them_once_and_do_not_run(compiled):
    x = torch.zeros(1, dtype=torch.int64, device="cuda")

    def launch(number):
        _add_kernel[(1,)](x, NUMBER=number, **FUSED)

    with ThreadPoolExecutor(1) as other:
        with compiled_ahead():
            for _ in range(3):
                launch(1)
                launch(10)
            of_another = other.submit(launch, 10)
        of_another.result()
    assert int(x) == 10
    assert len(compiled) == 2
    with compiled_ahead():
        launch(1)
    assert int(x) == 10
    launch(1)
    assert int(x) == 11
    assert len(compiled) == 2
