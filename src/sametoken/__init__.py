"""Speculative decoding that never changes a token.

Public names are imported lazily, so that importing the package does not import torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sametoken.io.cores import SPIN_COUNT

if TYPE_CHECKING:
    from sametoken.llm import LLM
    from sametoken.serving.async_llm import AsyncLLM
    from sametoken.types.lora_modules import LoRARequest
    from sametoken.types.outputs import CompletionOutput, RequestOutput
    from sametoken.types.sampling_params import SamplingParams
    from sametoken.types.structured_outputs import StructuredOutputs

if os.name != "posix":
    raise ImportError("sametoken does not run on Windows itself: use it in WSL")

# Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "sametoken.llm",
    "AsyncLLM": "sametoken.serving.async_llm",
    "CompletionOutput": "sametoken.types.outputs",
    "LoRARequest": "sametoken.types.lora_modules",
    "RequestOutput": "sametoken.types.outputs",
    "SamplingParams": "sametoken.types.sampling_params",
    "StructuredOutputs": "sametoken.types.structured_outputs",
}


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOMES))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sametoken' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
