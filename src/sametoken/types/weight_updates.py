"""Weight updates: what is replaced, and where a trainer and its engines meet."""

from __future__ import annotations

from dataclasses import dataclass

#: The parts of an engine whose weights change.
MODEL, DRAFTER = "model", "drafter"
#: What tensors are sent by.
GLOO, NCCL = "gloo", "nccl"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a group meets.

    Attributes:
        backend: "gloo", for tensors in host memory, or "nccl", for those of GPUs.
        address, port: of the trainer.
        rank: of this process; the trainer's is 0.
        world_size: the trainer and all engines.
        timeout_s: seconds that any rank waits for another.
    """

    backend: str
    address: str
    port: int
    rank: int
    world_size: int
    timeout_s: float
