"""Where training runs and in which precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sametoken.config import EngineConfig
from sametoken.engine.resolve import resolve_device
from sametoken.train.options import LoopOptions

# What may be taken of a GPU's free memory for data, and of a CPU's.
_GPU_SHARE, _CPU_BYTES = 0.65, 4 * 2**30


@dataclass(frozen=True, slots=True)
class Compute:
    """A device, and the dtype of matrix products; weights that are trained are fp32."""

    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which matrix products run in the dtype."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @property
    def data_bytes(self) -> int:
        """Memory that data may take for good."""
        if self.device.type != "cuda":
            return _CPU_BYTES
        return int(torch.cuda.mem_get_info(self.device)[0] * _GPU_SHARE)


def choose_compute(options: LoopOptions) -> Compute:
    """The device and dtype that the options mean: bf16 on a GPU, fp32 on a CPU by default.

    Raises:
        UnsupportedError: a GPU was asked for and there is none.
    """
    device = resolve_device(EngineConfig(device=options.device))
    name = options.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    if device.type == "cuda" and name != "float32":
        # What stays fp32 beside the matrices in ``name`` (recurrent states) may round as they do.
        torch.set_float32_matmul_precision("high")
    return Compute(device, getattr(torch, name))
