"""Loading mixtures of experts: which layers have one, the router and the experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.layers.feed_forward import (
    DividedExperts,
    GatedExpert,
    LayerExperts,
    PreciseRouter,
    RoutedExperts,
    SparseMoE,
    WholeExperts,
)
from sametoken.layers.residual import Block
from sametoken.layers.share import ExpertModules
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import GATED, GatedNames, load_gated_mlp, load_mlp
from sametoken.models.decoder import Decoder
from sametoken.models.load.settings import COMPARE, MAX_EXPERTS, Settings
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.backend import Routing
from sametoken.ops.weight import ExpertForm, Experts

#: The bias of DeepSeek's routers.
CORRECTION = "gate.e_score_correction_bias"
#: The ``ignored`` keys of classes whose routers have no groups.
UNGROUPED = ("n_group", "topk_group")
#: Mixtral's names of an expert's projections.
MIXTRAL = GatedNames("w1", "w3", "w2")


def is_sparse(config: ModelConfig, index: int) -> bool:
    """Whether a layer's MLP is a mixture of experts, as Qwen's configs say it.

    Raises:
        CheckpointError: a setting is impossible.
    """
    settings = Settings(config.extra, config.architecture)
    step = settings.integer("decoder_sparse_step", 1)
    dense = settings.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise CheckpointError(f"{settings.location}: mlp_only_layers is no list", COMPARE)
    return bool(settings.get("num_experts")) and index not in dense and (index + 1) % step == 0


def divided_with_experts(
    config: ModelConfig,
    is_sparse: Callable[[ModelConfig, int], bool],
    keys: Iterable[str] = ("moe_intermediate_size",),
) -> dict[str, int]:
    """``Decoder.divided_sizes`` without a dense MLP's if no layer has one, and with experts'.

    ``is_sparse`` tells which layers have experts, ``keys`` are those of their inner sizes.
    """
    settings = Settings(config.extra, config.architecture)
    sparse = [is_sparse(config, index) for index in range(config.num_layers)]
    sizes = Decoder.divided_sizes(config)
    if all(sparse):
        del sizes["intermediate_size"]
    return sizes | ({key: settings.integer(key) for key in keys} if any(sparse) else {})


def softmax_routing(settings: Settings, *, normalise: bool) -> Routing:
    """The routing of Qwen's mixtures; ``normalise`` where ``norm_topk_prob`` is absent.

    Raises:
        CheckpointError: a count is missing or impossible.
    """
    count = settings.integer("num_experts", most=MAX_EXPERTS)
    top_k = min(settings.integer("num_experts_per_tok"), count)
    return Routing(top_k, normalise=settings.switch("norm_topk_prob", default=normalise))


def grouped_routing(
    settings: Settings, scoring: str = "sigmoid", group_best: int = 2, *, normalise: bool = True
) -> Routing:
    """The routing of DeepSeek's kin, over ``n_group`` groups of which ``topk_group`` are kept.

    A group with fewer experts than ``group_best`` (see ``Routing``) has the score of all of them.
    ``normalise`` where ``norm_topk_prob`` is absent.

    Raises:
        CheckpointError: a count is missing or impossible.
    """
    count = settings.integer("n_routed_experts", most=MAX_EXPERTS)
    groups, kept = settings.integer("n_group", 1), settings.integer("topk_group", 1)
    top_k, size = settings.integer("num_experts_per_tok"), count // groups
    if count % groups or kept > groups or top_k > kept * size:
        raise CheckpointError(
            f"{settings.location}: {top_k} of {count} experts in {kept} of n_group={groups} "
            "groups is not possible",
            COMPARE,
        )
    return Routing(
        top_k,
        normalise=settings.switch("norm_topk_prob", default=normalise),
        scoring=scoring,
        num_groups=groups,
        top_groups=kept,
        group_best=min(group_best, size),
        scale=settings.number("routed_scaling_factor", 1.0),
    )


def mixtral_prefix(weights: WeightReader, prefix: str) -> str:
    """That of the mixture, by Mixtral's name, of the layer whose MLP's is ``prefix``.

    A trainer may send it by transformers' own name, which is ``prefix`` itself.
    """
    sent = f"{prefix}.gate.weight" in weights
    return prefix if sent else f"{prefix.removesuffix('.mlp')}.block_sparse_moe"


def load_routed(
    config: ModelConfig,
    weights: WeightReader,
    prefix: str,
    routing: Routing,
    count_key: str = "num_experts",
    names: GatedNames = GATED,
) -> RoutedExperts:
    """Load the router ``gate`` and the ``experts`` at ``prefix``; ranks divide every expert.

    Of a draft head neither is quantized. ``names`` are those of an expert's projections.

    Raises:
        CheckpointError: a size is missing or impossible.
    """
    weights = replace(weights, quantize_fp8=False)
    settings = Settings(config.extra, weights.source.location)
    count = settings.integer(count_key, most=MAX_EXPERTS)
    router = weights.linear(config.hidden_size, Part(f"{prefix}.gate", count))
    experts = load_experts(config, weights, f"{prefix}.experts", count, names=names)
    return RoutedExperts(weights.kernels, router, experts, routing)


def load_dense_or_sparse(
    config: ModelConfig, weights: WeightReader, prefix: str, index: int
) -> Block:
    """A layer's MLP at ``prefix``: dense, or Qwen's mixture beside a shared, gated expert.

    Of a draft head the mixture is not quantized.

    Raises:
        CheckpointError: a size is missing or impossible.
    """
    if not is_sparse(config, index):
        return load_mlp(config, weights, prefix)
    weights = replace(weights, quantize_fp8=False)
    settings = Settings(config.extra, weights.source.location)
    routing = softmax_routing(settings, normalise=True)
    shared_size = settings.integer("shared_expert_intermediate_size")
    hidden = config.hidden_size
    shared = GatedExpert(
        weights.kernels,
        load_gated_mlp(weights, f"{prefix}.shared_expert", hidden, shared_size),
        weights.linear(hidden, Part(f"{prefix}.shared_expert_gate", 1)),
    )
    return SparseMoE(load_routed(config, weights, prefix, routing), shared)


def load_experts(
    config: ModelConfig,
    weights: WeightReader,
    prefix: str,
    count: int,
    form: ExpertForm | None = None,
    names: GatedNames = GATED,
    stacks: tuple[str, str] | None = None,
) -> LayerExperts:
    """Load the ``count`` gated experts at ``prefix``; ranks divide every expert.

    They are in one fused tensor for [gate | up] and one for down, or one by one, unless ``stacks``
    names the two tensors.

    Raises:
        CheckpointError: their size is missing or impossible.
    """
    settings = Settings(config.extra, weights.source.location)
    size, hidden = settings.integer("moe_intermediate_size"), config.hidden_size
    gate_up, down = stacks or (f"{prefix}.gate_up_proj", f"{prefix}.down_proj")
    if stacks or gate_up in weights:
        halves = Part(gate_up, 2 * size, split=Split.ROWS, output_sizes=(size, size))
        first = weights.packed_stack(count, hidden, halves)
        second = weights.packed_stack(count, size, Part(down, hidden, split=Split.COLUMNS))
    else:
        mlps = [load_gated_mlp(weights, f"{prefix}.{i}", hidden, size, names) for i in range(count)]
        first, second = [mlp.gate_up.weight for mlp in mlps], [mlp.down.weight for mlp in mlps]
    own = weights.kernels.pack_experts(first, second, form)
    return summed_over_ranks(weights, own, ExpertModules.of(prefix, count, hidden, size))


def summed_over_ranks(weights: WeightReader, own: Experts, modules: ExpertModules) -> LayerExperts:
    """A layer's experts, of which this rank has ``own`` parts."""
    if weights.parallel.size == 1:
        return WholeExperts(own, modules)
    return DividedExperts(weights.kernels, weights.parallel, own, modules)


