"""Triton kernels compiled side by side, before they run (docs/decisions/0041)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sametoken.io.cores import num_usable_cores
from sametoken.io.forks import call_in_forks

#: Forks that compile: threads would wait for Python's lock, which a compilation holds for a quarter
#: of its time.
MOST_FORKS = 16

#: Then forks are killed, and what they have not compiled is compiled here.
MOST_SECONDS = 300.0

#: One recording at a time: functions of Triton and torch are replaced meanwhile.
_LOCK = Lock()


@contextmanager
def compiled_ahead(device: torch.device | int = -1) -> Iterator[Recorded]:
    """Within, this thread's launches only record the kernels to compile; then all are compiled.

    At the end they are loaded too; one that failed raises when it is launched. Memory that is made
    within is zero, so that indices which a kernel would have written are valid for torch's
    operations, which do run; results mean nothing. Other threads launch as ever: another engine of
    the process may serve.

    Args:
        device: the GPU that kernels are loaded to; by default the first.
    """
    recorded = Recorded()
    with _LOCK, _EachOnce(recorded):
        try:
            with _no_launches(get_ident(), recorded), _zeroed_memory():
                yield recorded
        finally:
            recorded.run(device)


@contextmanager
def _no_launches(thread: int, recorded: Recorded) -> Iterator[None]:
    run = JITFunction.run

    def record(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        own = get_ident() == thread
        recorded.num_launches += own
        return run(self, *args, warmup=warmup or own, **options)

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


class Recorded(Executor):
    """Keeps compilations until ``run``.

    Attributes:
        num_launches: that were only recorded, so far.
    """

    def __init__(self) -> None:
        self.num_launches = 0
        self._compilations: list[tuple[Future, Callable[[], Any]]] = []

    def submit(self, compile_fn: Callable[[], Any]) -> Future:  # type: ignore[override]
        kernel: Future = Future()
        self._compilations.append((kernel, compile_fn))
        return kernel

    def run(self, device: torch.device | int) -> None:
        """Compile all in forks, which fill Triton's cache; then load all from there."""
        builds = [partial(_build, compile_fn) for _, compile_fn in self._compilations]
        forks = min(MOST_FORKS, num_usable_cores())
        try:
            call_in_forks(builds, most_forks=forks, most_seconds=MOST_SECONDS)
            with torch.cuda.device(device):
                for kernel, compile_fn in self._compilations:
                    _complete(kernel, compile_fn)
        finally:
            # After an interrupt nobody may wait for the others.
            for kernel, _ in self._compilations:
                if not kernel.done():
                    kernel.set_exception(CancelledError())


def _build(compile_fn: Callable[[], Any]) -> None:
    """Compile a kernel, and with gcc the function that launches it."""
    kernel = compile_fn()
    driver.active.launcher_cls(kernel.src, kernel.metadata)


def _complete(future: Future, compile_fn: Callable[[], Any]) -> None:
    """Load a kernel, as one that is compiled is found in the cache."""
    try:
        kernel = compile_fn()
        # Triton loads it once it is asked for the function that launches it.
        assert kernel.run
    except Exception as fault:
        future.set_exception(fault)
    else:
        future.set_result(kernel)


class _EachOnce(AsyncCompileMode):  # type: ignore[misc]
    """Compiles each kernel once, however often it is launched meanwhile."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__(recorded, ignore_errors=True)

    def submit(
        self, key: str, compile_fn: Callable, finalize_fn: Callable, *cleanup_fn: Callable
    ) -> Any:
        # Triton 3.9 has a function that forgets a kernel which did not compile.
        compiled = super().submit(key, compile_fn, finalize_fn, *cleanup_fn)
        # Launches find it from now on, those of other threads wait for it; at the end the kernel
        # takes its place.
        finalize_fn(compiled)
        return compiled
