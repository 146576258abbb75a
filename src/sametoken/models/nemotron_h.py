"""Nemotron-H and Nemotron-3: hybrids of Mamba-2, attention, MLPs and mixtures of experts.

A layer is one mixer: ``x + mixer(norm(x))``. Attention is not rotated, although configs hold
``rope_theta``. MLPs and experts have no gate: ``down(relu(up)^2)``. The routed scale multiplies
the experts' weights, as in transformers; vLLM multiplies the experts' sum.

In order: config keys, blocks with their tensor names, the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any, ClassVar

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.layers.feed_forward import LayerExperts, PreciseRouter
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import Block, BlockNorm, Layer, Matrices, kept_of
from sametoken.layers.rotary import no_rotation
from sametoken.layers.share import ExpertModules
from sametoken.layers.squared_relu import LatentSpace, SquaredReluMLP, SquaredReluMoE
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import load_attention
from sametoken.models.decoder import Decoder
from sametoken.models.experts import grouped_routing, summed_over_ranks
from sametoken.models.layer_types import FULL, LINEAR
from sametoken.models.load.settings import (
    ANOTHER,
    COMPARE,
    MAX_EXPERTS,
    Settings,
    require_values,
    unsupported,
)
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.models.mamba2 import OF_FALCON, caches_by_type, load_mamba2, time_step_limit
from sametoken.ops.backend import KeptRows, RotaryTable
from sametoken.ops.cache_types import LayerCache, PagedKV, Recurrent
from sametoken.ops.weight import Normed, Weight

MAMBA, ATTENTION, MOE, MLP = LINEAR, FULL, "moe", "mlp"
#: The letters of a pattern, and older names of types.
LAYER_TYPES = {
    "M": MAMBA,
    "*": ATTENTION,
    "E": MOE,
    "-": MLP,
    "mamba": MAMBA,
    "attention": ATTENTION,
}
_RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
    "layer_norm_epsilon": "rms_norm_eps",
}
#: Values that are implemented; others change the arithmetic.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "n_shared_experts": (1,),
}

_NO_LIMIT = (0.0, math.inf)


def layer_types(settings: Settings, prefix: str = "") -> tuple[str, ...]:
    """The type of each layer, from any of the keys that name them; () without one.

    In order: ``block_configs`` (Puzzle), ``layers_block_type``, ``layer_types``,
    ``hybrid_override_pattern``. An unknown type keeps its name.

    Args:
        settings: the config.
        prefix: "mtp_" for the layers of the MTP module.

    Raises:
        CheckpointError: a key has an impossible value.
    """
    blocks = block_settings(settings, prefix)
    names = tuple(str(block.get("block_type")) for block in blocks)
    names = names or settings.names(f"{prefix}layers_block_type")
    names = names or settings.names(f"{prefix}layer_types")
    pattern = settings.get(f"{prefix}hybrid_override_pattern", "")
    if not isinstance(pattern, str):
        raise CheckpointError(
            f"{settings.location}: {prefix}hybrid_override_pattern={short(pattern)} is no text",
            COMPARE,
        )
    return tuple(LAYER_TYPES.get(name, name) for name in names or tuple(pattern))


def block_settings(settings: Settings, prefix: str = "") -> tuple[Settings, ...]:
    """The config of each layer where ``block_configs`` gives them sizes of their own; else ().

    Raises:
        CheckpointError: the key is no list of objects.
    """
    blocks = settings.get(f"{prefix}block_configs", [])
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise CheckpointError(
            f"{settings.location}: {prefix}block_configs={short(blocks)} is no list of objects",
            COMPARE,
        )
    return tuple(replace(settings, values={**settings.values, **block}) for block in blocks)


def _of_layer(settings: Settings, index: int) -> Settings:
    """The config with a layer's own sizes."""
    blocks = block_settings(settings)
    return blocks[index] if blocks else settings


