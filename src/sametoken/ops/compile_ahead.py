"""Triton kernels compiled side by side, before they run (docs/decisions/0041)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Lock, get_ident
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

#: Compiling holds Python's lock for a quarter of its time, so more threads would wait for it.
MOST_THREADS = 8

#: One recording at a time: functions of Triton and torch are replaced meanwhile.
_LOCK = Lock()


@contextmanager
def compiled_ahead(device: torch.device | int = -1) -> Iterator[None]:
    """Within, this thread's launches only record the kernels to compile; then all are compiled.

    At the end they are loaded too; one that failed raises when it is launched. Memory that is made
    within is zero, so that indices which a kernel would have written are valid for torch's
    operations, which do run; results mean nothing. Other threads launch as ever: another engine of
    the process may serve.

    Args:
        device: the GPU that kernels are loaded to; by default the first.
    """
    recorded = Event()
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    # A thread that compiles meanwhile would keep Python's lock from the one that records.
    pool = ThreadPoolExecutor(threads, initializer=recorded.wait)
    with _LOCK, pool, _SideBySide(pool, device):
        try:
            with _no_launches(get_ident()), _zeroed_memory():
                yield
        finally:
            recorded.set()


@contextmanager
def _no_launches(thread: int) -> Iterator[None]:
    run = JITFunction.run

    def record(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, warmup=warmup or get_ident() == thread, **options)

    with _replaced(JITFunction, "run", record):
        yield


@contextmanager
def _zeroed_memory() -> Iterator[None]:
    with (
        _replaced(torch, "empty", torch.zeros),
        _replaced(torch, "empty_like", torch.zeros_like),
        _replaced(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, function: Callable) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _SideBySide(AsyncCompileMode):  # type: ignore[misc]
    """Compiles each kernel once, however often it is launched meanwhile."""

    def __init__(self, pool: Executor, device: torch.device | int) -> None:
        super().__init__(pool, ignore_errors=True)
        self._device = device

    def submit(self, key: str, compile_fn: Callable, finalize_fn: Callable) -> Any:
        def compile_and_load() -> Any:
            kernel = compile_fn()
            with torch.cuda.device(self._device):
                # Asked for, Triton builds the function that launches it, and loads it.
                assert kernel.run
            return kernel

        compiled = super().submit(key, compile_and_load, finalize_fn)
        # Launches find it from now on, those of other threads wait for it; at the end the kernel
        # takes its place.
        finalize_fn(compiled)
        return compiled
