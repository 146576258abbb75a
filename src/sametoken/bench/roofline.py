"""Roofline of a decode step: the bytes that it must read, and the memory bandwidth."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sametoken.bench.memory import SHAPES_ONLY, load_shapes
from sametoken.config import DUMMY, SpeculativeConfig
from sametoken.drafters.heads import fitting_head, read_token_map
from sametoken.engine.resolve import ResolvedConfig
from sametoken.errors import ConfigError
from sametoken.layers.feed_forward import SparseMoE
from sametoken.layers.squared_relu import SquaredReluMoE
from sametoken.models.base import ModelConfig
from sametoken.models.heads.eagle3 import Eagle3Head
from sametoken.models.heads.mtp_form import ModuleHead
from sametoken.models.heads.state_head import StateHead
from sametoken.models.loader import read_config
from sametoken.ops.dispatch import select_kernels
from sametoken.ops.model.recurrent.rule import STATE_STRIDE
from sametoken.ops.out_of_memory import out_of_memory_as
from sametoken.ops.reference import ReferenceKernels
from sametoken.types.speculative_methods import HEADS
from sametoken.types.units import in_units

# Many times the caches' size; at 5 TB/s long enough to make the kernel launch negligible.
CUDA_BYTES = 4 << 30
CPU_BYTES = 1 << 30
_PASSES = 5
_FEATURES = 512
# Any dtype: only the elements of meta tensors are counted.
_COUNTED = torch.float32


class _Counted(Protocol):
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Memory bandwidth in bytes per second, and the method that reached it."""

    bytes_per_second: float
    method: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a decode step must move; recurrent state is also written, the rest only read.

    Attributes:
        weights: matrices of the target.
        draft_weights: matrices of the drafter, summed over draft passes.
        kv_per_token: KV of one committed token; the drafter's counts once per pass.
        recurrent_per_request: recurrent state of one request, read once, and written or, on a GPU
            without drafts, written in one step of ``STATE_STRIDE``; each further draft pass reads
            the drafter's again.
    """

    weights: int
    draft_weights: int
    kv_per_token: int
    recurrent_per_request: int = 0

    def step_bytes(self, context: float, num_requests: float) -> float:
        """Compute the bytes of a step.

        Args:
            context: sum of the requests' committed tokens.
            num_requests: number of requests.
        """
        weights = self.weights + self.draft_weights
        return weights + self.kv_per_token * context + self.recurrent_per_request * num_requests


class DraftElements(NamedTuple):
    """Matrix elements of projections, which may be in fp8, and of experts."""

    projections: int
    experts: int


class DraftPass(NamedTuple):
    """Matrix elements that a drafter reads per row.

    Attributes:
        layers: read by every pass.
        head: read by a pass that proposes a token.
        fusion: projection of the target's hidden states; only the first pass reads it.
        experts: the part of an MoE block that one row reads, not included in ``layers``.
    """

    layers: int
    head: int
    fusion: int = 0
    experts: int = 0


def step_traffic(resolved: ResolvedConfig) -> Traffic:
    """Count the bytes that a decode step of this engine must move.

    Raises:
        CheckpointError: the drafter's config.json cannot be read.
    """
    model, config = resolved.model, resolved.config
    itemsize = resolved.dtype.itemsize
    # An embedding is gathered by row and read whole only if it is also the head. Under tensor
    # parallelism each rank stores its shard of the head separately.
    is_read = model.tie_word_embeddings and config.tensor_parallel_size == 1
    gathered = 0 if is_read else model.vocab_size * model.hidden_size
    memory, k = resolved.request_memory, config.num_speculative_tokens
    steps_per_write = STATE_STRIDE if resolved.device.type == "cuda" and not k else 1
    speculative = config.speculative_config
    return Traffic(
        weights=resolved.weights_bytes - gathered * itemsize,
        draft_weights=_draft_bytes(resolved, speculative) if speculative else 0,
        kv_per_token=memory.kv_per_token + k * memory.draft_kv_per_token,
        recurrent_per_request=memory.recurrent_state
        + memory.recurrent_state // steps_per_write
        + (k + 1) * memory.draft_recurrent,
    )


def _draft_bytes(resolved: ResolvedConfig, config: SpeculativeConfig) -> int:
    read = draft_elements(config, resolved.model, resolved.model_path)
    itemsize = resolved.dtype.itemsize
    return read.projections * (1 if config.quantization else itemsize) + read.experts * itemsize


def draft_elements(
    config: SpeculativeConfig, target: ModelConfig, target_path: Path
) -> DraftElements:
    """Count the matrix elements read to draft k tokens; arguments as ``draft_pass``."""
    k, one = config.num_speculative_tokens, draft_pass(config, target, target_path)
    return DraftElements(one.fusion + k * (one.layers + one.head), k * one.experts)


def draft_pass(config: SpeculativeConfig, target: ModelConfig, target_path: Path) -> DraftPass:
    """Count the matrix elements of one draft pass; none for prompt lookup.

    Args:
        config: the speculative config.
        target: the target's architecture.
        target_path: its checkpoint, which contains the MTP module if there is one.

    Raises:
        CheckpointError, UnsupportedError, DrafterMismatchError: as ``load_drafter``.
        ConfigError: the token map cannot be read.
    """
    if config.method == "draft_model":
        path = Path(config.model or "")
        model = load_shapes(read_config(path), path, _COUNTED)
        layers = model.weights_bytes // _COUNTED.itemsize - _elements(model.embedding)
        logits = _elements(model.head)
        return DraftPass(layers - (0 if model.head is model.embedding else logits), logits)
    if config.method not in HEADS:
        return DraftPass(0, 0)
    token_ids = None
    if config.token_map is not None:
        token_ids = read_token_map(Path(config.token_map), target.vocab_size).to(SHAPES_ONLY)
    head = fitting_head(config, target, target_path, DUMMY).load(
        load_shapes(target, target_path, _COUNTED),
        kernels=ReferenceKernels(),
        dtype=_COUNTED,
        device=SHAPES_ONLY,
        max_positions=1,
        token_ids=token_ids,
    )
    fusion = _elements(head.fc) if isinstance(head, Eagle3Head) and head.fc is not None else 0
    experts = unread = 0
    mixture = head.module.layer.mlp if isinstance(head, ModuleHead) else None
    if isinstance(mixture, SparseMoE | SquaredReluMoE):
        routed = mixture.routed if isinstance(mixture, SparseMoE) else mixture
        experts, num_experts = _elements(mixture), routed.router.weight.out_features
        unread = _elements(routed.experts) * (num_experts - routed.routing.top_k) // num_experts
    if isinstance(head, StateHead):
        # Each draft reads its own.
        layers = sum(_elements(one) for several in head.linears for one in several)
        layers //= len(head.linears)
    else:
        layers = _elements(head) - fusion - experts
    return DraftPass(layers, _elements(head.lm_head), fusion, experts - unread)


def _elements(counted: _Counted) -> int:
    return counted.nbytes // _COUNTED.itemsize


def read_bandwidth(device: torch.device, num_bytes: int | None = None) -> Bandwidth:
    """Measure memory bandwidth: the best pass of the fastest of several sequential reads.

    Args:
        device: the device.
        num_bytes: bytes to read; default ``CUDA_BYTES`` or ``CPU_BYTES``.

    Raises:
        ConfigError: the device has no room for them.
    """
    on_cpu = device.type == "cpu"
    num_bytes = num_bytes or (CPU_BYTES if on_cpu else CUDA_BYTES)
    with out_of_memory_as(
        ConfigError,
        f"{device} has no {in_units(num_bytes)} free to measure its bandwidth",
        "end what else uses its memory, or use a device with more",
    ):
        best = _scan_seconds(device, num_bytes)
        if on_cpu:
            best |= {"matrix product, 1 row": _product_seconds(device, num_bytes)}
    if not on_cpu:
        # Return the memory, so that the engine can use all of it.
        torch.cuda.empty_cache()
    method = min(best, key=lambda name: best[name])
    return Bandwidth(num_bytes / best[method], method)


def _scan_seconds(device: torch.device, num_bytes: int) -> dict[str, float]:
    seconds = _seconds_on_cpu if device.type == "cpu" else _seconds_on_cuda
    floats = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    integers, halves = floats.view(torch.int32), floats.view(2, -1)
    methods: dict[str, Callable[[], Tensor]] = {
        "torch.sum": floats.sum,
        "torch.sum of int32": lambda: integers.sum(dtype=torch.int32),
        "torch.amax": lambda: halves.amax(1),
    }
    return {name: min(seconds(read) for _ in range(_PASSES)) for name, read in methods.items()}


def _product_seconds(device: torch.device, num_bytes: int) -> float:
    """Time a matrix product with one row, as a decode step reads weights."""
    kernels = select_kernels(device)
    shape = (num_bytes // (2 * _FEATURES), _FEATURES)
    weight = kernels.pack(torch.ones(shape, dtype=torch.bfloat16, device=device))
    x = torch.ones(1, _FEATURES, dtype=torch.bfloat16, device=device)
    return min(_seconds_on_cpu(lambda: weight.matmul(x)) for _ in range(_PASSES))


def _seconds_on_cpu(read: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    read()
    return time.perf_counter() - start


def _seconds_on_cuda(read: Callable[[], Tensor]) -> float:
    event = functools.partial(torch.cuda.Event, enable_timing=True)
    start, end = event(), event()
    start.record()
    read()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
