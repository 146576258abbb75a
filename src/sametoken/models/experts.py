"""Loading mixtures of experts: which layers have one, the router and the experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sametoken.errors import CheckpointError
from sametoken.layers.feed_forward import DividedExperts, RoutedExperts
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import load_gated_mlp
from sametoken.models.load.settings import MAX_EXPERTS, Settings
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.backend import Routing
from sametoken.ops.weight import Experts


def is_sparse(config: ModelConfig, index: int) -> bool:
    """Whether a layer's MLP is a mixture of experts, as Qwen's configs say it.

    Raises:
        CheckpointError: a setting is impossible.
    """
    settings = Settings(config.extra, config.architecture)
    step = settings.integer("decoder_sparse_step", 1)
    dense = settings.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise CheckpointError(
            f"{settings.location}: mlp_only_layers is no list",
            "compare with the original checkpoint's",
        )
    return bool(settings.get("num_experts")) and index not in dense and (index + 1) % step == 0


def divided_sizes(
    config: ModelConfig, sizes: dict[str, int], sparse: list[bool], keys: Iterable[str]
) -> dict[str, int]:
    """``sizes`` without the dense MLP's if no layer has one, and with those of experts.

    Args:
        config: the architecture.
        sizes: as ``Decoder.divided_sizes`` gives them.
        sparse: whether each layer's MLP is a mixture of experts.
        keys: in config.json, the inner sizes of experts.
    """
    settings = Settings(config.extra, config.architecture)
    if all(sparse):
        sizes = {key: size for key, size in sizes.items() if key != "intermediate_size"}
    return sizes | ({key: settings.integer(key) for key in keys} if any(sparse) else {})


def softmax_routing(settings: Settings, *, normalise: bool) -> Routing:
    """The routing of Qwen's mixtures; ``normalise`` where ``norm_topk_prob`` is absent.

    Raises:
        CheckpointError: a count is missing or impossible.
    """
    count = settings.integer("num_experts", most=MAX_EXPERTS)
    top_k = min(settings.integer("num_experts_per_tok"), count)
    return Routing(top_k, normalise=bool(settings.get("norm_topk_prob", normalise)))


def load_routed(
    config: ModelConfig,
    weights: WeightReader,
    prefix: str,
    routing: Routing,
    count_key: str = "num_experts",
) -> RoutedExperts:
    """Load the router ``gate`` and the ``experts`` at ``prefix``; ranks divide every expert.

    Of a draft head neither is quantized.

    Raises:
        CheckpointError: a size is missing or impossible.
    """
    weights = replace(weights, quantize_fp8=False)
    settings = Settings(config.extra, weights.source.location)
    count = settings.integer(count_key, most=MAX_EXPERTS)
    size, hidden = settings.integer("moe_intermediate_size"), config.hidden_size
    router = weights.linear(hidden, Part(f"{prefix}.gate", count))
    experts: Experts | DividedExperts
    experts = own = _packed_experts(weights, f"{prefix}.experts", count, hidden, size)
    if weights.parallel.size > 1:
        experts = DividedExperts(weights.kernels, weights.parallel, own)
    return RoutedExperts(weights.kernels, router, experts, routing)


def _packed_experts(
    weights: WeightReader, prefix: str, count: int, hidden: int, size: int
) -> Experts:
    """All experts, stored in one fused tensor each for gate_up and down, or one by one."""
    if f"{prefix}.gate_up_proj" in weights:
        fused = Part(
            f"{prefix}.gate_up_proj", 2 * size, split=Split.ROWS, output_sizes=(size, size)
        )
        gate_up = weights.packed_stack(count, hidden, fused)
        down_part = Part(f"{prefix}.down_proj", hidden, split=Split.COLUMNS)
        down = weights.packed_stack(count, size, down_part)
        return weights.kernels.pack_experts(gate_up, down)
    mlps = [load_gated_mlp(weights, f"{prefix}.{i}", hidden, size) for i in range(count)]
    return weights.kernels.pack_experts(
        [mlp.gate_up.weight for mlp in mlps], [mlp.down.weight for mlp in mlps]
    )
