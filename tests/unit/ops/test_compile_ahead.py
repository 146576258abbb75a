"""Kernels compiled ahead: launches are dropped by one thread, for a while, and never by another."""

from __future__ import annotations

import inspect
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from sametoken.ops import compile_ahead
from sametoken.ops.compile_ahead import compiled_ahead


class Kernel:
    """As Triton launches it."""

    def __init__(self):
        self.launches = []

    def run(self, *args):
        self.launches.append(args)


class Launches:
    """A Triton function: launches find, or compile, the kernel of a key."""

    def __init__(self, *, compiling=lambda: None):
        self.kernels, self.num_compiled, self.compiling = {}, 0, compiling

    def launch(self, key, source="source"):
        return JITFunction.run(self, key, source, warmup=False)

    def compile(self):
        self.compiling()
        self.num_compiled += 1
        return Kernel()


def forget(launches, key):
    """What Triton gives since 3.9, for a kernel that does not compile."""
    given = "cleanup_fn" in inspect.signature(_async_compile.AsyncCompileMode.submit).parameters
    return (lambda kernel: launches.kernels.pop(key, None),) if given else ()


@pytest.fixture(autouse=True)
def replaced_run(monkeypatch):
    """Does what Triton's launch does, without a GPU."""

    def run(launches, key, source, *, warmup):
        kernel = launches.kernels.get(key)
        if kernel is None:
            keep = partial(launches.kernels.__setitem__, key)
            mode = _async_compile.active_mode.get()
            functions = (launches.compile, keep, *forget(launches, key))
            kernel = mode.submit(source, *functions) if mode else launches.compile()
        if not warmup:
            kernel = kernel.result() if hasattr(kernel, "result") else kernel
            kernel.run("x")
        return kernel

    monkeypatch.setattr(JITFunction, "run", run)
    yield
    assert JITFunction.run is run


def test_launches_within_compile_once_and_run_nothing():
    launches = Launches()
    with compiled_ahead() as recorded:
        for _ in range(3):
            launches.launch("a")
            launches.launch("b", "another source")
    assert recorded.num_launches == 6
    assert launches.num_compiled == 2
    assert [kernel.launches for kernel in launches.kernels.values()] == [[], []]
    assert launches.launch("a").launches == [("x",)]


def test_a_launch_within_of_a_kernel_compiled_before_runs_nothing():
    """It would read what others have not written."""
    launches = Launches()
    with compiled_ahead():
        launches.launch("a")
    with compiled_ahead():
        launches.launch("a")
    assert launches.launch("a").launches == [("x",)]


def test_another_thread_waits_for_the_kernel_and_runs_it():
    """Another engine of the process serves meanwhile."""
    launches = Launches()
    with ThreadPoolExecutor(1) as other:
        with compiled_ahead() as recorded:
            launches.launch("a")
            ran = other.submit(launches.launch, "a")
        assert ran.result(30).launches == [("x",)]
    assert recorded.num_launches == 1


def test_nothing_compiles_before_all_is_recorded():
    launches = Launches()
    with compiled_ahead():
        for name in "abc":
            launches.launch(name, name)
        assert launches.num_compiled == 0
    assert launches.num_compiled == 3


def test_kernels_are_compiled_in_other_processes_first(tmp_path):
    """As Triton does: what is in the cache is not compiled again."""

    def fill_cache():
        cached = tmp_path / "kernel"
        if not cached.exists():
            cached.write_text(str(os.getpid()))

    launches = Launches(compiling=fill_cache)
    with compiled_ahead():
        launches.launch("a")
    assert int((tmp_path / "kernel").read_text()) != os.getpid()
    assert launches.num_compiled == 1


def test_an_error_within_leaves_nothing_behind():
    launches = Launches()

    def fail():
        with compiled_ahead():
            launches.launch("a")
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    assert launches.launch("a").launches == [("x",)]


def test_an_interrupted_compilation_leaves_nobody_waiting(monkeypatch):
    def interrupt(*given, **named):
        raise KeyboardInterrupt

    launches = Launches()

    def compile_some():
        with compiled_ahead():
            launches.launch("a")
            launches.launch("b", "another source")

    monkeypatch.setattr(compile_ahead, "call_in_forks", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_some()


def test_a_kernel_known_by_two_keys_runs_afterwards_by_both():
    launches = Launches()
    with compiled_ahead():
        launches.launch("a")
        launches.launch("b")
    assert launches.num_compiled == 1
    assert launches.launch("a") is launches.launch("b")
    assert len(launches.launch("a").launches) == 3


def test_a_kernel_that_does_not_compile_is_an_error_when_it_is_launched():
    def broken():
        raise ValueError("no such instruction")

    launches = Launches(compiling=broken)
    with compiled_ahead():
        launches.launch("a")
    with pytest.raises(ValueError, match="no such instruction"):
        launches.launch("a")
    with compiled_ahead():
        pass


@pytest.mark.parametrize("inference", [False, True])
def test_memory_made_within_holds_valid_indices(inference, poisoned_memory):
    like = torch.ones(8, dtype=torch.int64)

    def made():
        return [
            torch.empty(8, dtype=torch.int64),
            torch.empty_like(like),
            like.new_empty(8),
        ]

    with torch.inference_mode(inference), compiled_ahead():
        assert not any(one.any() for one in made())
    assert all(one.all() for one in made())
