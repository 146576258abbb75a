"""The multi-token-prediction (MTP) module of Nemotron-3: an attention layer, then an MoE layer.

From vLLM (``vllm/model_executor/models/nemotron_h_mtp.py``): ``eh_proj`` maps
``[enorm(embedding) | hnorm(hidden)]``, 2h wide, to h, without a bias. Two layers of one mixer each
follow, as in the target: attention without RoPE, and a mixture of experts. What
``final_layernorm`` gives is the lm_head's input and the next row's state; the first state is the
target's after its final norm. The same module runs for every further draft.

Tensors: ``mtp.layers.0.{enorm,hnorm,eh_proj,norm,mixer}`` and
``mtp.layers.1.{norm,mixer,final_layernorm}``. Config keys: ``num_nextn_predict_layers``, 0 by
default, and the types of layers as the target's, after ``mtp_``; Puzzle's ``mtp_block_configs`` and
``mtp_n_routed_experts`` too.
"""

from __future__ import annotations

from dataclasses import replace
from reprlib import repr as short

from sametoken.errors import UnsupportedError
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import DecoderLayer
from sametoken.layers.rotary import no_rotation
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import load_attention, load_norm
from sametoken.models.heads.mtp_form import Module, ModuleForm
from sametoken.models.heads.reader import HeadReader
from sametoken.models.load.settings import Settings, quantization_settings
from sametoken.models.load.weights import Part
from sametoken.models.nemotron_h import (
    ATTENTION,
    MOE,
    block_settings,
    layer_types,
    load_squared_relu_moe,
)

FIRST, LAST = "mtp.layers.0", "mtp.layers.1"


class NemotronHForm(ModuleForm):
    """See ``ModuleForm``."""

    prefix, fusion = "mtp.", f"{FIRST}.eh_proj"

    def num_layers(self, settings: Settings) -> object:
        """See ``ModuleForm.num_layers``."""
        return settings.get("num_nextn_predict_layers", 0)

    def require(self, settings: Settings) -> None:
        """See ``ModuleForm.require``."""
        types = layer_types(settings, "mtp_") or (ATTENTION, MOE)
        if types != (ATTENTION, MOE):
            raise UnsupportedError(
                f"{settings.location}: a multi-token-prediction module of {short(list(types))} "
                "is not supported",
                "use one of attention and experts, or another speculative method",
            )

    def is_divisible(self, settings: Settings, size: int) -> bool:
        """See ``ModuleForm``; its experts have sizes of their own, and may be quantized."""
        keys = "moe_intermediate_size", "moe_shared_expert_intermediate_size"
        sizes = [_experts(settings).integer(key) for key in keys]
        is_quantized = quantization_settings(settings.values, settings.location) is not None
        return not is_quantized and all(one % size == 0 for one in sizes)

    def load(self, config: ModelConfig, reader: HeadReader) -> Module:
        """See ``ModuleForm.load``."""
        weights, hidden = reader.weights, config.hidden_size
        settings = Settings(config.extra, weights.source.location)

        def norm(name: str) -> RMSNorm:
            return load_norm(config, weights, name)

        rotary = no_rotation(reader.max_positions, weights.device)
        return Module(
            embedding_norm=norm(f"{FIRST}.enorm"),
            hidden_norm=norm(f"{FIRST}.hnorm"),
            fc=weights.linear(2 * hidden, Part(self.fusion, hidden)),
            layer=DecoderLayer(
                norm(f"{FIRST}.norm"),
                load_attention(config, weights, f"{FIRST}.mixer", rotary),
                norm(f"{LAST}.norm"),
                load_squared_relu_moe(_experts(settings), weights, f"{LAST}.mixer", hidden),
            ),
            norm=norm(f"{LAST}.final_layernorm"),
        )


def _experts(settings: Settings) -> Settings:
    """The config with the sizes of the module's experts."""
    blocks = block_settings(settings, "mtp_")
    own = blocks[1] if blocks else settings
    count = own.get("mtp_n_routed_experts", own.get("n_routed_experts"))
    return replace(own, values={**own.values, "n_routed_experts": count})
