"""Unquantized tensors for a model of quantized weights, quantized as ``quantize`` would.

A trainer sends weights in floats. Those of projections, and of an lm_head, that the model runs in
one of the schemes of ``quantize_checkpoint`` become, while they are read, the tensors that a
quantized copy has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache, partial

import torch
from torch import Tensor

from sametoken.models.base import ModelConfig
from sametoken.models.decoder import HEAD
from sametoken.models.load.by_target import ByTarget
from sametoken.models.load.fp8_linear import Fp8Linear
from sametoken.models.load.int4_linear import PACKED, Int4Linear
from sametoken.models.load.linear_format import LinearFormat, Quantization
from sametoken.models.load.weights import FLOATING, TensorSource
from sametoken.models.quantize import module_of, quantized, stored_names

#: Modules whose tensors are in memory at once: as many as are read as one weight.
_FUSED = 4


def requantized(source: TensorSource, formats: Quantization, config: ModelConfig) -> TensorSource:
    """The source, with those modules quantized that the formats want so and that are in floats.

    Modules in other formats than ``quantize_checkpoint`` writes stay as they are.

    Args:
        source: of a whole checkpoint.
        formats: of the model's weights.
        config: the model's; weights are rounded to the dtype of its unquantized checkpoint first.
    """
    if not isinstance(formats, ByTarget):
        return source
    sizes = {}
    for name in source.names():
        module = _head_of(name, config) or module_of(name)
        if module is not None and _in_floats(source, name):
            written, size = _scheme(formats.format_named(module))
            if written and source.shape(name)[1] % (size or 1) == 0:
                sizes[module] = size
    return _Requantized(source, sizes, config.dtype) if sizes else source


def _head_of(name: str, config: ModelConfig) -> str | None:
    """The head that a tensor is the weight of, unless it is the embedding's."""
    is_own = name.rpartition("language_model.")[2] == HEAD and not config.tie_word_embeddings
    return name.removesuffix(".weight") if is_own else None


def _in_floats(source: TensorSource, name: str) -> bool:
    return source.stored_dtype(name) in FLOATING and len(source.shape(name)) == 2


def _scheme(form: LinearFormat | None) -> tuple[bool, int | None]:
    """Whether ``quantize_checkpoint`` writes the format, and the size of its groups, if any."""
    match form:
        case Fp8Linear("channel", "token", ("weight_scale",)):
            return True, None
        case Int4Linear(layout, size, True) if layout == PACKED and size > 0:
            return True, size
    return False, None


class _Requantized:
    """A ``TensorSource`` over another one.

    Args:
        source: the other one.
        sizes: by module to quantize, the size of groups; None: fp8-dynamic.
        dtype: to which weights are rounded first.
    """

    def __init__(
        self, source: TensorSource, sizes: Mapping[str, int | None], dtype: torch.dtype
    ) -> None:
        self.location, self._source = source.location, source
        self._modules = {
            name: module for module, size in sizes.items() for name in stored_names(module, size)
        }
        replaced = {f"{module}.weight" for module in sizes}
        self._names = (set(source.names()) - replaced) | self._modules.keys()
        self._tensors = lru_cache(_FUSED)(partial(_quantized_of, source, sizes, dtype))

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        made = self._made(name)
        return self._source.shape(name) if made is None else tuple(made.shape)

    def stored_dtype(self, name: str) -> torch.dtype:
        made = self._made(name)
        return self._source.stored_dtype(name) if made is None else made.dtype

    def chunks(self, name: str) -> Iterator[Tensor]:
        made = self._made(name)
        yield from self._source.chunks(name) if made is None else (made,)

    def stored_chunks(self, name: str) -> Iterator[Tensor]:
        made = self._made(name)
        yield from self._source.stored_chunks(name) if made is None else (made,)

    def _made(self, name: str) -> Tensor | None:
        """The tensor, if it is one of a quantized module."""
        module = self._modules.get(name)
        return None if module is None else self._tensors(module)[name]


def _quantized_of(
    source: TensorSource, sizes: Mapping[str, int | None], dtype: torch.dtype, module: str
) -> dict[str, Tensor]:
    weight = torch.cat([chunk.to(dtype) for chunk in source.chunks(f"{module}.weight")])
    return quantized(module, weight, sizes[module])
