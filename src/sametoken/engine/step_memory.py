"""Memory that a step needs while it runs, estimated from the model's sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil

import torch

from sametoken.config import EngineConfig
from sametoken.errors import ConfigError
from sametoken.layers.slices import SLICE_ROWS
from sametoken.models.base import ModelConfig
from sametoken.models.in_place import children_of
from sametoken.ops.backend import AttentionShape
from sametoken.ops.cache_types import LatentKV, LayerCache, Recurrent, Stateless
from sametoken.ops.dispatch import attention_scratch
from sametoken.ops.launch_sizes import ROW_MULTIPLE, cdiv
from sametoken.ops.model.attention.scratch import Launches, Runs
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.latent_attention.shape import ExpandedShape, LatentShape
from sametoken.ops.model.low_rank import AdaptedWeight
from sametoken.ops.model.low_rank_experts import AdaptedExperts
from sametoken.ops.model.mamba2.rule import Mamba2
from sametoken.ops.model.moe import SeparateExperts
from sametoken.ops.model.recurrent.rule import FAST_ROWS, RecurrentRule
from sametoken.ops.weight import ExpandedWeight, PackedMatrix
from sametoken.scheduler.plan_draft import max_sampled_rows

_FP32 = 4
#: Ids, positions, slots, addresses and flags of a row.
_ROW_BYTES = 128
#: Tensors [T, hidden] that live at once: the residual, a layer's input and its output, a copy.
_HIDDEN = 4
#: Tensors of all layers' own embeddings that live at once: of the token, projected, their sum.
_LAYER_INPUTS = 3
#: Logits and what sampling keeps beside them.
_LOGITS = 2
#: An expert that is returned: its id in the buffer of passes, and two bytes on the way to the host.
_RETURNED_EXPERT_BYTES = 8 + 2
#: Elements of prepared rows that kernels of recurrent layers find by numbers of 32 bits.
_ADDRESSED = 2**31

#: What says the sizes of a layer's token mixer.
Mixer = AttentionShape | LatentShape | ExpandedShape | GatedDelta | Mamba2


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of a step by what they grow with.

    Attributes:
        per_row: of every row.
        per_sliced_row: of the rows of one slice (``layers.slices``).
        per_sampled_row: of every row with logits.
        max_num_seqs, max_window: requests and the rows of a window, which bound the sampled rows.
        expanded: of 4-bit matrices while they are multiplied, on a GPU.
        mixing: of a layer's token mixer whatever the rows, on a GPU: small steps have it too. MLPs
            and logits run after it.
    """

    per_row: int
    per_sliced_row: int
    per_sampled_row: int
    max_num_seqs: int
    max_window: int
    expanded: int = 0
    mixing: int = 0

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        caches: tuple[LayerCache, ...],
        dtype: torch.dtype,
        num_aux_layers: int,
        num_expanded: int = 0,
        mixing: int = 0,
        adapted: int = 0,
    ) -> StepMemory:
        """The sizes of an engine's steps.

        Args:
            config: the user's options, sizes resolved.
            model: the target's architecture.
            caches: the caches of its layers, on this rank.
            dtype: of the activations.
            num_aux_layers: layers whose inputs a drafter reads.
            num_expanded: as ``most_expanded`` counts them.
            mixing: as ``most_mixing`` counts it.
            adapted: as ``most_adapted`` counts it.
        """
        width, size = dtype.itemsize, config.tensor_parallel_size
        hidden = (_HIDDEN + num_aux_layers) * model.hidden_size * width
        own = model.extra.get("hidden_size_per_layer_input")
        if isinstance(own, int):
            hidden += _LAYER_INPUTS * model.num_layers * own * width
        mixer = max((_mixer_bytes(cache, model, width, size) for cache in caches), default=0)
        chosen = experts_per_row(model)
        returned = chosen * model.num_layers if config.enable_return_routed_experts else 0
        features = (3 * model.intermediate_size + model.hidden_size) * (chosen or 1)
        return cls(
            per_row=_ROW_BYTES + hidden + mixer + adapted + returned * _RETURNED_EXPERT_BYTES,
            per_sliced_row=ceil(features / size) * width,
            per_sampled_row=_LOGITS * model.vocab_size * _FP32,
            max_num_seqs=config.max_num_seqs,
            max_window=config.num_speculative_tokens + 1,
            # Captured graphs have memory of their own.
            expanded=(1 if config.enforce_eager else 2) * num_expanded * width,
            mixing=mixing,
        )

    def bytes_of(self, num_rows: int) -> int:
        """Bytes of the largest step of ``num_rows`` rows."""
        sliced = min(num_rows, SLICE_ROWS) * self.per_sliced_row
        sampled = min(
            max_sampled_rows(num_rows, self.max_num_seqs), self.max_num_seqs * self.max_window
        )
        after = sliced + sampled * self.per_sampled_row
        return num_rows * self.per_row + max(self.mixing, after) + self.expanded

    def rows_within(self, num_bytes: int) -> int:
        """The most rows, a power of two, whose step fits in ``num_bytes``; 0 if none does."""
        rows = 0
        while self.bytes_of(2 * rows or 1) <= num_bytes and rows < 2**20:
            rows = 2 * rows or 1
        return rows


