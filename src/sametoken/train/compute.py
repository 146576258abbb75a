"""Where a training runs, in which precision, and its random numbers."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sametoken.config import EngineConfig
from sametoken.engine.resolve import resolve_device
from sametoken.errors import ConfigError
from sametoken.ops.out_of_memory import out_of_memory_as
from sametoken.train.options import LoopOptions

# The share of a GPU's free memory, and the bytes of a CPU's, that data may take.
_GPU_SHARE, _CPU_BYTES = 0.65, 4 * 2**30


@dataclass(frozen=True, slots=True)
class Compute:
    """A device, and the dtype of matrix products; trained weights are fp32."""

    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which matrix products run in the dtype."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @property
    def data_bytes(self) -> int:
        """Memory that data may occupy during the whole training."""
        if self.device.type != "cuda":
            return _CPU_BYTES
        return int(torch.cuda.mem_get_info(self.device)[0] * _GPU_SHARE)


def enough_memory() -> AbstractContextManager[None]:
    """A context in which lack of memory for a training is a ``ConfigError``."""
    return out_of_memory_as(
        ConfigError,
        "the training does not fit the memory",
        "use a smaller model, less text, or a device with more free memory",
    )


def choose_compute(options: LoopOptions) -> Compute:
    """The device and dtype that the options mean: bf16 on a GPU, fp32 on a CPU by default.

    Raises:
        UnsupportedError: the options name a GPU and there is none.
    """
    device = resolve_device(EngineConfig(device=options.device))
    name = options.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    if device.type == "cuda" and name != "float32":
        # fp32 products beside the bf16 ones (recurrent states) may round to TF32.
        torch.set_float32_matmul_precision("high")
    return Compute(device, getattr(torch, name))


def generator_of(seed: int, part: str, index: int = 0) -> torch.Generator:
    """A generator on the host, which follows from a training's seed and a name alone.

    Args:
        seed: of the training.
        part: what it draws; two parts never draw the same numbers.
        index: of the step or epoch.
    """
    # A hash, because the generator reads only 32 bits of its seed.
    digest = hashlib.blake2b(f"{seed}/{part}/{index}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
