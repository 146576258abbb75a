"""Unquantized tensors for a model of quantized weights, rounded to its formats.

A trainer sends weights in floats. Those of projections, of an lm_head and of stacked experts that
the model runs in a format of ``rounding`` become, while they are read, the tensors that a
checkpoint in that format has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache, partial

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import HEAD
from sametoken.models.load.by_target import ByTarget, StackedExperts
from sametoken.models.load.fp8_linear import Fp8Linear
from sametoken.models.load.int4_linear import PACKED, Int4Linear
from sametoken.models.load.linear_format import LinearFormat, Quantization
from sametoken.models.load.nvfp4_linear import COMPRESSED, Nvfp4Linear
from sametoken.models.load.sources import FLOATING, TensorSource
from sametoken.models.quantize import module_of
from sametoken.models.rounding import MXFP4, NVFP4, Scheme, float8, int4

#: Modules whose tensors are in memory at once: as many as are read as one weight.
_FUSED = 4
#: What ends the names of stacks of experts.
_STACKS = (".experts.gate_up_proj", ".experts.down_proj")


def requantized(
    source: TensorSource, formats: Quantization, config: ModelConfig, kept: Collection[str]
) -> TensorSource:
    """The source, with those modules quantized that the formats want so and that are in floats.

    Modules in formats that need data, as GPTQ and static scales of activations, stay as they are.

    Args:
        source: of a whole checkpoint.
        formats: of the model's weights.
        config: the model's; weights are rounded to the dtype of its unquantized checkpoint first.
        kept: names of tensors that the model has in floats, whatever the formats name.
    """
    schemes = {}
    for name in set(source.names()).difference(kept):
        scheme = _scheme_of(name, formats, config)
        if scheme is not None and _fits(source, name, scheme):
            schemes[name] = scheme
    return _Requantized(source, schemes, config.dtype) if schemes else source


def left_in_floats(
    source: TensorSource, formats: Quantization, config: ModelConfig, kept: Collection[str]
) -> list[str]:
    """Names of weights in floats that the formats want quantized; arguments as ``requantized``."""
    names = sorted(set(source.names()).difference(kept))
    return [
        name
        for name in names
        if _format_of(name, formats, config) and source.stored_dtype(name) in FLOATING
    ]


def _scheme_of(name: str, formats: Quantization, config: ModelConfig) -> Scheme | None:
    """How a tensor of this name is rounded, if it is; None of others."""
    if isinstance(formats, StackedExperts):
        return MXFP4 if name.endswith(_STACKS) and formats.stack_named(name) else None
    return _scheme_of_linear(_format_of(name, formats, config))


def _format_of(name: str, formats: Quantization, config: ModelConfig) -> LinearFormat | None:
    """The format that a weight of this name is to have."""
    module = _head_of(name, config) or module_of(name)
    if module is None or not isinstance(formats, ByTarget):
        return None
    return formats.format_named(module)


def _head_of(name: str, config: ModelConfig) -> str | None:
    """The head that a tensor is the weight of, unless it is the embedding's."""
    is_own = name.rpartition("language_model.")[2] == HEAD and not config.tie_word_embeddings
    return _module(name) if is_own else None


def _scheme_of_linear(form: LinearFormat | None) -> Scheme | None:
    match form:
        case Fp8Linear(scales, "group_ue8m0", names):
            return float8(f"{scales}_ue8m0", names[0])
        case Fp8Linear(scales, activations, names) if activations != "tensor":
            return float8(scales, names[0])
        case Int4Linear(layout, size, True) if layout == PACKED and size > 0:
            return int4(size)
        case Nvfp4Linear(names) if names == COMPRESSED:
            return NVFP4
    return None


def _fits(source: TensorSource, name: str, scheme: Scheme) -> bool:
    """Whether it is in floats, of the right shape; what is not is refused by its reader."""
    shape = source.shape(name)
    floats = source.stored_dtype(name) in FLOATING
    right = floats and len(shape) == (3 if scheme is MXFP4 else 2)
    # Of a matrix and of gpt-oss's stacks, features are the second.
    return right and all(shape) and shape[1] % scheme.group == 0


def _module(name: str) -> str:
    """The module of a weight, or the name of a stack."""
    return name.removesuffix(".weight")


class _Requantized:
    """A ``TensorSource`` over another one, some of whose tensors have a scheme.

    Weights are rounded to ``dtype`` first.
    """

    def __init__(
        self, source: TensorSource, schemes: Mapping[str, Scheme], dtype: torch.dtype
    ) -> None:
        self.location, self._source = source.location, source
        self._made_of = {
            made: name for name, scheme in schemes.items() for made in scheme.names(_module(name))
        }
        self._names = (set(source.names()) - schemes.keys()) | self._made_of.keys()
        self._tensors = lru_cache(_FUSED)(partial(_quantized_of, source, schemes, dtype))

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
        given = self._made_of.get(name)
        return None if given is None else self._tensors(given)[name]


def _quantized_of(
    source: TensorSource, schemes: Mapping[str, Scheme], dtype: torch.dtype, name: str
) -> dict[str, Tensor]:
    weight = torch.cat([chunk.to(dtype) for chunk in source.chunks(name)])
    if not weight.isfinite().all():
        raise CheckpointError(
            f"tensor {name} of {source.location} holds NaN or infinite values in {dtype}",
            "send finite weights",
        )
    return schemes[name].tensors(_module(name), weight)