@dataclass(frozen=True, slots=True)
class RowWise(Matrices):
    """A mixer of a row's own features: it sees no other row and keeps nothing."""

    block: SquaredReluMLP | SquaredReluMoE

    def __call__(
        self, x: Tensor, rows: object, memory: None, kept: KeptRows | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; with ``kept``, of those rows alone."""
        return self.block(kept_of(x, kept))


@dataclass(frozen=True, slots=True)
class MixerLayer(Matrices):
    """One layer: norm and a mixer."""

    input_norm: RMSNorm
    mixer: Block

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        following: BlockNorm,
        *cache: Any,
        kept: KeptRows | None = None,
    ) -> tuple[Normed, Tensor]:
        """See ``Layer``."""
        return following.add(self.mixer(x, *cache, kept=kept), kept_of(residual, kept))


def load_squared_relu_mlp(
    weights: WeightReader, prefix: str, hidden: int, size: int
) -> SquaredReluMLP:
    """Load the MLP at ``prefix``: ``hidden`` to ``size`` to ``hidden``."""
    up = weights.linear(hidden, Part(f"{prefix}.up_proj", size, split=Split.ROWS))
    down = weights.row_parallel(size, Part(f"{prefix}.down_proj", hidden))
    return SquaredReluMLP(weights.kernels, up, down)


def load_squared_relu_moe(
    settings: Settings, weights: WeightReader, prefix: str, hidden: int
) -> SquaredReluMoE:
    """Load the MoE block at ``prefix``, never quantized; ranks divide every expert's features.

    Raises:
        CheckpointError: a size is missing or impossible.
    """
    weights = replace(weights, quantize_fp8=False)
    num_experts = settings.integer("n_routed_experts", most=MAX_EXPERTS)
    shared_size = settings.integer("moe_shared_expert_intermediate_size")
    latent_size = settings.count("moe_latent_size")
    latent = None
    if latent_size:
        latent = LatentSpace(
            weights.linear(hidden, Part(f"{prefix}.fc1_latent_proj", latent_size)),
            weights.linear(latent_size, Part(f"{prefix}.fc2_latent_proj", hidden)),
        )
    correction = Part(f"{prefix}.gate.e_score_correction_bias", num_experts)
    router = weights.linear(hidden, Part(f"{prefix}.gate", num_experts))
    return SquaredReluMoE(
        weights.kernels,
        router=PreciseRouter(router.weight, router.parts),
        correction=weights.tensor(correction, dtype=torch.float32),
        routing=grouped_routing(settings),
        experts=_load_experts(settings, weights, f"{prefix}.experts", latent_size or hidden),
        latent=latent,
        shared=load_squared_relu_mlp(weights, f"{prefix}.shared_experts", hidden, shared_size),
    )


def _load_experts(
    settings: Settings, weights: WeightReader, prefix: str, width: int
) -> LayerExperts:
    """All experts, in one tensor each for up and down, or one by one."""
    count, size = settings.integer("n_routed_experts"), settings.integer("moe_intermediate_size")
    up = _matrices(weights, count, width, Part(f"{prefix}.up_proj", size, split=Split.ROWS))
    down = _matrices(weights, count, size, Part(f"{prefix}.down_proj", width, split=Split.COLUMNS))
    modules = ExpertModules.of(prefix, count, width, size, gated=False)
    return summed_over_ranks(weights, weights.kernels.pack_experts(up, down), modules)


def _matrices(weights: WeightReader, count: int, in_features: int, part: Part) -> list[Weight]:
    """``part`` of every expert, whose names are ``experts.J.up_proj.weight`` if not stacked."""
    if part.name in weights:
        return weights.packed_stack(count, in_features, part)
    prefix, _, name = part.name.rpartition(".")
    own = (replace(part, name=f"{prefix}.{index}.{name}") for index in range(count))
    return [weights.linear(in_features, one).weight for one in own]


class NemotronHForCausalLM(Decoder):
    """Layers of four types; tensors of an MTP module are not read."""

    layer_types: ClassVar[frozenset[str]] = frozenset((MAMBA, ATTENTION, MOE, MLP))
    unused_prefixes: ClassVar[tuple[str, ...]] = ("mtp.",)
    ignored = OF_FALCON
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    embedding_name: ClassVar[str] = "embeddings"
    final_norm_name: ClassVar[str] = "norm_f"
    attention_name: ClassVar[str] = "mixer"
    implied: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_norm_epsilon": 1e-5,
        "n_groups": 8,
        "conv_kernel": 4,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """See ``Decoder.renamed``; the number of layers is that of their types."""
        given = {new: settings.get(old) for old, new in _RENAMED.items()}
        found = {key: value for key, value in given.items() if value is not None}
        types = layer_types(settings)
        if not types:
            raise CheckpointError(
                f"{settings.location} names no layers (layers_block_type)", COMPARE
            )
        blocks = zip(types, block_settings(settings), strict=False)
        experts = [block for kind, block in blocks if kind == MOE]
        # Of Puzzle's layers the largest: memory is planned by it.
        for key in ("moe_intermediate_size", "num_experts_per_tok"):
            if experts:
                found[key] = max(block.integer(key) for block in experts)
        return found | {"layer_types": list(types), "num_hidden_layers": len(types)}

    @staticmethod
    def tensor_prefix(weights: WeightReader) -> str:
        """``backbone``, or ``model`` in Puzzle's checkpoints."""
        return "model" if "model.embeddings.weight" in weights else "backbone"

    @staticmethod
    def divided_sizes(config: ModelConfig) -> dict[str, int]:
        """As ``Decoder.divided_sizes``, and of Mamba-2 its heads."""
        settings = Settings(config.extra, config.architecture)
        sizes: dict[str, int] = {}
        types = settings.names("layer_types")
        if ATTENTION in types:
            sizes |= Decoder.divided_sizes(config)
            del sizes["intermediate_size"]
        if MAMBA in types:
            sizes["mamba_num_heads"] = settings.integer("mamba_num_heads")
        if MLP in types:
            sizes["intermediate_size"] = config.intermediate_size
        for index, kind in enumerate(types):
            if kind == MOE:
                of_layer = _of_layer(settings, index)
                for key in ("moe_intermediate_size", "moe_shared_expert_intermediate_size"):
                    sizes[key] = math.gcd(sizes.get(key, 0), of_layer.integer(key))
        return sizes

    @staticmethod
    def shared_sizes(config: ModelConfig) -> dict[str, int]:
        """As ``Decoder.shared_sizes``: groups of Mamba-2 heads."""
        settings = Settings(config.extra, config.architecture)
        types = settings.names("layer_types")
        sizes = Decoder.shared_sizes(config) if ATTENTION in types else {}
        return sizes | ({"n_groups": settings.integer("n_groups")} if MAMBA in types else {})

    @classmethod
    def caches_of(
        cls, config: ModelConfig, dtype: torch.dtype, location: str
    ) -> tuple[LayerCache, ...]:
        """As ``Decoder.caches_of``.

        Raises:
            UnsupportedError: time steps have a limit. The published code has it in prompts alone,
                transformers not at all.
        """
        settings = Settings(config.extra, location)
        require_values(settings, _ONLY)
        caches = caches_by_type(config, dtype, location)
        if MAMBA in settings.names("layer_types") and time_step_limit(settings) != _NO_LIMIT:
            raise unsupported(settings, "time_step_limit", ANOTHER)
        return caches

    def _rotaries(self, device: torch.device) -> tuple[RotaryTable, ...]:
        return (no_rotation(self._max_positions, device),) * self.config.num_layers

    def _embedding_name(self, weights: WeightReader) -> str:
        """In the singular where transformers 5.3 to 5.15 has saved it (transformers#48075)."""
        singular = f"{self._prefix}.embedding.weight"
        return singular if singular in weights else super()._embedding_name(weights)

    def _load_layer(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Layer:
        prefix = f"{self._prefix}.layers.{index}"
        settings = Settings(self.config.extra, weights.source.location)
        kind, cache = settings.names("layer_types")[index], self._declared[index]
        norm = self._load_norm(weights, f"{prefix}.norm")
        mixer, hidden = f"{prefix}.mixer", self.config.hidden_size
        if isinstance(cache, PagedKV):
            return MixerLayer(norm, load_attention(self.config, weights, mixer, rotary))
        if isinstance(cache, Recurrent):
            return MixerLayer(norm, load_mamba2(self.config, weights, mixer))
        block: SquaredReluMLP | SquaredReluMoE
        if kind == MOE:
            block = load_squared_relu_moe(_of_layer(settings, index), weights, mixer, hidden)
        else:
            size = _of_layer(settings, index).integer("intermediate_size")
            block = load_squared_relu_mlp(weights, mixer, hidden, size)
        return MixerLayer(norm, RowWise(block))
