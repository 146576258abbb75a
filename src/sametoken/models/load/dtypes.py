"""The dtype of a Hugging Face checkpoint: what its config names, or else what is stored."""

from __future__ import annotations

from reprlib import repr as short

import torch

from sametoken.errors import UnsupportedError
from sametoken.models.load.settings import QUANTIZATION_KEYS, Settings
from sametoken.models.load.sources import TensorSource

#: Keys of a config's dtype, the new one first.
DTYPE_KEYS = ("dtype", "torch_dtype")
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def names_dtype(given: Settings) -> bool:
    """Whether a config or its text config names a dtype."""
    text = given.get("text_config")
    parts = (given.values, text if isinstance(text, dict) else {})
    return any(part.get(key) is not None for part in parts for key in DTYPE_KEYS)


def config_dtype(settings: Settings) -> torch.dtype:
    """The dtype that a config names; without one fp32, or of what is quantized bf16.

    Raises:
        UnsupportedError: another one.
    """
    quantized = any(settings.get(key) for key in QUANTIZATION_KEYS)
    new, old = (settings.get(key) for key in DTYPE_KEYS)
    name = new or old or ("bfloat16" if quantized else "float32")
    if not isinstance(name, str) or name not in _DTYPES:
        raise UnsupportedError(
            f"{settings.location}: dtype {short(name)} is not supported",
            f"use one of {tuple(_DTYPES)}",
        )
    return _DTYPES[name]


def stored_dtype(source: TensorSource, embedding: str) -> str | None:
    """The name of the dtype of a checkpoint's embedding, which no format quantizes.

    None: there is no embedding, or it has another dtype. Its name ends in ``embedding``.
    """
    name = next((name for name in source.names() if name.endswith(embedding)), None)
    dtype = None if name is None else source.stored_dtype(name)
    return next((name for name, known in _DTYPES.items() if known == dtype), None)
