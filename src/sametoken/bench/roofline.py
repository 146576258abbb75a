"""The least time a decode step can take: the bytes it must read over the memory's speed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.config import SpeculativeConfig
from sametoken.drafters.token_map import read_token_map
from sametoken.engine.resolve import ResolvedConfig
from sametoken.kernels.select import select_kernels
from sametoken.models.base import ModelConfig
from sametoken.models.eagle1_checkpoint import Eagle1Checkpoint
from sametoken.models.eagle3_checkpoint import Eagle3Checkpoint
from sametoken.models.loader import read_config
from sametoken.models.settings import Settings

# Many times what caches hold, and at 5 TB/s long enough that starting a kernel costs nothing.
CUDA_BYTES = 4 << 30
CPU_BYTES = 1 << 30
_PASSES = 12
_FEATURES = 512


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """How fast memory is read: bytes per second, and by what."""

    bytes_per_second: float
    method: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a decode step must move: recurrent state is written too, all else is read.

    Attributes:
        weights: matrices of the target, once.
        draft_weights: matrices of the drafter, once per draft pass, all passes together.
        kv_per_token: KV of one committed token, the drafter's once per pass.
        recurrent_per_request: recurrent state of one request, read and written once; a
            drafter's is read once more by each further pass.
    """

    weights: int
    draft_weights: int
    kv_per_token: int
    recurrent_per_request: int = 0

    def step_bytes(self, context: float, num_requests: float) -> float:
        """Bytes of a step.

        Args:
            context: committed tokens of the step's requests together.
            num_requests: how many they are.
        """
        weights = self.weights + self.draft_weights
        return weights + self.kv_per_token * context + self.recurrent_per_request * num_requests


class DraftElements(NamedTuple):
    """Elements of matrices: of projections, which may be in fp8, and of experts."""

    projections: int
    experts: int


class DraftPass(NamedTuple):
    """Elements of the matrices that a drafter multiplies one row by.

    Attributes:
        layers: of every pass.
        head: of a pass that proposes a token.
        fusion: of a row that comes with the target's states, which the first pass alone reads.
        experts: beside ``layers``, what one row reads of a mixture.
    """

    layers: int
    head: int
    fusion: int = 0
    experts: int = 0


class TargetPass(NamedTuple):
    """Elements of the matrices that a dense target multiplies one row by.

    Attributes:
        layers: of every row.
        head: of a row that has logits.
        attention: of scores and of values beside them, for each position that a row sees.
    """

    layers: int
    head: int
    attention: int


def target_pass(resolved: ResolvedConfig) -> TargetPass:
    """What this engine's target multiplies; of a mixture of experts it counts all of them."""
    model, itemsize = resolved.model, resolved.dtype.itemsize
    head = _head(model, model.vocab_size)
    kv_elements = resolved.request_memory.kv_per_token // itemsize
    return TargetPass(
        layers=step_traffic(resolved).weights // itemsize - head,
        head=head,
        # Keys and values of a position, each for so many query heads.
        attention=kv_elements * model.num_heads // model.num_kv_heads,
    )


def step_traffic(resolved: ResolvedConfig) -> Traffic:
    """What a decode step of this engine must read.

    Raises:
        CheckpointError: the drafter's config.json cannot be read.
    """
    model, config = resolved.model, resolved.config
    itemsize = resolved.dtype.itemsize
    # Rows of an embedding are looked up; the matrix is read only where it is the head too, and
    # of several ranks each has its part of the head beside the embedding.
    is_read = model.tie_word_embeddings and config.tensor_parallel_size == 1
    looked_up = 0 if is_read else model.vocab_size * model.hidden_size
    memory, k = resolved.request_memory, config.num_drafts
    speculative = config.speculative_config
    return Traffic(
        weights=resolved.weights_bytes - looked_up * itemsize,
        draft_weights=_draft_bytes(speculative, model, itemsize) if speculative else 0,
        kv_per_token=memory.kv_per_token + k * memory.draft_kv_per_token,
        recurrent_per_request=2 * memory.recurrent_state + (k + 1) * memory.draft_recurrent,
    )


