"""GGUF's architectures as Hugging Face's classes.

What llama.cpp's converter writes (``conversion/`` there) and what its loaders imply (``src/models``
there). Keys are given without the architecture's prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from reprlib import repr as short
from typing import Any

from sametoken.errors import UnsupportedError
from sametoken.models.layer_types import FULL, SLIDING, full_every
from sametoken.models.load.gguf_architecture import EACH, Architecture
from sametoken.models.load.settings import ANOTHER, COMPARE, MAX_LAYERS, Settings, require_values

WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"
#: Factors on cos and sin of a scaled rope, by the converters of the time.
ATTENTION_FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
_QUERY_GROWTH, _LOG_MULTIPLIER = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3


def _windows(settings: Settings, every: int) -> dict[str, Any]:
    """The window, and the layers that have it: all but each ``every``-th, if no pattern is given.

    Raises:
        UnsupportedError: the pattern is neither a period nor one switch for each layer.
    """
    num_layers = settings.integer("block_count", most=MAX_LAYERS)
    if not settings.get(WINDOW):
        return {"sliding_window": None, "layer_types": [FULL] * num_layers}
    pattern = settings.get(_PATTERN, every)
    if isinstance(pattern, list) and set(pattern) <= {False, True}:
        types = [SLIDING if has_window else FULL for has_window in pattern]
    elif isinstance(pattern, int) and pattern > 0:
        types = full_every(pattern, num_layers)
    else:
        raise UnsupportedError(
            f"{settings.location}: {settings.prefix}{_PATTERN}={short(pattern)} is not supported",
            COMPARE,
        )
    return {"sliding_window": settings.positions(WINDOW), "layer_types": types}


def _gemma3(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    """Windows in five layers of six; only the model of 62 layers has a scale of its own."""
    hidden, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    head_dim = settings.integer("attention.key_length", max(hidden // heads, 1))
    is_27b = settings.get("block_count") == 62
    scale = {"query_pre_attn_scalar": hidden // heads if is_27b else head_dim}
    return scale | _windows(settings, 6)


def _gpt_oss(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    return _windows(settings, 2)


def _open_yarn(settings: Settings) -> dict[str, Any]:
    """The borders of gpt-oss's ramp are not rounded."""
    return {"truncate": False}


