"""Weight updates: what is replaced, and where a trainer and its engines meet."""

from __future__ import annotations

from dataclasses import dataclass

#: The parts of an engine whose weights change.
MODEL, DRAFTER = "model", "drafter"
#: What tensors are sent by; with "ipc" they stay where they are, and are opened there.
GLOO, NCCL, IPC = "gloo", "nccl", "ipc"
#: Of the id that ranks of NCCL share.
NCCL_ID_BYTES = 128


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a group meets.

    Attributes:
        backend: "gloo", for tensors in host memory, or "nccl", for those of GPUs.
        address, port: of the trainer.
        rank: of this process; the trainer's is 0.
        world_size: the trainer and all engines.
        timeout_s: seconds that any rank waits for another.
        packed_bytes: tensors come joined, until they are more than these; 0: one by one.
        unique_id: of NCCL, if it is known: nobody meets at ``address``.
    """

    backend: str
    address: str
    port: int
    rank: int
    world_size: int
    timeout_s: float
    packed_bytes: int = 0
    unique_id: bytes | None = None

    @property
    def place(self) -> str:
        """In words."""
        return f"at {self.address}:{self.port}" if self.unique_id is None else "of this NCCL id"


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """Where another process of this machine finds a tensor: torch's own terms.

    Attributes:
        dtype: as in ``torch.bfloat16``, without "torch.".
        shape, strides, offset: of the tensor in its storage, in elements.
        memory: CUDA's handle of an allocation; of host memory its path.
        num_bytes, first_byte: of the storage, and where it begins in the allocation.
        counter, index: shared memory that counts who uses the storage, and where in it; of host
            memory b"".
        event: CUDA's handle of what must have happened before the values are there; may be b"".
        waits: whether to wait for the event.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    memory: bytes
    num_bytes: int
    first_byte: int
    counter: bytes
    index: int
    event: bytes
    waits: bool
