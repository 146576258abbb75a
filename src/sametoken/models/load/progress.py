"""A bar of the weights that are read, on stderr where it is a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sametoken.io.terminal import stderr_is_terminal
from sametoken.models.load.sources import TensorSource


class _Watched:
    """A source that counts the elements of its chunks."""

    def __init__(self, source: TensorSource, advance: Callable[[int], None]) -> None:
        self.location = source.location
        self._source = source
        self._advance = advance

    def names(self) -> Collection[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def chunks(self, name: str) -> Iterator[Tensor]:
        for chunk in self._source.chunks(name):
            yield chunk
            self._advance(chunk.numel())

    def stored_dtype(self, name: str) -> torch.dtype:
        return self._source.stored_dtype(name)

    def stored_chunks(self, name: str) -> Iterator[Tensor]:
        for chunk in self._source.stored_chunks(name):
            yield chunk
            self._advance(chunk.numel())


@contextmanager
def shown_while_read(
    source: TensorSource, dtype: torch.dtype, *, leads: bool
) -> Iterator[TensorSource]:
    """Yield the source; a bar shows the bytes of its tensors in ``dtype`` that were read.

    Rank 0, which ``leads``, is the only one that shows a bar.
    """
    if not (leads and stderr_is_terminal()):
        yield source
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    total = sum(math.prod(source.shape(name)) for name in source.names()) * dtype.itemsize
    columns = (
        TextColumn("loading"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=total)
        yield _Watched(source, lambda count: progress.advance(task, count * dtype.itemsize))