def _draft_bytes(config: SpeculativeConfig, target: ModelConfig, itemsize: int) -> int:
    read = draft_elements(config, target)
    return read.projections * (1 if config.quantization else itemsize) + read.experts * itemsize


def draft_elements(config: SpeculativeConfig, target: ModelConfig) -> DraftElements:
    """Elements of all matrices that drafting k tokens reads; arguments as ``draft_pass``."""
    k, one = config.num_speculative_tokens, draft_pass(config, target)
    return DraftElements(one.fusion + k * (one.layers + one.head), k * one.experts)


def draft_pass(config: SpeculativeConfig, target: ModelConfig) -> DraftPass:
    """Elements of the matrices of one draft pass; none for prompt lookup.

    Args:
        config: how drafts are made.
        target: the target's architecture, which a multi-token-prediction module shares.

    Raises:
        CheckpointError: the drafter's config.json cannot be read.
        ConfigError: nor its token map.
    """
    path = Path(config.model or "")
    if config.method == "draft_model":
        model = read_config(path)
        layers = _layers(model, model.hidden_size)
        return DraftPass(layers, _head(model, model.vocab_size))
    if config.method == "eagle":
        model = Eagle1Checkpoint(path).config.layer
        layers = 2 * model.hidden_size**2 + _layers(model, model.hidden_size)
        return DraftPass(layers, _head(model, _proposed(config, model.vocab_size)))
    if config.method == "eagle3":
        head = Eagle3Checkpoint(path).config
        return DraftPass(
            _layers(head.layer, 2 * head.layer.hidden_size),
            _head(head.layer, _proposed(config, head.draft_vocab_size)),
            fusion=head.num_aux * head.target_hidden_size * head.layer.hidden_size,
        )
    if config.method == "mtp":
        layer = _gated_layer(target)
        return DraftPass(
            2 * target.hidden_size**2 + layer.projections,
            _head(target, _proposed(config, target.vocab_size)),
            experts=layer.experts,
        )
    return DraftPass(0, 0)


def _layers(model: ModelConfig, attention_width: int) -> int:
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = attention_width * (q_size + 2 * kv_size) + q_size * model.hidden_size
    return model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)


def _gated_layer(model: ModelConfig) -> DraftElements:
    """One layer of gated attention; of a mixture of experts, what one row reads."""
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.hidden_size * (3 * q_size + 2 * kv_size)
    settings = Settings(model.extra, model.architecture)
    if not settings.get("num_experts"):
        return DraftElements(attention + 3 * model.hidden_size * model.intermediate_size, 0)
    routed = settings.integer("num_experts_per_tok") * settings.integer("moe_intermediate_size")
    width = 3 * (routed + settings.integer("shared_expert_intermediate_size"))
    gates = settings.integer("num_experts") + 1
    return DraftElements(attention, model.hidden_size * (width + gates))


def _proposed(config: SpeculativeConfig, vocab_size: int) -> int:
    """How many tokens a draft head over so many may propose."""
    if config.token_map is None:
        return vocab_size
    return read_token_map(Path(config.token_map), vocab_size).shape[0]


def _head(model: ModelConfig, vocab_size: int) -> int:
    return vocab_size * model.hidden_size


def read_bandwidth(device: torch.device, num_bytes: int | None = None) -> Bandwidth:
    """The fastest of several ways to read memory from end to end, the best of its passes.

    Args:
        device: whose memory.
        num_bytes: how much; default ``CUDA_BYTES`` or ``CPU_BYTES``.
    """
    on_cpu = device.type == "cpu"
    num_bytes = num_bytes or (CPU_BYTES if on_cpu else CUDA_BYTES)
    best = _scan_seconds(device, num_bytes)
    if on_cpu:
        best |= {"matrix product, 1 row": _product_seconds(device, num_bytes)}
    else:
        # The engine is to find all memory free.
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
    """A decode step's own way to read weights."""
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
