"""Memory of each rank's GPU into which the other ranks write.

A buffer has a block for each channel, rank and parity, and before them a flag for each channel and
rank. A channel is one program's: it writes its block into the buffers of the others, raises its
flags there, and waits for theirs. Flags count exchanges, and an exchange uses the blocks of its
count's parity: who raises flag n + 1 has read what came under flag n, so a block is free again two
exchanges later, and nobody waits for a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

#: Bytes of a block: 2,048 fp32, by 256 threads.
BLOCK_BYTES = 8192
#: Bytes from one flag to the next, each in a sector of its own.
FLAG_BYTES = 32
#: Programs at once: all of them must fit on a GPU, as they wait for each other's.
MOST_CHANNELS = 512


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """The buffers of all ranks, as this rank's device sees them.

    Attributes:
        rank: index of this rank.
        buffers: address of each rank's buffer, which is zero at first.
        counts: [channels] int32 on this device, zero at first: exchanges so far.
        stopped: [1] int32 that the device reads and the host writes: if not 0, nobody waits, and
            results are invalid.
    """

    rank: int
    buffers: tuple[int, ...]
    counts: Tensor
    stopped: Tensor

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.buffers)

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.counts)


def buffer_bytes(size: int, channels: int) -> int:
    """Bytes of a rank's buffer."""
    return channels * size * (FLAG_BYTES + 2 * BLOCK_BYTES)
