"""DeepSeek-V2 and V3 and their kin (R1, Moonlight, Kimi-K2, GLM-4.7-Flash): MLA and experts.

In order: config keys, routers, layers with their tensor names, the shared decoder, the classes.
Latent attention is absorbed for every row: ``kv_b_proj`` [heads * (nope + v), rank] is divided at
load into W_UK and W_UV of each head. A NextN module (``model.layers.{num_hidden_layers}.*``) is
not read here but by ``models.heads.nextn``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from reprlib import repr as short
from typing import Any, ClassVar

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.layers.latent_attention import LatentAttention, LowRankQueries, Queries, WholeQueries
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import Block
from sametoken.layers.rotary import rotary_table
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import load_mlp
from sametoken.models.experts import CORRECTION, divided_with_experts, grouped_routing, load_grouped
from sametoken.models.layer_types import REFUSED
from sametoken.models.load.quantization import kv_strategy
from sametoken.models.load.settings import (
    ANOTHER,
    COMPARE,
    KV_SCHEME,
    MAX_HEAD_DIM,
    MAX_NUMBER,
    Settings,
    require_values,
)
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.models.nextn_target import NextNTarget
from sametoken.ops.backend import RotaryTable, Routing
from sametoken.ops.cache_types import LatentKV, LayerCache
from sametoken.ops.model.latent_attention.shape import ExpandedShape, LatentRotary, LatentShape

#: Of the norms inside attention, whatever ``rms_norm_eps`` says (DeepSeek's code, transformers).
_INNER_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of a layer's latent attention, over all ranks.

    Attributes:
        q_rank: rank of the queries' projection; 0: it has full rank.
        kv_rank: elements of a latent.
        rope_dim, nope_dim: elements of a head that are rotated, and that are not.
        v_dim: elements of a head's values.
        scale: factor on the scores, with YaRN's.
    """

    num_heads: int
    q_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    scale: float

    @property
    def qk_dim(self) -> int:
        """Elements of a head's query."""
        return self.nope_dim + self.rope_dim

    def expanded(self, num_ranks: int) -> ExpandedShape:
        """The heads of one rank, in the expanded form."""
        heads = self.num_heads // num_ranks
        shape = LatentShape(heads, self.kv_rank, self.rope_dim, self.scale)
        return ExpandedShape(shape, self.nope_dim, self.v_dim)


