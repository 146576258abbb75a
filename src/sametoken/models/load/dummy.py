"""Random weights of the shapes that a config asks for, made where they are used.

They need config.json alone, and serve to measure times: what such a model says means nothing.
It says one token over and over: the embedding outweighs all that layers add to it, and the
head holds the embedding's values, so a token is its own likeliest successor. Prompt lookup
then finds its drafts and has them accepted, which random text would never allow.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.models.load.weights import (
    Part,
    Share,
    WeightReader,
    rows_per_chunk,
)
from sametoken.ops.backend import Kernels

#: Of tokens' vectors, in the embedding and in the head, which share their values.
VOCABULARY_SCALE = 1.0
#: Of everything else: hundreds of layers of any known width add less than the embedding is.
SCALE = 1e-3
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


class DummySource:
    """Tensors that come to be when their shape is declared, as a ``TensorSource``.

    Values are a function of the tensor's name, its shape and the kind of device: about 1
    for the weights of norms, else about 0. Embedding and head count as one name.

    Args:
        location: the checkpoint, for messages.
        device: where tensors are made, chunk by chunk.
        optional: tensors that the checkpoint is to hold among those that it could do without.
    """

    def __init__(self, location: str, device: torch.device, optional: Collection[str] = ()) -> None:
        self.location = location
        self._device = device
        self._optional = optional
        self._shapes: dict[str, tuple[int, ...]] = {}

    def declare(self, name: str, shape: tuple[int, ...]) -> None:
        """Let the tensor exist from now on."""
        self._shapes[name] = shape

    def names(self) -> Collection[str]:
        """The optional tensors and those that are declared."""
        return {*self._optional, *self._shapes}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that was declared."""
        return self._shapes[name]

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Rows of the tensor in fp32, on the device they are meant for."""
        rows, *row_shape = self._shapes[name]
        centre = 1.0 if not row_shape and not name.endswith("bias") else 0.0
        in_vocabulary = name.endswith(_VOCABULARY)
        scale = VOCABULARY_SCALE if in_vocabulary else SCALE
        seed = _seed("vocabulary" if in_vocabulary else name)
        generator = torch.Generator(self._device).manual_seed(seed)
        step = rows_per_chunk(math.prod(row_shape))
        for first in range(0, rows, step):
            chunk = torch.empty(min(step, rows - first), *row_shape, device=self._device)
            yield chunk.normal_(centre, scale, generator=generator)


@dataclass(frozen=True, slots=True)
class DummyReader(WeightReader):
    """Declares every tensor that it is asked for, in the shape that is asked for."""

    source: DummySource

    def _require_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        self.source.declare(name, wanted)


@dataclass(frozen=True, slots=True)
class ShapeReader(DummyReader):
    """Tensors of the shapes that are asked for, on a device whose tensors have no memory."""

    def _fill(self, destination: Tensor, part: Part, share: Share) -> None:
        self._read.add(part.name)


def dummy_reader(
    directory: Path,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    optional: Collection[str] = (),
    parallel: TensorParallel = SINGLE_RANK,
) -> WeightReader:
    """A reader of random weights, or of shapes alone on the device "meta".

    ``optional`` is that of ``DummySource``. Every rank takes its share of the same weights.
    """
    source = DummySource(f"{directory} (dummy weights)", device, optional)
    reader = ShapeReader if device.type == "meta" else DummyReader
    return reader(source, kernels, dtype, device, parallel)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
