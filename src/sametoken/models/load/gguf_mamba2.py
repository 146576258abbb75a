"""GGUF's architectures with layers of Mamba-2, as Hugging Face's classes.

What llama.cpp's converter writes (``conversion/`` there). A vector by head may have a second axis
of one element, and a norm an axis for its groups. Layers are told by counts that are 0: key-value
heads where there is no attention, features where there is no MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from sametoken.errors import CheckpointError
from sametoken.models.base import HOLDS_FACTORS
from sametoken.models.layer_types import FULL, LINEAR
from sametoken.models.load.gguf_architecture import EACH, Architecture, gated
from sametoken.models.load.gguf_file import GGUFTensor
from sametoken.models.load.gguf_settings import (
    CORRECTION,
    FEED_FORWARD,
    KV_HEADS,
    SIGMOID,
    SSM_FEATURES,
    SSM_GROUPS,
    SSM_HEADS,
    SSM_KERNEL,
    SSM_STATE,
    layers_and_modules,
    value_size,
)
from sametoken.models.load.settings import COMPARE, Settings

FINETUNED = "rope.scaling.finetuned"
#: Keys of Granite's factors.
FACTORS: Mapping[str, str] = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_SIZES: Mapping[str, str] = {
    "mamba_n_heads": SSM_HEADS,
    "mamba_n_groups": SSM_GROUPS,
    "mamba_d_state": SSM_STATE,
    "mamba_d_conv": SSM_KERNEL,
}


def _names(block: str) -> dict[str, str]:
    """Those of a block of Mamba-2."""
    return {
        "ssm_in": f"{block}.in_proj",
        "ssm_conv1d": f"{block}.conv1d",
        "ssm_dt.bias": f"{block}.dt_bias",
        "ssm_a": f"{block}.A_log",
        "ssm_d": f"{block}.D",
        "ssm_norm": f"{block}.norm",
        "ssm_out": f"{block}.out_proj",
    }


def _has(tensors: Mapping[str, GGUFTensor], ending: str) -> bool:
    """Whether a layer has a tensor."""
    return any(name.endswith(ending) for name in tensors)


def _by_layer(settings: Settings, key: str) -> list[int]:
    """A count for each layer of the model, 0 where there is none.

    Raises:
        CheckpointError: there are too few, or something else.
    """
    given, number = settings.get(key, 0), layers_and_modules(settings)["num_hidden_layers"]
    counts = given if isinstance(given, list) else [given] * number
    if len(counts) < number or not all(type(one) is int and one >= 0 for one in counts):
        raise CheckpointError(
            f"{settings.location}: {settings.prefix}{key}={short(given)} is no count for each of "
            f"{number} layers",
            COMPARE,
        )
    return counts[:number]


def _of_bamba_s_keys(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """Sizes and biases of Mamba-2."""
    return {
        "mamba_d_head": value_size(settings),
        "mamba_expand": settings.integer(SSM_FEATURES) // settings.integer("embedding_length"),
        "mamba_conv_bias": _has(tensors, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(tensors, "ssm_in.bias"),
    }


def _bamba(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    heads = _by_layer(settings, KV_HEADS)
    return _of_bamba_s_keys(settings, tensors) | {
        "attn_layer_indices": [index for index, count in enumerate(heads) if count],
        "attn_rotary_emb": settings.get("rope.dimension_count"),
    }


def _granite(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """Experts, if any, have the features of a layer; the shared MLP has its own, or has them."""
    features = settings.get(FEED_FORWARD)
    return _of_bamba_s_keys(settings, tensors) | {
        "layer_types": [FULL if count else LINEAR for count in _by_layer(settings, KV_HEADS)],
        "num_local_experts": settings.get("expert_count", 0),
        "num_experts_per_tok": settings.get("expert_used_count"),
        "shared_intermediate_size": settings.get("expert_shared_feed_forward_length") or features,
    }


def _falcon(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """The weights of files are multiplied already, so all factors are 1."""
    return _of_bamba_s_keys(settings, tensors) | {
        "mamba_d_ssm": settings.integer(SSM_FEATURES),
        "mamba_rms_norm": _has(tensors, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": _has(tensors, "ssm_out.bias"),
    }


def _nemotron(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    def kind(index: int, heads: int, features: int) -> str:
        if heads:
            return FULL
        is_sparse = f"blk.{index}.ffn_gate_inp.weight" in tensors
        return LINEAR if not features else "moe" if is_sparse else "mlp"

    both = zip(_by_layer(settings, KV_HEADS), _by_layer(settings, FEED_FORWARD), strict=True)
    return layers_and_modules(settings) | {
        "layer_types": [kind(index, *counts) for index, counts in enumerate(both)],
        "mamba_head_dim": value_size(settings),
        "use_conv_bias": _has(tensors, "ssm_conv1d.bias"),
        "use_bias": _has(tensors, "ssm_in.bias"),
    }


_BAMBA = Architecture(
    "BambaForCausalLM",
    names={
        **_names("mamba"),
        "output_norm": "model.final_layernorm",
        "ffn_norm": "pre_ff_layernorm",
        **gated("ffn_{}", "feed_forward"),
    },
    interleaved=True,
    missing_axes={"conv1d.weight": 1},
    sizes=_SIZES,
    derived=_bamba,
    by_layer=(KV_HEADS,),
)
_NEMOTRON = Architecture(
    "NemotronHForCausalLM",
    names={
        **_names("mixer"),
        "token_embd": "model.embeddings",
        "output_norm": "model.norm_f",
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        CORRECTION: "mixer.gate.e_score_correction_bias",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
        "ffn_up_exps": f"mixer.experts.{EACH}.up_proj",
        "ffn_down_exps": f"mixer.experts.{EACH}.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    },
    interleaved=True,
    rotates=False,
    missing_axes={"conv1d.weight": 1},
    sizes={
        "mamba_num_heads": SSM_HEADS,
        "n_groups": SSM_GROUPS,
        "ssm_state_size": SSM_STATE,
        "conv_kernel": SSM_KERNEL,
    },
    keys={
        "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "n_shared_experts": "expert_shared_count",
        "moe_latent_size": "moe_latent_size",
        "norm_topk_prob": "expert_weights_norm",
        "routed_scaling_factor": "expert_weights_scale",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    },
    derived=_nemotron,
    reads=("nextn_predict_layers",),
    only={"expert_gating_func": (SIGMOID,)},
    by_layer=(KV_HEADS, FEED_FORWARD),
)
MAMBA2: Mapping[str, Architecture] = {
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        names={
            **_names("mamba"),
            **gated("ffn_{}", "shared_mlp"),
            **gated("ffn_{}_shexp", "shared_mlp"),
            **dict.fromkeys(("ffn_down", "ffn_down_shexp"), "shared_mlp.output_linear"),
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            **gated("ffn_{}_exps", f"block_sparse_moe.experts.{EACH}"),
        },
        interleaved=True,
        missing_axes={"conv1d.weight": 1},
        sizes=_SIZES,
        keys=FACTORS,
        derived=_granite,
        reads=("expert_count", "expert_shared_feed_forward_length"),
        by_layer=(KV_HEADS,),
        forms={FINETUNED: _BAMBA},
    ),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM",
        names={
            **_names("mamba"),
            "output_norm": "model.final_layernorm",
            # Files have its weight without the ending.
            "ffn_norm": "pre_ff_layernorm.weight",
            **gated("ffn_{}", "feed_forward"),
        },
        missing_axes={"conv1d.weight": 1},
        sizes=_SIZES,
        values={HOLDS_FACTORS: True},
        derived=_falcon,
    ),
}
