"""GGUF's architectures as Hugging Face's classes.

What llama.cpp's converter writes (``conversion/`` there) and what its loaders imply (``src/models``
there). Keys are given without the architecture's prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from reprlib import repr as short

from sametoken.errors import UnsupportedError
from sametoken.models.load import gguf_settings
from sametoken.models.load.gguf_architecture import (
    EACH,
    GATE_UP,
    Architecture,
    ModuleNames,
    gated,
)
from sametoken.models.load.gguf_mamba2 import FACTORS, FINETUNED, MAMBA2
from sametoken.models.load.gguf_settings import (
    ATTENTION_FACTORS,
    CORRECTION,
    FEED_FORWARD,
    KV_HEADS,
    LOG_MULTIPLIER,
    PATTERN,
    QUERY_GROWTH,
    SIGMOID,
    SIZE_IN_WINDOWS,
    SOFTMAX,
    SOFTMAX_OF_CHOSEN,
    SSM_GROUPS,
    SSM_HEADS,
    SSM_KERNEL,
    SSM_STATE,
    WINDOW,
)
from sametoken.models.load.settings import ANOTHER, Settings, require_values

_ROUTED: Mapping[str, str] = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_ROUTED_AND_SHARED: Mapping[str, str] = {
    **_ROUTED,
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_OF_LINEAR: Mapping[str, str] = {
    "linear_conv_kernel_dim": SSM_KERNEL,
    "linear_key_head_dim": SSM_STATE,
    "linear_num_key_heads": SSM_GROUPS,
    "linear_num_value_heads": SSM_HEADS,
}
_OF_DEEPSEEK: Mapping[str, str] = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_OLMO3 = Architecture(
    "Olmo3ForCausalLM",
    derived=partial(gguf_settings.windows, every=4),
    reads=(WINDOW, PATTERN, *ATTENTION_FACTORS),
    # Without a name of their own in config.json, windows rotate by it.
    keys={"rope_theta": "rope.freq_base_swa"},
)
_NAMES_OF_LINEAR: Mapping[str, str] = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_NAMES_OF_SHARED: Mapping[str, str] = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **gated("ffn_{}_shexp", "mlp.shared_expert"),
}
_NAMES_OF_MIXTRAL: Mapping[str, str] = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EACH}.w1",
    "ffn_up_exps": f"block_sparse_moe.experts.{EACH}.w3",
    "ffn_down_exps": f"block_sparse_moe.experts.{EACH}.w2",
}
_MIXTRAL = Architecture(
    "MixtralForCausalLM",
    names=_NAMES_OF_MIXTRAL,
    interleaved=True,
    sizes={"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
)
_NEXTN = ModuleNames(
    "model.layers.{}.",
    {
        "nextn.eh_proj": "model.layers.{}.eh_proj",
        "nextn.enorm": "model.layers.{}.enorm",
        "nextn.hnorm": "model.layers.{}.hnorm",
        "nextn.embed_tokens": "model.layers.{}.embed_tokens",
        "nextn.shared_head_head": "model.layers.{}.shared_head.head",
        "nextn.shared_head_norm": "model.layers.{}.shared_head.norm",
    },
)
_MTP_OF_QWEN = ModuleNames(
    "mtp.layers.0.",
    {
        "nextn.eh_proj": "mtp.fc",
        "nextn.enorm": "mtp.pre_fc_norm_embedding",
        "nextn.hnorm": "mtp.pre_fc_norm_hidden",
        "nextn.shared_head_norm": "mtp.norm",
    },
)
_QWEN3_NEXT = Architecture(
    "Qwen3NextForCausalLM",
    names={**_NAMES_OF_LINEAR, **_NAMES_OF_SHARED},
    added_to_norms=1.0,
    module=_MTP_OF_QWEN,
    plain_norms=("ssm_norm.weight",),
    missing_axes={"shared_expert_gate.weight": 0, "linear_attn.conv1d.weight": 1},
    sizes={**_ROUTED_AND_SHARED, **_OF_LINEAR},
    keys={"full_attention_interval": "full_attention_interval"},
    derived=gguf_settings.gated_delta_net,
    reads=("nextn_predict_layers",),
)
_QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    sizes=_ROUTED,
    # llama.cpp normalises the weights of all files.
    values={"norm_topk_prob": True},
)
_ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", interleaved=True, forms={"expert_count": _MIXTRAL}),
    "mistral3": Architecture(
        "Ministral3ForCausalLM",
        interleaved=True,
        derived=gguf_settings.mistral3,
        reads=(QUERY_GROWTH, LOG_MULTIPLIER),
        scaled_rope=gguf_settings.ministral_yarn,
    ),
    # Of text the three positions of a token, which models of images rotate by, are equal.
    **dict.fromkeys(("qwen2", "qwen2vl"), Architecture("Qwen2ForCausalLM")),
    **dict.fromkeys(("qwen3", "qwen3vl"), Architecture("Qwen3ForCausalLM")),
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), _QWEN3_MOE),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        names=_NAMES_OF_SHARED,
        missing_axes={"shared_expert_gate.weight": 0},
        sizes=_ROUTED_AND_SHARED,
    ),
    "qwen3next": _QWEN3_NEXT,
    "qwen35": replace(
        _QWEN3_NEXT, name="Qwen3_5ForCausalLM", sizes=_OF_LINEAR, turns=gguf_settings.value_heads
    ),
    "qwen35moe": replace(
        _QWEN3_NEXT, name="Qwen3_5MoeForCausalLM", turns=gguf_settings.value_heads
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        names={"ffn_norm": "pre_feedforward_layernorm"},
        added_to_norms=1.0,
        keys={
            "final_logit_softcapping": "final_logit_softcapping",
            "rope_local_base_freq": "rope.freq_base_swa",
        },
        derived=gguf_settings.gemma3,
        reads=(WINDOW, PATTERN),
        ends=("<end_of_turn>",),
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        names={
            "ffn_norm": "pre_feedforward_layernorm",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps": f"experts.{GATE_UP}",
            **gated("ffn_{}_exps", f"experts.{EACH}"),
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        keys={
            "final_logit_softcapping": "final_logit_softcapping",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        derived=gguf_settings.gemma4,
        reads=(WINDOW, PATTERN, "attention.shared_kv_layers", "rope.freq_base_swa"),
        by_layer=(KV_HEADS, FEED_FORWARD),
        head_size=SIZE_IN_WINDOWS,
        ends=("<turn|>", "<eos>", "<|tool_response>"),
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        names={"attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
        sizes={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": WINDOW,
        },
        derived=partial(gguf_settings.windows, every=2),
        reads=(PATTERN,),
        only={"expert_gating_func": (SOFTMAX, SOFTMAX_OF_CHOSEN)},
        scaled_rope=gguf_settings.open_yarn,
        ends=("<|return|>", "<|call|>", "<|endoftext|>"),
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys={"original_max_position_embeddings": "rope.scaling.original_context_length"},
        derived=gguf_settings.phi3,
        reads=(WINDOW, *ATTENTION_FACTORS),
        ends=("<|end|>", "<|endoftext|>"),
    ),
    "granite": Architecture(
        "GraniteForCausalLM", interleaved=True, keys=FACTORS, only={FINETUNED: (True,)}
    ),
    **MAMBA2,
    "olmo2": Architecture("Olmo2ForCausalLM", forms={WINDOW: _OLMO3}),
    "smollm3": Architecture("SmolLM3ForCausalLM", interleaved=True),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        module=_NEXTN,
        names={CORRECTION: "mlp.gate.e_score_correction_bias"},
        sizes=_OF_DEEPSEEK,
        keys={
            "n_shared_experts": "expert_shared_count",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
            "norm_topk_prob": "expert_weights_norm",
            "routed_scaling_factor": "expert_weights_scale",
            "first_k_dense_replace": "leading_dense_block_count",
        },
        derived=gguf_settings.glm4_moe,
        reads=("nextn_predict_layers",),
        only={"expert_gating_func": (SIGMOID,)},
        ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
    ),
    "deepseek2": Architecture(
        "DeepseekV3ForCausalLM",
        module=_NEXTN,
        names={
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            CORRECTION: "mlp.gate.e_score_correction_bias",
        },
        sizes={**_OF_DEEPSEEK, "kv_lora_rank": "attention.kv_lora_rank"},
        keys={
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
        },
        derived=gguf_settings.deepseek2,
        reads=(
            "expert_group_count",
            "expert_weights_scale",
            "nextn_predict_layers",
            LOG_MULTIPLIER,
        ),
        only={"expert_gating_func": (SOFTMAX, SIGMOID)},
        scaled_rope=gguf_settings.deepseek_yarn,
        head_size="rope.dimension_count",
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        names={**_NAMES_OF_MIXTRAL, CORRECTION: "block_sparse_moe.e_score_correction_bias"},
        sizes={
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        only={"expert_gating_func": (SIGMOID,)},
        ends=("[e~[",),
    ),
    "seed_oss": Architecture("SeedOssForCausalLM", derived=gguf_settings.seed_oss),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM",
        names={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        names={CORRECTION: "mlp.moe_statics.e_score_correction_bias"},
        sizes=_OF_DEEPSEEK,
        keys={
            "n_shared_experts": "expert_shared_count",
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
        },
        reads=("expert_shared_feed_forward_length",),
    ),
}

#: Values that mean nothing else, in files of all architectures that do not read them.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (SOFTMAX,),
    "expert_weights_scale": (0.0, 1.0),
}
#: For operations that an architecture does not have; a file that sets one is refused by name.
_REFUSED = (
    WINDOW,
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.output_scale",
    "attention.recurrent_layers",
    "attention.shared_kv_layers",
    QUERY_GROWTH,
    "expert_count",
    "expert_group_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "leading_dense_block_count",
    "nextn_predict_layers",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "router_logit_softcapping",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.alpha",
    "rope.scaling.yarn_ext_factor",
    LOG_MULTIPLIER,
    *ATTENTION_FACTORS,
)


def require_architecture(name: str, location: object) -> Architecture:
    """The architecture of a name in GGUF's words; any other is refused.

    Raises:
        UnsupportedError: it is not implemented.
    """
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{location} has GGUF architecture {short(name)}", f"known: {', '.join(_ARCHITECTURES)}"
        )
    return _ARCHITECTURES[name]


def form_of(name: str, settings: Settings) -> Architecture:
    """The architecture of that name, in the form of a file's settings by its keys.

    Raises:
        UnsupportedError: it is not implemented, or the file sets what it has not.
    """
    architecture = require_architecture(name, settings.location).of(settings)
    for key in _REFUSED:
        if key not in architecture.known and (value := settings.get(key)):
            raise UnsupportedError(
                f"{settings.location} sets {settings.prefix}{key}={short(value)}, "
                "which is not implemented",
                ANOTHER,
            )
    others = {key: values for key, values in _ONLY.items() if key not in architecture.known}
    require_values(settings, {**others, **architecture.only})
    return architecture