def most_expanded(node: object) -> int:
    """Elements of the largest matrix that products of many rows expand on a GPU, one at a time.

    Args:
        node: models and heads, nested in any way.
    """
    if isinstance(node, ExpandedWeight):
        return node.num_expanded
    if isinstance(node, SeparateExperts):
        # A GPU stacks experts, and makes their elements in registers.
        return 0
    # Rows of an embedding are looked up.
    parts = (child for name, child in children_of(node) if name != "embedding")
    return max(map(most_expanded, parts), default=0)


def experts_per_row(model: ModelConfig) -> int:
    """The experts that a row chooses; 0: there are none."""
    experts = model.extra.get("num_experts_per_tok")
    return experts if isinstance(experts, int) else 0


def most_adapted(node: object, chosen: int) -> int:
    """The most bytes of a row that adapters need beside a product on a GPU.

    Args:
        node: models, nested in any way.
        chosen: as ``experts_per_row`` counts them.
    """
    own = node.update.row_bytes if isinstance(node, AdaptedWeight) else 0
    if isinstance(node, AdaptedExperts):
        own = node.pair_bytes * chosen
    return max(own, *(most_adapted(child, chosen) for _, child in children_of(node)), 0)


def widened_bytes(node: object) -> int:
    """Bytes by which packed elements in 16 bits exceed what is stored.

    A GPU multiplies them so, and a CPU takes about as long.

    Args:
        node: models, layers and experts, nested in any way.
    """
    # Few have that name, and whether all names of a protocol are there takes long to tell.
    if hasattr(node, "num_elements") and isinstance(node, PackedMatrix):
        return 2 * node.num_elements - node.nbytes
    # Rows of an embedding are looked up.
    parts = (child for name, child in children_of(node) if name != "embedding")
    return sum(widened_bytes(part) for part in parts)


def most_mixing(
    node: object,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    *,
    stored: torch.dtype,
) -> int:
    """The most bytes that a token mixer needs on a GPU whatever the rows of a step.

    Args:
        node: models and heads, nested in any way.
        config: the user's options, sizes resolved.
        dtype: of the activations.
        device: where they run.
        max_len: tokens of the longest request.
        stored: dtype of keys and values in memory.
    """
    launches = _launches(config, max_len)

    def bytes_of(mixer: Mixer) -> int:
        if isinstance(mixer, ExpandedShape):
            if not config.fast_prompts_from:
                return 0
            return _expanded_bytes(mixer, dtype, stored, config.block_size, device, launches)
        if isinstance(mixer, AttentionShape | LatentShape):
            return attention_scratch(mixer, dtype, stored, config.block_size, device, launches)
        # Prepared rows have room for the pending ones of every run.
        most_runs = max(runs.num_runs for runs in launches.runs)
        pending = most_runs * config.num_speculative_tokens * _prepared_width(mixer) * _FP32
        # A prompt's last chunk has room for a whole one, however few its rows.
        chunk = _chunk_bytes(mixer, dtype.itemsize) if config.fast_prompts_from else 0
        return pending + config.max_num_seqs * chunk

    return max((bytes_of(mixer) for mixer in set(mixers_of(node))), default=0)


def _expanded_bytes(
    shape: ExpandedShape,
    dtype: torch.dtype,
    stored: torch.dtype,
    block_size: int,
    device: torch.device,
    launches: Launches,
) -> int:
    """Of a chunk in the expanded form: vectors, then their keys and values, attention to them.

    Before they are, vectors of another dtype are there as they are stored.
    """
    max_rows, positions = launches.max_rows, launches.max_seq_len
    one_chunk = Launches((Runs(1, 1, max_rows),), max_rows, positions)
    scratch = attention_scratch(shape.attention, dtype, dtype, block_size, device, one_chunk)
    elements = positions * shape.latent.width
    attended = shape.most_bytes(positions, dtype) + scratch
    return elements * dtype.itemsize + max(elements * stored.itemsize, attended)