def load_grouped(
    config: ModelConfig,
    weights: WeightReader,
    prefix: str,
    routing: Routing,
    correction: str | None = CORRECTION,
    names: GatedNames = GATED,
) -> RoutedExperts | SparseMoE:
    """Load DeepSeek's mixture at ``prefix``: a router of fp32 logits, beside shared experts if any.

    Shared experts are one MLP of their sizes' sum. ``correction`` is the name of the router's bias,
    which chooses experts and weighs none, and ``names`` are those of an expert's projections.

    Raises:
        CheckpointError: a size is missing or impossible.
    """
    settings = Settings(config.extra, weights.source.location)
    routed = load_routed(config, weights, prefix, routing, "n_routed_experts", names)
    routed = replace(routed, router=PreciseRouter(routed.router.weight, routed.router.parts))
    if correction is not None:
        count = settings.integer("n_routed_experts", most=MAX_EXPERTS)
        routed = replace(routed, bias=_correction(weights, f"{prefix}.{correction}", count))
    if not settings.get("n_shared_experts"):
        return routed
    size = settings.integer("n_shared_experts") * settings.integer("moe_intermediate_size")
    shared = load_gated_mlp(weights, f"{prefix}.shared_experts", config.hidden_size, size)
    return SparseMoE(routed, shared)


def _correction(weights: WeightReader, name: str, count: int) -> Tensor:
    """[count] fp32, of a vector or, as ERNIE's, a matrix of one row."""
    if name in weights and weights.source.shape(name) == (1, count):
        return weights.tensor(Part(name, 1), (count,), torch.float32)[0]
    return weights.tensor(Part(name, count), dtype=torch.float32)
