"""Phi-3 and Phi-4: Llama with fused projections, windows, and a part of a head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sametoken.layers.attention import Attention
from sametoken.layers.feed_forward import GatedMLP
from sametoken.layers.residual import Block
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import attention_heads
from sametoken.models.decoder import Decoder
from sametoken.models.layer_types import DIVIDING, WINDOWED
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.backend import RotaryTable


class Phi3ForCausalLM(Decoder):
    """Tensors ``qkv_proj`` and ``gate_up_proj``, stored as they are run."""

    layer_types = WINDOWED
    rotates_parts = True
    implied: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
    }
    #: A window is that of all layers.
    ignored = DIVIDING

    @staticmethod
    def load_layer_mlp(
        config: ModelConfig, weights: WeightReader, prefix: str, index: int
    ) -> Block:
        """The MLP at ``prefix``."""
        hidden, size = config.hidden_size, config.intermediate_size
        fused = Part(
            f"{prefix}.gate_up_proj", 2 * size, split=Split.ROWS, output_sizes=(size, size)
        )
        down = weights.row_parallel(size, Part(f"{prefix}.down_proj", hidden))
        return GatedMLP(weights.linear(hidden, fused), down)

    def _load_attention(self, weights: WeightReader, index: int, rotary: RotaryTable) -> Block:
        prefix, hidden = f"{self._prefix}.layers.{index}.self_attn", self.config.hidden_size
        whole, shape, ranks = attention_heads(self.config, weights, self._cache_of(index))
        sizes = (whole.q_size, whole.kv_size, whole.kv_size)
        fused = Part(
            f"{prefix}.qkv_proj",
            sum(sizes),
            split=Split.ROWS,
            output_sizes=sizes,
            ranks_per_share=(1, ranks, ranks),
        )
        qkv = weights.linear(hidden, fused)
        output = weights.row_parallel(whole.q_size, Part(f"{prefix}.o_proj", hidden))
        return Attention(weights.kernels, shape, qkv, output, rotary)
