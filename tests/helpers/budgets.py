"""What an attack may cost: seconds of an event loop, memory of a process."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import time
from collections.abc import AsyncIterator
from pathlib import Path

_BEAT_S = 0.005


class Heartbeat:
    """How long an event loop left a task of 5 ms waiting, at worst, and what the process worked."""

    longest_s = 0.0
    longest_cpu_s = 0.0


@contextlib.asynccontextmanager
async def heartbeat() -> AsyncIterator[Heartbeat]:
    """Measure the running event loop's longest gap within the block."""
    heart = Heartbeat()

    async def beat() -> None:
        while True:
            began, worked = time.monotonic(), time.process_time()
            try:
                await asyncio.sleep(_BEAT_S)
            finally:
                heart.longest_s = max(heart.longest_s, time.monotonic() - began - _BEAT_S)
                heart.longest_cpu_s = max(heart.longest_cpu_s, time.process_time() - worked)

    task = asyncio.create_task(beat())
    await asyncio.sleep(0)
    try:
        yield heart
    finally:
        # What blocked the loop to the end of the block counts too.
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def resident_bytes(pid: int | None = None) -> int:
    """Resident memory of a process, by default this one."""
    pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE
