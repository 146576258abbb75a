"""Lack of memory is one typed error, in whatever words it is said."""

from __future__ import annotations

import pytest
import torch

from sametoken.errors import ConfigError, WeightUpdateError
from sametoken.ops.out_of_memory import out_of_memory_as

TORCH = "CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 79 GiB"
DRIVER = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the manual."


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError(TORCH), "CUDA out of memory"),
        (torch.OutOfMemoryError(), "OutOfMemoryError"),
        (RuntimeError(DRIVER), "CUDA error: out of memory"),
        (MemoryError("no room for 5 GiB of a cache"), "no room for 5 GiB of a cache"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_all_words_for_lack_of_memory_are_one_error(error, words):
    with (
        pytest.raises(WeightUpdateError) as caught,
        out_of_memory_as(WeightUpdateError, "no room", "make room"),
    ):
        raise error
    assert (caught.value.cause, caught.value.remedy) == (f"no room ({words})", "make room")
    assert caught.value.__cause__ is error


def test_a_cpu_without_memory_is_recognised_by_what_torch_really_says():
    cause = r"no room \(DefaultCPUAllocator: can't allocate memory[^.]* 144115188075855872 bytes\)"
    with (
        pytest.raises(ConfigError, match=cause),
        out_of_memory_as(ConfigError, "no room", "make room"),
    ):
        torch.empty(2**57, dtype=torch.uint8)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("out of memory")])
def test_other_errors_stay_what_they_are(error):
    with (
        pytest.raises(type(error)) as caught,
        out_of_memory_as(ConfigError, "no room", "make room"),
    ):
        raise error
    assert caught.value is error
