"""Falcon-H1: attention beside Mamba-2 in every layer, and the multipliers of muP.

A layer keeps both KV and a recurrent state: the model declares the caches of attention first, those
of Mamba-2 after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from reprlib import repr as short
from typing import Any, ClassVar

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.layers.feed_forward import GatedMLP
from sametoken.layers.linear import Linear, ScaledLinear
from sametoken.layers.mamba2 import Mamba2BesideAttention
from sametoken.layers.residual import Block, DecoderLayer, Layer, ScaledAfter
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import attention_cache, load_mlp
from sametoken.models.decoder import Decoder
from sametoken.models.load.settings import ANOTHER, COMPARE, MAX_NUMBER, Settings, unsupported
from sametoken.models.load.weights import WeightReader
from sametoken.models.mamba2 import IMPLIED_SIZES, bamba_sizes, load_mamba2, mamba2_cache
from sametoken.ops.backend import RotaryTable
from sametoken.ops.cache_types import LayerCache
from sametoken.ops.model.recurrent.rule import RecurrentPass
from sametoken.state.caches import ModelCache

#: Factors of one number, and those of a list with its length.
_FACTORS = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "key_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)
_LISTS = {"ssm_multipliers": 5, "mlp_multipliers": 2}


def _factors(settings: Settings, key: str, count: int) -> list[float]:
    """The factors that a list holds; by default 1.

    Raises:
        CheckpointError: they are no such numbers, or more or fewer.
    """
    given = settings.get(key, [1.0] * count)
    numbers = isinstance(given, list) and all(
        isinstance(one, int | float) and abs(one) <= MAX_NUMBER for one in given
    )
    if not numbers or len(given) != count:
        raise CheckpointError(
            f"{settings.location}: {key}={short(given)} is no list of {count} numbers", COMPARE
        )
    return [float(one) for one in given]


def _scaled(
    weights: WeightReader,
    linear: Linear,
    sizes: Sequence[int],
    factors: Sequence[float],
    before: float = 1.0,
) -> ScaledLinear:
    """A projection with a factor on each part of its outputs, which have these sizes."""
    pairs = zip(sizes, factors, strict=True)
    by_output = [
        torch.full((size,), factor, dtype=torch.float32, device=weights.device)
        for size, factor in pairs
    ]
    return ScaledLinear(
        linear.weight,
        linear.bias,
        linear.parts,
        kernels=weights.kernels,
        factors=torch.cat(by_output),
        before=before,
    )


class FalconH1ForCausalLM(Decoder):
    """Multipliers are applied where transformers applies them: no weight is changed by them."""

    final_norm_name: ClassVar[str] = "final_layernorm"
    implied: ClassVar[Mapping[str, Any]] = {
        **IMPLIED_SIZES,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "projectors_bias": False,
    }

    @classmethod
    def renamed(cls, settings: Settings) -> dict[str, Any]:
        """See ``Decoder.renamed``; absent factors are 1."""
        given = settings.get("mamba_d_ssm") is not None
        inner = settings.integer("mamba_d_ssm") if given else None
        factors = {key: settings.number(key, 1.0) for key in _FACTORS}
        lists = {key: _factors(settings, key, count) for key, count in _LISTS.items()}
        return bamba_sizes(settings, inner) | factors | lists

    @staticmethod
    def divided_sizes(config: ModelConfig) -> dict[str, int]:
        """As ``Decoder.divided_sizes``, and of Mamba-2 its heads."""
        return Decoder.divided_sizes(config) | {"mamba_n_heads": config.extra["mamba_num_heads"]}

    @staticmethod
    def shared_sizes(config: ModelConfig) -> dict[str, int]:
        """As ``Decoder.shared_sizes``: groups of Mamba-2 heads."""
        return Decoder.shared_sizes(config) | {"mamba_n_groups": config.extra["n_groups"]}

    @classmethod
    def caches_of(
        cls, config: ModelConfig, dtype: torch.dtype, location: str
    ) -> tuple[LayerCache, ...]:
        """Of all layers' attention, then of their Mamba-2.

        Raises:
            CheckpointError: see ``mamba2_cache``.
            UnsupportedError: Mamba-2 is normed before its gate.
        """
        settings = Settings(config.extra, location)
        if settings.switch("mamba_rms_norm") and settings.switch("mamba_norm_before_gate"):
            raise unsupported(settings, "mamba_norm_before_gate", ANOTHER)
        both = (attention_cache(config, dtype), mamba2_cache(settings, dtype))
        return tuple(cache for cache in both for _ in range(config.num_layers))

    def compute_rank_logits(self, hidden: Tensor) -> Tensor:
        """As ``Decoder.compute_rank_logits``, with its factor."""
        factor: float = self.config.extra["lm_head_multiplier"]
        return super().compute_rank_logits(hidden) * factor

    def _embed(self, token_ids: Tensor) -> Tensor:
        factor: float = self.config.extra["embedding_multiplier"]
        return super()._embed(token_ids) * factor

    def _memory(
        self, token_ids: Tensor, embedded: Tensor, cache: ModelCache, step: RecurrentPass | None
    ) -> Sequence[tuple[Any, ...]]:
        """A layer's KV, the pass of recurrent layers, and its state."""
        count = self.config.num_layers
        both = zip(cache.layers[:count], cache.layers[count:], strict=True)
        return [(kv, step, state) for kv, state in both]

    def _load_layer(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Layer:
        prefix = f"{self._prefix}.layers.{index}"
        mixer = Mamba2BesideAttention(
            self._load_mamba(weights, f"{prefix}.mamba"),
            self._load_attention(weights, index, rotary),
        )
        return DecoderLayer(
            self._load_norm(weights, f"{prefix}.input_layernorm"),
            mixer,
            self._load_norm(weights, f"{prefix}.pre_ff_layernorm"),
            self._load_mlp(weights, f"{prefix}.feed_forward"),
        )

    def _load_mamba(self, weights: WeightReader, prefix: str) -> Block:
        mamba, given = load_mamba2(self.config, weights, prefix), self.config.extra
        rule = mamba.params.rule
        sizes = (rule.out_features, *rule.xbc_sizes, rule.num_heads)
        factors, before = given["ssm_multipliers"], given["ssm_in_multiplier"]
        projection = _scaled(weights, mamba.projection, sizes, factors, before)
        return ScaledAfter(replace(mamba, projection=projection), given["ssm_out_multiplier"])

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        attention, given = self._self_attention(weights, index, rotary), self.config.extra
        shape, before = attention.shape, given["attention_in_multiplier"]
        sizes = (shape.q_size, shape.kv_size, shape.kv_size)
        factors = (1.0, given["key_multiplier"], 1.0)
        qkv = _scaled(weights, attention.qkv, sizes, factors, before)
        return ScaledAfter(replace(attention, qkv=qkv), given["attention_out_multiplier"])

    def _load_mlp(self, weights: WeightReader, prefix: str) -> Block:
        mlp = load_mlp(self.config, weights, prefix)
        gate, down = self.config.extra["mlp_multipliers"]
        size = mlp.gate_up.weight.out_features // 2
        gate_up = _scaled(weights, mlp.gate_up, (size, size), (gate, 1.0))
        return ScaledAfter(GatedMLP(gate_up, mlp.down), down)
