"""The bar of requests that ``use_tqdm`` shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def shown_progress(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of newly finished requests."""
    if not shown:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda count: progress.advance(task, count)