def latent_sizes(config: ModelConfig, location: str) -> LatentSizes:
    """Sizes of latent attention.

    Raises:
        CheckpointError: a size is missing or impossible.
    """
    settings = Settings(config.extra, location)
    nope, rope, v = (
        settings.integer(key, most=MAX_HEAD_DIM)
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    if rope % 2:
        raise CheckpointError(f"{location}: qk_rope_head_dim={rope} is odd", COMPARE)
    return LatentSizes(
        num_heads=config.num_heads,
        q_rank=0 if settings.get("q_lora_rank") is None else settings.integer("q_lora_rank"),
        kv_rank=settings.integer("kv_lora_rank", most=MAX_HEAD_DIM),
        rope_dim=rope,
        nope_dim=nope,
        v_dim=v,
        scale=(nope + rope) ** -0.5 * _yarn_scale(config, location),
    )


def _yarn_scale(config: ModelConfig, location: str) -> float:
    """Factor on the scores of a scaled rope: the square of YaRN's mscale, where one is given.

    The factor on cos and sin, mscale / mscale_all_dim, is in the rotary table.
    """
    rope = Settings(config.rope, location)
    if config.rope["rope_type"] == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    all_dim, factor = rope.number("mscale_all_dim"), rope.number("factor")
    mscale = 0.1 * all_dim * math.log(max(factor, 1.0)) + 1.0
    if (scale := mscale * mscale) > MAX_NUMBER:
        raise CheckpointError(f"{location}: mscale_all_dim={all_dim} is too large", COMPARE)
    return scale


def _is_sparse(config: ModelConfig, index: int) -> bool:
    """Whether a layer's MLP is a mixture of experts; the NextN module's layer is the last one."""
    settings = Settings(config.extra, config.architecture)
    types = settings.names("mlp_layer_types")
    if index < len(types):
        return types[index] == "sparse"
    # Absent or 0 is as good as none.
    first, step = settings.get("first_k_dense_replace") or 0, settings.integer("moe_layer_freq", 1)
    if not isinstance(first, int) or isinstance(first, bool):
        raise CheckpointError(f"first_k_dense_replace={short(first)} is no integer", COMPARE)
    return index >= first and index % step == 0


def load_rotary(config: ModelConfig, max_positions: int, device: torch.device) -> RotaryTable:
    """The table of a head's rotated elements alone."""
    size = latent_sizes(config, config.architecture).rope_dim
    return rotary_table(config.rope, head_dim=size, max_positions=max_positions, device=device)


def load_attention(
    config: ModelConfig, weights: WeightReader, prefix: str, rotary: RotaryTable
) -> LatentAttention:
    """Load the block at ``prefix``; ranks divide its heads, and every rank has all latents.

    Raises:
        CheckpointError: a size or a tensor is missing or impossible.
        UnsupportedError: the kernels do not support it, or biases without ``q_lora_rank``.
    """
    sizes = latent_sizes(config, weights.source.location)
    bias, hidden = config.attention_bias, config.hidden_size
    if bias and not sizes.q_rank:
        raise UnsupportedError(
            f"{weights.source.location}: attention_bias=true without q_lora_rank is not supported",
            ANOTHER,
        )
    expanded = sizes.expanded(weights.parallel.size)
    weights.kernels.require_latent(shape := expanded.latent)
    q_rows = sizes.num_heads * sizes.qk_dim
    latent = Part(f"{prefix}.kv_a_proj_with_mqa", shape.width)
    first = Part(f"{prefix}.q_proj", q_rows, split=Split.ROWS)
    queries: Queries = WholeQueries()
    if sizes.q_rank:
        first = Part(f"{prefix}.q_a_proj", sizes.q_rank)
        queries = _low_rank_queries(weights, prefix, sizes.q_rank, q_rows)
    norm = weights.vector(f"{prefix}.kv_a_layernorm.weight", sizes.kv_rank)
    # Whether neighbouring elements are rotated as a pair.
    pairs = Settings(config.extra, config.architecture).switch("rope_interleave", default=True)
    up_k, up_v = _per_head(weights, prefix, sizes)
    return LatentAttention(
        kernels=weights.kernels,
        shape=shape,
        expanded=expanded,
        projection=weights.linear(hidden, first, latent, bias=bias),
        queries=queries,
        rotary=LatentRotary(norm, _INNER_EPS, rotary.cos, rotary.sin, pairs),
        absorb=weights.kernels.pack_heads(up_k.mT),
        expand=weights.kernels.pack_heads(up_v),
        output=weights.row_parallel(
            sizes.num_heads * sizes.v_dim, Part(f"{prefix}.o_proj", hidden), bias=bias
        ),
    )


def _low_rank_queries(weights: WeightReader, prefix: str, rank: int, rows: int) -> LowRankQueries:
    weight = weights.vector(f"{prefix}.q_a_layernorm.weight", rank)
    heads = weights.linear(rank, Part(f"{prefix}.q_b_proj", rows, split=Split.ROWS))
    return LowRankQueries(RMSNorm(weights.kernels, weight, _INNER_EPS), heads)


def _per_head(weights: WeightReader, prefix: str, sizes: LatentSizes) -> tuple[Tensor, Tensor]:
    """This rank's heads of ``kv_b_proj``: [heads, nope_dim, rank] and [heads, v_dim, rank].

    They are products per head, in the model's dtype whatever the format of the checkpoint. GGUF
    files have the two apart, keys as [heads, rank, nope_dim].
    """
    rank, nope, v = sizes.kv_rank, sizes.nope_dim, sizes.v_dim
    names = f"{prefix}.k_b_proj.weight", f"{prefix}.v_b_proj.weight"
    if names[0] in weights:
        keys, values = (Part(name, sizes.num_heads, split=Split.ROWS) for name in names)
        return weights.tensor(keys, (rank, nope)).mT, weights.tensor(values, (v, rank))
    rows = Part(f"{prefix}.kv_b_proj", sizes.num_heads * (nope + v), split=Split.ROWS)
    whole = weights.expanded(rank, rows)
    heads = whole.unflatten(0, (sizes.num_heads // weights.parallel.size, -1))
    up_k, up_v = heads.split((nope, v), dim=1)
    return up_k, up_v


class DeepseekDecoder(NextNTarget):
    """The shared decoder with latent attention, and with experts in most layers."""

    @staticmethod
    @abstractmethod
    def routing(settings: Settings) -> Routing:
        """How a router's logits choose experts.

        Raises:
            CheckpointError: a count is missing or impossible.
            UnsupportedError: another way is asked for.
        """
        ...

    #: V3.2's sparse attention, whose indexer chooses the tokens that a row sees.
    refused = (*REFUSED, "index_topk")
    #: As ``load_grouped`` takes it.
    correction: ClassVar[str | None] = CORRECTION
    divided_sizes = staticmethod(partial(divided_with_experts, is_sparse=_is_sparse))

    @staticmethod
    def shared_sizes(config: ModelConfig) -> dict[str, int]:
        """None: latents are whole on every rank."""
        return {}

    @classmethod
    def caches_of(
        cls, config: ModelConfig, dtype: torch.dtype, location: str
    ) -> tuple[LayerCache, ...]:
        """As ``Decoder.caches_of``.

        Raises:
            UnsupportedError: float8 KV has scales by head, which latents have not.
        """
        if kv_strategy(config.extra, location) == "attn_head":
            raise UnsupportedError(
                f"{location}: {KV_SCHEME} has strategy 'attn_head', and latents have no heads",
                "use a checkpoint with strategy 'tensor'",
            )
        sizes = latent_sizes(config, location)
        return (LatentKV(sizes.kv_rank, sizes.rope_dim, dtype),) * config.num_layers

    @classmethod
    def load_layer_mlp(
        cls, config: ModelConfig, weights: WeightReader, prefix: str, index: int
    ) -> Block:
        """As ``Decoder.load_layer_mlp``.

        Raises:
            CheckpointError: a size is missing or impossible.
            UnsupportedError: another routing.
        """
        if not _is_sparse(config, index):
            return load_mlp(config, weights, prefix)
        routing = cls.routing(Settings(config.extra, weights.source.location))
        return load_grouped(config, weights, prefix, routing, cls.correction)

    @classmethod
    def load_module_attention(
        cls, config: ModelConfig, weights: WeightReader, prefix: str, max_positions: int
    ) -> LatentAttention:
        """As ``NextNTarget.load_module_attention``."""
        rotary = load_rotary(config, max_positions, weights.device)
        return load_attention(config, weights, prefix, rotary)

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        prefix = f"{self._prefix}.layers.{index}.self_attn"
        return load_attention(self.config, weights, prefix, rotary)

    def _rotaries(self, device: torch.device) -> tuple[RotaryTable, ...]:
        table = load_rotary(self.config, self._max_positions, device)
        return (table,) * self.config.num_layers


class DeepseekV3ForCausalLM(DeepseekDecoder):
    """Sigmoid scores, corrected by a bias where they choose; a group's score is its best two's."""

    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    implied: ClassVar[Mapping[str, Any]] = {
        "head_dim": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """Switches that are on where they are absent, and off where they are null."""
        switches = ("norm_topk_prob", "rope_interleave")
        return {key: False for key in switches if settings.values.get(key, True) is None}

    @staticmethod
    def routing(settings: Settings) -> Routing:
        """As ``DeepseekDecoder.routing``."""
        require_values(settings, {"scoring_func": ("sigmoid",)})
        return grouped_routing(settings)


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash: other sizes, and one dense layer."""

    implied: ClassVar[Mapping[str, Any]] = {
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
    }


class DeepseekV2ForCausalLM(DeepseekDecoder):
    """Softmax scores without a correction; a group's score is its best expert's."""

    aliases: ClassVar[Mapping[str, str]] = {"num_experts": "n_routed_experts"}
    implied: ClassVar[Mapping[str, Any]] = {
        "head_dim": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "topk_method": "greedy",
    }
    #: Neighbouring elements are always a pair.
    ignored = ("rope_interleave",)
    correction = None

    @staticmethod
    def routing(settings: Settings) -> Routing:
        """As ``DeepseekDecoder.routing``; without groups for the method "greedy"."""
        method = settings.get("topk_method")
        if method not in ("greedy", "group_limited_greedy") or settings.switch("norm_topk_prob"):
            raise UnsupportedError(
                f"{settings.location}: topk_method={short(method)} with norm_topk_prob="
                f"{short(settings.get('norm_topk_prob'))} is not supported",
                ANOTHER,
            )
        if method == "greedy":
            ungrouped = {"n_group": 1, "topk_group": 1}
            settings = replace(settings, values={**settings.values, **ungrouped})
        require_values(settings, {"scoring_func": ("softmax",)})
        return grouped_routing(settings, "softmax", 1, normalise=False)