def _olmo3(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    return _windows(settings, 4)


def _phi3(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    """Of Phi-4, which has no window, the converter writes one of 0."""
    return {"sliding_window": settings.get(WINDOW) or None}


def _mistral3(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    """Ministral 3 where queries grow with their position, else Mistral Small 3."""
    name = "Ministral3ForCausalLM" if settings.get(_QUERY_GROWTH) else "MistralForCausalLM"
    return {"architectures": [name], "sliding_window": None}


def _ministral_yarn(settings: Settings) -> dict[str, Any]:
    mscale = settings.get(_LOG_MULTIPLIER)
    growth = {"llama_4_scaling_beta": settings.get(_QUERY_GROWTH)}
    return growth | ({"mscale": mscale, "mscale_all_dim": mscale} if mscale else {})


def _deepseek2(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    """V3 behind a sigmoid router, else V2.

    Sizes of a head are those of the model, or in newer files, where ``key_length`` is that of a
    latent, have keys of their own. Files without groups run without them.
    """
    is_new = settings.get("attention.key_length_mla")
    ending = "_mla" if is_new else ""
    key, value = (settings.integer(f"attention.{one}_length{ending}") for one in ("key", "value"))
    rope, groups = settings.integer("rope.dimension_count"), settings.get("expert_group_count", 1)
    is_v3 = settings.get("expert_gating_func") == _SIGMOID
    return {
        "architectures": [f"Deepseek{'V3' if is_v3 else 'V2'}ForCausalLM"],
        "num_key_value_heads": settings.integer("attention.head_count"),
        "q_lora_rank": settings.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "n_group": groups,
        "topk_group": settings.get("expert_group_used_count", groups),
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
        "norm_topk_prob": settings.switch("expert_weights_norm"),
        "routed_scaling_factor": settings.get("expert_weights_scale", 1.0),
        **_layers(settings),
    }


def _deepseek_yarn(settings: Settings) -> dict[str, Any]:
    """The multiplier is a tenth of ``mscale_all_dim``, which llama.cpp takes ``mscale`` to be."""
    tenth = settings.get(_LOG_MULTIPLIER)
    mscale = round(10 * settings.number(_LOG_MULTIPLIER), 6) if tenth else None
    return {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {}


def _seed_oss(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    return {"attention_out_bias": "blk.0.attn_output.bias" in tensors}


def _layers(settings: Settings) -> dict[str, Any]:
    """``block_count`` counts the layers of a NextN module too."""
    key = "nextn_predict_layers"
    num_modules = settings.integer(key) if settings.get(key) else 0
    num_layers = settings.integer("block_count", most=MAX_LAYERS) - num_modules
    return {"num_hidden_layers": num_layers, "num_nextn_predict_layers": num_modules}


def _glm4_moe(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors, **_layers(settings)}


_ROUTED: Mapping[str, str] = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_OF_DEEPSEEK: Mapping[str, str] = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_OLMO3 = Architecture(
    "Olmo3ForCausalLM",
    derived=_olmo3,
    reads=(WINDOW, _PATTERN, *ATTENTION_FACTORS),
    # Without a name of their own in config.json, windows rotate by it.
    keys={"rope_theta": "rope.freq_base_swa"},
)
_NAMES_OF_NEXTN: Mapping[str, str] = {
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
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
_ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", interleaved=True, forms={"expert_count": _MIXTRAL}),
    "mistral3": Architecture(
        "Ministral3ForCausalLM",
        interleaved=True,
        derived=_mistral3,
        reads=(_QUERY_GROWTH, _LOG_MULTIPLIER),
        scaled_rope=_ministral_yarn,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        sizes=_ROUTED,
        # llama.cpp normalises the weights of all files.
        values={"norm_topk_prob": True},
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        names={
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        of_one_row=("shared_expert_gate.weight",),
        sizes={**_ROUTED, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        names={"ffn_norm": "pre_feedforward_layernorm"},
        added_to_norms=1.0,
        keys={
            "final_logit_softcapping": "final_logit_softcapping",
            "rope_local_base_freq": "rope.freq_base_swa",
        },
        derived=_gemma3,
        reads=(WINDOW, _PATTERN),
        ends=("<end_of_turn>",),
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
        derived=_gpt_oss,
        reads=(_PATTERN,),
        only={"expert_gating_func": (_SOFTMAX, _SOFTMAX_OF_CHOSEN)},
        scaled_rope=_open_yarn,
        ends=("<|return|>", "<|call|>", "<|endoftext|>"),
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys={"original_max_position_embeddings": "rope.scaling.original_context_length"},
        derived=_phi3,
        reads=(WINDOW, *ATTENTION_FACTORS),
        ends=("<|end|>", "<|endoftext|>"),
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        interleaved=True,
        keys={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        only={"rope.scaling.finetuned": (True,)},
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", forms={WINDOW: _OLMO3}),
    "smollm3": Architecture("SmolLM3ForCausalLM", interleaved=True),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        names={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias", **_NAMES_OF_NEXTN},
        sizes=_OF_DEEPSEEK,
        keys={
            "n_shared_experts": "expert_shared_count",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
            "norm_topk_prob": "expert_weights_norm",
            "routed_scaling_factor": "expert_weights_scale",
            "first_k_dense_replace": "leading_dense_block_count",
        },
        derived=_glm4_moe,
        reads=("nextn_predict_layers",),
        only={"expert_gating_func": (_SIGMOID,)},
        ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
    ),
    "deepseek2": Architecture(
        "DeepseekV3ForCausalLM",
        names={
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            **_NAMES_OF_NEXTN,
        },
        sizes={**_OF_DEEPSEEK, "kv_lora_rank": "attention.kv_lora_rank"},
        keys={
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
        },
        derived=_deepseek2,
        reads=(
            "expert_group_count",
            "expert_weights_scale",
            "nextn_predict_layers",
            _LOG_MULTIPLIER,
        ),
        only={"expert_gating_func": (_SOFTMAX, _SIGMOID)},
        scaled_rope=_deepseek_yarn,
        head_size="rope.dimension_count",
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        names={
            **_NAMES_OF_MIXTRAL,
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
        sizes={
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        only={"expert_gating_func": (_SIGMOID,)},
        ends=("[e~[",),
    ),
    "seed_oss": Architecture("SeedOssForCausalLM", derived=_seed_oss),
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
        names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
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
    "expert_gating_func": (_SOFTMAX,),
}
#: For operations that an architecture does not have; a file that sets one is refused by name.
_REFUSED = (
    WINDOW,
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.output_scale",
    "attention.shared_kv_layers",
    _QUERY_GROWTH,
    "expert_count",
    "expert_group_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_weights_scale",
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
    _LOG_MULTIPLIER,
    *ATTENTION_FACTORS,
)


def require_architecture(name: str, location: object) -> Architecture:
    """The architecture of a name; any other is refused.

    Args:
        name: in GGUF's words.
        location: the file or its repository, for messages.

    Raises:
        UnsupportedError: it is not implemented.
    """
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{location} has GGUF architecture {short(name)}", f"known: {', '.join(_ARCHITECTURES)}"
        )
    return _ARCHITECTURES[name]


def form_of(name: str, settings: Settings) -> Architecture:
    """The architecture of a file, with its form of settings.

    Args:
        name: in GGUF's words.
        settings: the file's, by keys of the architecture.

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
    require_values(settings, {**_ONLY, **architecture.only})
    return architecture