def _launches(config: EngineConfig, max_len: int) -> Launches:
    """Launches of attention in all steps of a GPU engine."""
    # Only CUDA builds of torch come with Triton.
    from sametoken.engine.build_gpu import LIMIT_ROWS, captured_shapes

    k, max_rows = config.num_speculative_tokens, _up(config.max_num_batched_tokens, ROW_MULTIPLE)
    # Drafters run a row more of every request.
    more = min(k, 1)
    # Windows and chunks are padded each; of kept rows both are windows.
    padded = _up(config.max_num_seqs, ROW_MULTIPLE)
    windows = [Runs(count, 1, k + 1 + more) for count in range(1, padded + ROW_MULTIPLE + 1)]
    chunks = [
        Runs(count, 1, max_rows + more) for count in range(ROW_MULTIPLE, padded + 1, ROW_MULTIPLE)
    ]
    captured = {
        Runs(shape.num_chunks, shape.max_rows, shape.max_rows + more)
        for shape in captured_shapes(
            config.max_num_seqs, k, config.max_num_batched_tokens, LIMIT_ROWS
        )
        if shape.num_chunks
    }
    return Launches(
        runs=(*windows, *chunks, *captured),
        max_rows=max_rows + len(windows) * more,
        max_seq_len=_up(max_len + k + 1, config.block_size),
    )


def mixers_of(node: object) -> Iterator[Mixer]:
    """What says the sizes of the token mixers of a model or head."""
    # Without KV heads a shape says what a layer writes that reads another's.
    only_writes = isinstance(node, AttentionShape) and not node.num_kv_heads
    if isinstance(node, Mixer) and not only_writes:
        yield node
    for _, child in children_of(node):
        yield from mixers_of(child)


def _up(number: int, multiple: int) -> int:
    return cdiv(number, multiple) * multiple


def _prepared_width(rule: RecurrentRule) -> int:
    """Elements of a prepared row, at most: a raw one's, and for each gate at most four numbers."""
    return rule.conv_channels + 4 * sum(rule.gate_sizes)


def _chunk_bytes(rule: RecurrentRule, width: int) -> int:
    """Bytes of a chunk in the fast form on a GPU: rows and gates, an inverse and weights."""
    squares, gates = 0, 3 * sum(rule.gate_sizes)
    if isinstance(rule, GatedDelta):
        squares, gates = 2 * rule.num_value_heads * FAST_ROWS, sum(rule.gate_sizes)
    return FAST_ROWS * ((rule.conv_channels + squares) * width + gates * _FP32)


def require_addressable(
    config: EngineConfig, caches: Iterable[LayerCache], device: torch.device
) -> None:
    """Refuse steps whose rows a GPU's kernels of recurrent layers cannot address.

    Raises:
        ConfigError: names the most rows.
    """
    rules = [one.rule for one in caches if isinstance(one, Recurrent)]
    if device.type == "cpu" or not rules:
        return
    widest = max(map(_prepared_width, rules))
    pending = (config.max_num_seqs + 1) * config.num_speculative_tokens
    most = _ADDRESSED // widest - pending
    if config.max_num_batched_tokens > most:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is more than the {most} rows "
            "that recurrent layers address in a step on a GPU",
            "lower it: longer prompts run in several steps, with the same tokens",
        )


def _mixer_bytes(cache: LayerCache, model: ModelConfig, width: int, size: int) -> int:
    """Bytes of a row in a layer's token mixer: its projections, what it prepares, its output."""
    if isinstance(cache, Recurrent):
        rule = cache.rule
        raw = rule.conv_channels + sum(rule.gate_sizes)
        # A norm over all ranks' heads, after what is prepared, has two inputs and an output.
        shared = isinstance(rule, Mamba2) and rule.ranks_per_group > 1
        whole = 3 * size * rule.out_features * width if shared else 0
        return (raw + 3 * rule.out_features) * width + max(raw * _FP32, whole)
    if isinstance(cache, LatentKV):
        # Queries before and after their absorption, and values likewise; none is wider.
        return 4 * model.num_heads * cache.width * width
    if isinstance(cache, Stateless):
        return 0
    kv = cache.num_kv_heads * (cache.k_dim + cache.v_dim)
    return (4 * model.num_heads * cache.k_dim + kv) * width
