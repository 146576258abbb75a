"""Random weights in the shapes of a config, made on the device, for timing only.

They need only config.json. Such a model repeats one token: the embedding outweighs what the
layers add, and the head has the embedding's values, so each token is its own likeliest successor.
Prompt lookup then finds matches and has them accepted, unlike in random text.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.layers.share import Share
from sametoken.models.load.linear_format import UNQUANTIZED, Quantization
from sametoken.models.load.sources import FLOATING, rows_per_chunk
from sametoken.models.load.weights import Part, WeightReader
from sametoken.ops.backend import Kernels

#: Standard deviation in the embedding and the head, which share their values.
VOCABULARY_SCALE = 1.0
#: Elsewhere: hundreds of layers of any usual width add less than the embedding.
SCALE = 1e-3
#: Standard deviation of random numbers that become stored bits.
_SPREAD = {torch.float8_e4m3fn: 1, torch.int32: 2**28, torch.uint8: 2}
#: Their mean: as exponents, bytes give small weights.
_MEAN = {torch.uint8: 107}
_VOCABULARY = ("embed_tokens", "lm_head")


class DummySource:
    """A ``TensorSource`` of random tensors, which exist once their shape is declared.

    Values depend only on the tensor's name and shape and the device type, with mean 1 for norm
    weights, else 0. Embedding and head count as one name.

    Args:
        location: the checkpoint, for messages.
        device: where tensors are made, chunk by chunk.
        optional: optional tensors that exist.
    """

    def __init__(self, location: str, device: torch.device, optional: Collection[str] = ()) -> None:
        self.location = location
        self._device = device
        self._names = set(optional)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def declare(self, name: str, shape: tuple[int, ...]) -> None:
        """Make the tensor exist."""
        self._names.add(name)
        self._shapes[name] = shape

    def names(self) -> Collection[str]:
        """The optional and the declared tensors."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The declared shape."""
        return self._shapes[name]

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Rows of the tensor in fp32, on the target device."""
        rows, *row_shape = self._shapes[name]
        centre = 1.0 if not row_shape and not name.endswith("bias") else 0.0
        scale = _scale_of(name)
        key = "vocabulary" if scale == VOCABULARY_SCALE else name
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "little")
        generator = torch.Generator(self._device).manual_seed(seed)
        step = rows_per_chunk(math.prod(row_shape))
        for first in range(0, rows, step):
            shape = (min(step, rows - first), *row_shape)
            chunk = torch.empty(shape, dtype=torch.float32, device=self._device)
            yield chunk.normal_(centre, scale, generator=generator)

    def stored_dtype(self, name: str) -> torch.dtype:
        """fp32."""
        return torch.float32

    def stored_chunks(self, name: str) -> Iterator[Tensor]:
        """As ``chunks``."""
        return self.chunks(name)


@dataclass(frozen=True, slots=True)
class DummyReader(WeightReader):
    """Declares every requested tensor in the requested shape."""

    source: DummySource

    def require_head(self, module: str) -> None:
        """It exists once it is read."""

    def small(self, name: str, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
        """Scales that give weights of 8 and 4 bits the size of others."""
        scale = _scale_of(name)
        value = 1 / scale if name.endswith("_global_scale") else scale
        return torch.full(shapes[0], value, dtype=torch.float32)

    def _require_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        self.source.declare(name, wanted)

    def _chunks(self, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        if dtype not in FLOATING and dtype not in _SPREAD:
            raise UnsupportedError(
                f"{self.source.location}: the format of {name} has no dummy weights",
                "use another quantization",
            )
        spread, mean = _SPREAD.get(dtype, 1) / _scale_of(name), _MEAN.get(dtype, 0)
        for chunk in self.source.chunks(name):
            values = chunk.abs() if name.endswith("_scale") else chunk
            yield values if dtype in FLOATING else (values * spread + mean).to(dtype)


@dataclass(frozen=True, slots=True)
class ShapeReader(DummyReader):
    """Shapes only, on the "meta" device."""

    def _matrices(
        self, count: int, in_features: int, part: Part, transposed: bool
    ) -> Iterator[Tensor]:
        share = (self.share(part, (in_features,)),)
        return (self._empty(share, (in_features,)) for _ in range(count))

    def _fill(self, destination: Tensor, part: Part, share: Share) -> None:
        self._read.add(part.name)


def dummy_reader(
    directory: Path,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    optional: Collection[str] = (),
    parallel: TensorParallel = SINGLE_RANK,
    quantization: Quantization = UNQUANTIZED,
) -> WeightReader:
    """A reader of random weights, or of shapes only on the device "meta".

    ``optional`` is as in ``DummySource``. Every rank reads its share of the same weights. Linears
    that ``quantization`` covers have random bits.
    """
    source = DummySource(f"{directory} (dummy weights)", device, optional)
    reader = ShapeReader if device.type == "meta" else DummyReader
    return reader(source, kernels, dtype, device, parallel, quantization=quantization)


def _scale_of(name: str) -> float:
    """Standard deviation of a module's weights."""
    module = name.rpartition(".")[0]
    return VOCABULARY_SCALE if module.endswith(_VOCABULARY) else SCALE
