"""Engines over a small random hybrid whose MTP module is its twin, and so is always right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from helpers.checkpoints import VOCAB, write_checkpoint
from helpers.families import VOCAB as LATENT_VOCAB
from helpers.harness import CPU, Shape, allocate, build, request, requests_of, run
from helpers.hybrids import twin_config, twin_tensors
from helpers.latents import write_twin
from helpers.spoilt import Spoilt, make_stream
from sametoken.drafters.context import Coupling
from sametoken.drafters.eagle import EagleDrafter
from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.heads.nextn import NextNCheckpoint
from sametoken.models.loader import load_model
from sametoken.ops.backend import Kernels
from sametoken.ops.reference import ReferenceKernels

# Token 0 begins every prompt; lengths are around the edges of chunks, which are of 8.
PROMPTS = (
    (0, 3, 1, 4),
    (0, 9, 2, 6, 5, 3, 5, 8),
    (0, 7, 7, 7, 7, 7, 7, 7, 7),
    (0, 2, 7, 1) * 5,
    (0, 11),
    tuple(range(15)),
)
MAX_TOKENS = 16


def twin_shape(k: int, steps_in_flight: int) -> Shape:
    return Shape(
        num_drafts=k,
        steps_in_flight=steps_in_flight,
        max_model_len=64,
        prefix_caching=False,
        cache_emitted=False,
    )


def write_qwen(directory: Path, seed: int) -> Path:
    config = twin_config()
    return write_checkpoint(directory, config, twin_tensors(config, seed))


class Twin:
    """A target and its module, loaded from one checkpoint; by default over the references.

    ``write`` writes the checkpoint into a directory, with a seed: of Qwen3.5, or another family's.
    """

    def __init__(
        self,
        directory,
        seed: int = 0,
        kernels: Kernels | None = None,
        *,
        quantized: bool = False,
        token_ids: list[int] | None = None,
        write: Callable = write_qwen,
    ) -> None:
        self.vocab = VOCAB
        write(directory, seed)
        kernels = kernels or ReferenceKernels()
        options = {"kernels": kernels, "dtype": torch.float32, "device": CPU, "max_positions": 96}
        self.target = load_model(directory, **options)
        mapped = None if token_ids is None else torch.tensor(token_ids)
        self.head = MTPCheckpoint(directory).load(
            self.target, **options, token_ids=mapped, quantize_fp8=quantized
        )

    def engine(self, k: int, *, steps_in_flight: int = 1, spoil: bool = False, device="late"):
        make: Callable = self._spoilt if spoil else self._drafter
        shape = twin_shape(k, steps_in_flight)
        return build(self.target, shape, make_drafter=make, stream=make_stream(device))

    def plain(self, items) -> dict[str, list[int]]:
        return run(build(self.target, twin_shape(1, 1)), items).tokens

    def _drafter(self, parts) -> EagleDrafter:
        shape = parts.shape
        kv = allocate(self.head.caches, shape, shape.num_drafts)
        coupling = Coupling(parts.kernels.sample, parts.table)
        return EagleDrafter(self.head, kv, shape.num_drafts, coupling)

    def _spoilt(self, parts) -> Spoilt:
        return Spoilt(self._drafter(parts), parts.shape.num_drafts, self.vocab)


class NextNTwin(Twin):
    """A target with latent attention and its NextN module; tokens 0 and 1 begin every prompt."""

    def __init__(self, directory) -> None:
        options = {"dtype": torch.float32, "device": CPU, "max_positions": 96}
        options |= {"kernels": ReferenceKernels()}
        self.target = load_model(write_twin(directory), **options)
        self.head = NextNCheckpoint(directory).load(self.target, **options)
        self.vocab = LATENT_VOCAB


def twin_requests(max_tokens: int = MAX_TOKENS):
    """Every other one is sampled."""
    return requests_of(PROMPTS, max_tokens, 0.0, 0.9)


def nextn_requests():
    """As ``twin_requests``, for a ``NextNTwin``."""
    items = twin_requests()
    return [
        request(
            item.request_id,
            (0, 1, *(2 + token for token in item.prompt_token_ids[1:])),
            MAX_TOKENS,
            temperature=item.params.temperature,
            seed=item.params.seed,
        )
        for item in items
    ]
