"""Small random models of every family that follows a class of transformers."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import torch
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BambaConfig,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    FalconH1Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    SeedOssConfig,
    SmolLM3Config,
)

VOCAB = 64
#: Sizes that two ranks divide.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 1.0, "alpha": 50.0}

#: As gpt-oss has it: the borders of its ramp are not rounded.
OPEN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


KINDS = st.sampled_from(["full_attention", "sliding_attention"])
THREE_LAYERS = [*map(list, product(["full_attention", "sliding_attention"], repeat=3))]
BOTH = [False, True]


def one_of_each(**values):
    """Draws a value of each of these."""
    return lambda draw: {name: draw(st.sampled_from(choices)) for name, choices in values.items()}


def qwen2(draw) -> dict:
    window = draw(st.sampled_from([None, 2, 5, 36]))
    if window is None:
        return {}
    layers = {"max_window_layers": draw(st.integers(0, 3))}
    return {"use_sliding_window": True, "sliding_window": window} | layers


QWEN2_MOE = EXPERTS | {"shared_expert_intermediate_size": 20}
ERNIE_MOE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 16}


def qwen3_moe(draw) -> dict:
    return (
        EXPERTS
        | {
            "head_dim": draw(st.sampled_from([8, 16])),
            "decoder_sparse_step": draw(st.sampled_from([1, 2])),
            "mlp_only_layers": draw(st.sampled_from([[], [0], [1, 2]])),
            "norm_topk_prob": draw(st.booleans()),
            "num_experts_per_tok": draw(st.integers(1, 6)),
            "attention_bias": draw(st.booleans()),
        }
        | qwen2(draw)
    )


def phi3(draw) -> dict:
    partial = draw(st.sampled_from([0.5, 0.75, 1.0]))
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": partial}
    if draw(st.booleans()):
        # The prompt is longer than the original positions, as requests may be.
        factors = {
            "short_factor": [1.0] * int(4 * partial),
            "long_factor": [1.7] * int(4 * partial),
        }
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": 16} | factors
    return {
        "sliding_window": draw(st.sampled_from([None, 5])),
        "rope_parameters": rope,
        "original_max_position_embeddings": 16,
    }


granite = one_of_each(
    attention_bias=BOTH,
    embedding_multiplier=[1.0, 3.0],
    attention_multiplier=[0.5, 0.1],
    residual_multiplier=[1.0, 0.3],
    logits_scaling=[1.0, 4.0],
)


def gemma3(draw) -> dict:
    scaled = st.sampled_from([{}, {"rope_type": "linear", "factor": 2.5}])
    full = {"rope_type": "default", "rope_theta": 1000.0} | draw(scaled)
    local = {"rope_type": "default", "rope_theta": draw(st.sampled_from([10.0, 100.0]))}
    return {
        "head_dim": draw(st.sampled_from([8, 16])),
        "sliding_window": draw(st.sampled_from([2, 5, 36])),
        "layer_types": draw(st.sampled_from(THREE_LAYERS)),
        "query_pre_attn_scalar": draw(st.sampled_from([8, 30])),
        "final_logit_softcapping": draw(st.sampled_from([None, 3.0])),
        "attention_bias": draw(st.booleans()),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


#: A window; values made of keys, without a window; another layer's KV.
GEMMA_4 = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "num_key_value_heads": 4,
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 6,
}


def gemma4(draw) -> dict:
    # Layers that share another's KV come after one of each kind.
    types = ["full_attention", "sliding_attention", draw(KINDS), draw(KINDS), "full_attention"]
    partial = {
        "rope_type": "proportional",
        "partial_rotary_factor": draw(st.sampled_from([0.25, 1.0])),
    }
    experts = EXPERTS if draw(st.booleans()) else {}
    num_shared = draw(st.sampled_from([0, 1, 3]))
    # transformers cannot share KV without embeddings by layer.
    widths = [8] if num_shared else [0, 8]
    return GEMMA_4 | {
        "num_hidden_layers": 5,
        "layer_types": types,
        "global_head_dim": draw(st.sampled_from([16, 32])),
        "attention_k_eq_v": draw(st.booleans()),
        "num_global_key_value_heads": draw(st.sampled_from([None, 1, 2])),
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": draw(st.booleans()),
        "hidden_size_per_layer_input": draw(st.sampled_from(widths)),
        "sliding_window": draw(st.sampled_from([2, 5, 36])),
        "final_logit_softcapping": draw(st.sampled_from([None, 5.0])),
        "use_bidirectional_attention": draw(st.sampled_from([None, "vision"])),
        "attention_bias": draw(st.booleans()),
        "enable_moe_block": bool(experts),
        "num_experts": experts.get("num_experts"),
        "top_k_experts": experts.get("num_experts_per_tok"),
        "moe_intermediate_size": experts.get("moe_intermediate_size"),
        "rope_parameters": {
            "full_attention": partial | {"rope_theta": 1e3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }


GLM = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
}


def glm4_moe(draw) -> dict:
    groups = draw(st.sampled_from([1, 2, 3]))
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    return GLM | {
        "head_dim": draw(st.sampled_from([8, 16])),
        "n_group": groups,
        "topk_group": draw(st.integers(1, groups)),
        "first_k_dense_replace": draw(st.integers(0, 3)),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "attention_bias": draw(st.booleans()),
        "use_qk_norm": draw(st.booleans()),
        "rope_parameters": rope,
    }


gpt_oss = one_of_each(
    head_dim=[8, 16],
    num_local_experts=[2, 5],
    num_experts_per_tok=[1, 2],
    sliding_window=[2, 5, 36],
    layer_types=[None, *THREE_LAYERS],
    swiglu_alpha=[1.702, 0.7],
    swiglu_limit=[0.3, 7.0],
    attention_bias=BOTH,
    rope_parameters=[
        OPEN_YARN | {"truncate": truncate, "factor": factor}
        for truncate in BOTH
        for factor in (2.0, 8.0)
    ],
)

#: Mamba-2 in two groups, which two ranks divide.
MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
#: With attention, without which transformers has no cache of such layers.
HYBRID_TYPES = ["linear_attention", "full_attention", "linear_attention"]


def mamba(draw) -> dict:
    groups = draw(st.sampled_from([1, 2]))
    return {
        "mamba_n_heads": groups * draw(st.sampled_from([1, 2])),
        "mamba_n_groups": groups,
        "mamba_d_state": draw(st.sampled_from([5, 8])),
        "mamba_d_conv": draw(st.sampled_from([2, 4])),
        "mamba_expand": draw(st.sampled_from([1, 2])),
        "mamba_chunk_size": 8,
        "mamba_conv_bias": draw(st.booleans()),
        "mamba_proj_bias": draw(st.booleans()),
        "time_step_limit": draw(st.sampled_from([(0.0, float("inf")), (0.3, 0.9)])),
    }


def granite_hybrid(draw) -> dict:
    others = ["linear_attention", draw(st.sampled_from(HYBRID_TYPES))]
    types = draw(st.permutations(["full_attention", *others]))
    return (
        granite(draw)
        | mamba(draw)
        | {
            "layer_types": types,
            "position_embedding_type": draw(st.sampled_from([None, "nope", "rope"])),
            "num_local_experts": draw(st.sampled_from([0, 5])),
            "num_experts_per_tok": draw(st.integers(1, 5)),
            "shared_intermediate_size": draw(st.sampled_from([20, 64])),
            "residual_multiplier": draw(st.sampled_from([0.3, 0.7])),
        }
    )


def bamba(draw) -> dict:
    indices = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
    return mamba(draw) | {"attn_layer_indices": indices, "attention_bias": draw(st.booleans())}


def falcon_h1(draw) -> dict:
    own, factor = mamba(draw), st.sampled_from([1.0, 0.4, 1.6])
    del own["mamba_expand"]
    factors = ("lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return (
        own
        | {f"{name}_multiplier": draw(factor) for name in factors}
        | {
            "head_dim": draw(st.sampled_from([8, 16])),
            "mamba_d_ssm": draw(st.sampled_from([16, 64, None])),
            "mamba_rms_norm": draw(st.booleans()),
            "mamba_norm_before_gate": False,
            "projectors_bias": draw(st.booleans()),
            "attention_bias": draw(st.booleans()),
            "mlp_multipliers": [draw(factor), draw(factor)],
            "ssm_multipliers": [draw(factor) for _ in range(5)],
        }
    )


def smollm3(draw) -> dict:
    window = draw(st.sampled_from([None, 2, 5]))
    return {
        "no_rope_layers": draw(st.sampled_from([None, [0, 1, 0], [1, 1, 1, 1]])),
        "no_rope_layer_interval": draw(st.sampled_from([2, 4])),
        "attention_bias": draw(st.booleans()),
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


def olmo3(draw) -> dict:
    base = draw(st.sampled_from([100.0, 10_000.0]))
    yarn = OPEN_YARN | {"truncate": True, "attention_factor": 1.2}
    full = draw(st.sampled_from([{"rope_type": "default"}, yarn]))
    return {
        "num_hidden_layers": 4,
        "sliding_window": draw(st.sampled_from([2, 5, 36])),
        "layer_types": draw(st.sampled_from([None, [draw(KINDS) for _ in range(4)]])),
        "attention_bias": draw(st.booleans()),
        "rope_parameters": {
            "full_attention": full | {"rope_theta": 1_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        },
    }


def qwen2_moe(draw) -> dict:
    return (
        qwen2(draw)
        | QWEN2_MOE
        | {
            "qkv_bias": draw(st.booleans()),
            "decoder_sparse_step": draw(st.sampled_from([1, 2])),
            "mlp_only_layers": draw(st.sampled_from([[], [0]])),
            "norm_topk_prob": draw(st.booleans()),
            "num_experts_per_tok": draw(st.integers(1, 6)),
        }
    )


#: By name: the config class, what a drawn config adds to the sizes, and what the fixed one adds.
FAMILIES = {
    "qwen2": (Qwen2Config, qwen2, {}),
    "ministral": (
        MinistralConfig,
        one_of_each(head_dim=[8, 16], layer_types=THREE_LAYERS, sliding_window=[2, 5, 36]),
        {
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "ministral3": (
        Ministral3Config,
        one_of_each(
            head_dim=[8, 16],
            sliding_window=[None, 5],
            rope_parameters=[YARN | {"llama_4_scaling_beta": beta} for beta in (0.1, 0.7)],
        ),
        {"head_dim": 16, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.7}},
    ),
    "phi3": (
        Phi3Config,
        phi3,
        {
            "sliding_window": 6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "olmo2": (Olmo2Config, one_of_each(attention_bias=BOTH), {}),
    "granite": (
        GraniteConfig,
        granite,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    "granite_hybrid": (
        GraniteMoeHybridConfig,
        granite_hybrid,
        MAMBA
        | {
            "layer_types": HYBRID_TYPES,
            "num_local_experts": 5,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    "bamba": (BambaConfig, bamba, MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": (
        FalconH1Config,
        falcon_h1,
        MAMBA
        | {
            "mamba_d_ssm": 64,
            "embedding_multiplier": 3.0,
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.5,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
            "mlp_multipliers": [0.8, 0.7],
            "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8],
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        gemma3,
        {
            "head_dim": 16,
            "sliding_window": 6,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4": (
        Gemma4TextConfig,
        gemma4,
        GEMMA_4
        | {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "final_logit_softcapping": 5.0,
        },
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        glm4_moe,
        GLM | {"head_dim": 16, "n_group": 2, "use_qk_norm": True, "attention_bias": True},
    ),
    "gpt_oss": (
        GptOssConfig,
        gpt_oss,
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "swiglu_limit": 0.5,
            "rope_parameters": OPEN_YARN,
        },
    ),
    "qwen3_moe": (Qwen3MoeConfig, qwen3_moe, EXPERTS | {"head_dim": 16, "mlp_only_layers": [0]}),
    "smollm3": (SmolLM3Config, smollm3, {"no_rope_layer_interval": 2}),
    "olmo3": (Olmo3Config, olmo3, {"num_hidden_layers": 4, "sliding_window": 6}),
    "mixtral": (
        MixtralConfig,
        one_of_each(
            head_dim=[None, 16],
            num_local_experts=[2, 5],
            num_experts_per_tok=[1, 2],
            sliding_window=[None, 2, 5],
        ),
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6},
    ),
    "seed_oss": (
        SeedOssConfig,
        one_of_each(head_dim=[8, 16], attention_bias=BOTH, attention_out_bias=BOTH),
        {"head_dim": 16, "attention_out_bias": True},
    ),
    "minimax_m2": (
        MiniMaxM2Config,
        one_of_each(
            head_dim=[8, 16],
            rotary_dim=[4, 8],
            num_local_experts=[2, 5],
            num_experts_per_tok=[1, 2],
        ),
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (Qwen2MoeConfig, qwen2_moe, QWEN2_MOE | {"mlp_only_layers": [0]}),
    "hunyuan_dense": (
        HunYuanDenseV1Config,
        one_of_each(head_dim=[8, 16], attention_bias=BOTH, rope_parameters=[ALPHA, YARN]),
        {"head_dim": 16},
    ),
    "ernie4_5": (Ernie4_5Config, one_of_each(head_dim=[None, 16]), {"head_dim": 16}),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig,
        one_of_each(
            moe_num_experts=[6],
            moe_intermediate_size=[16],
            moe_k=range(1, 7),
            moe_num_shared_experts=[0, 1, 2],
            moe_layer_start_index=[0, 1, 2],
            moe_layer_end_index=[-1, 1],
            moe_layer_interval=[1, 2],
        ),
        ERNIE_MOE,
    ),
}

_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 8,
}
_MISTRAL = SIZES | {"head_dim": 16, "sliding_window": None}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_GEMMA_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
_QWEN_TEXT = SIZES | {"bos_token_id": 1, "rope_parameters": _MROPE}
#: Configs of models that also see images, by their text decoder.
SEEING = {
    "mistral": lambda: Mistral3Config(
        text_config=_MISTRAL | {"model_type": "mistral"},
        vision_config=_PIXTRAL,
        tie_word_embeddings=False,
    ),
    "ministral3": lambda: Mistral3Config(
        text_config=_MISTRAL
        | {"model_type": "ministral3", "rope_parameters": YARN | {"llama_4_scaling_beta": 0.7}},
        vision_config=_PIXTRAL,
        tie_word_embeddings=True,
    ),
    "gemma3": lambda: Gemma3Config(
        text_config=SIZES | {"head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 3},
        vision_config=_GEMMA_VISION | {"image_size": 28},
        mm_tokens_per_image=4,
    ),
    "gemma4": lambda: Gemma4Config(
        text_config=SIZES | GEMMA_4 | {"pad_token_id": 0},
        vision_config=_GEMMA_VISION | {"position_embedding_size": 16, "head_dim": 8},
        audio_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [4, 4],
            "output_proj_dims": 16,
        },
    ),
    "gemma4_unified": lambda: Gemma4UnifiedConfig(
        text_config=SIZES
        | {key: value for key, value in GEMMA_4.items() if not key.endswith("per_layer_input")}
        | {"pad_token_id": 0, "num_kv_shared_layers": 0},
        vision_config={"mm_embed_dim": 16, "output_proj_dims": 16, "mm_posemb_size": 16},
        audio_config={"audio_embed_dim": 16},
    ),
    "qwen2_5": lambda: Qwen2_5_VLConfig(text_config=_QWEN_TEXT, vision_config=_QWEN_VISION),
    "qwen3": lambda: Qwen3VLConfig(
        text_config=_QWEN_TEXT | {"head_dim": 16},
        vision_config=_QWEN_VISION | {"deepstack_visual_indexes": []},
    ),
}


def drawn_config(draw, family: str):
    """A random config of the family."""
    config_class, own, _ = FAMILIES[family]
    changes = {
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": draw(st.sampled_from([100.0, 10_000.0])),
        },
    }
    return config_class(**SIZES | changes | own(draw))


def fixed_config(family: str, **changes):
    config_class, _, own = FAMILIES[family]
    return config_class(**SIZES | own | changes)


#: One-dimensional parameters that are factors; others are addends.
_AROUND_ONE = (
    "norm.weight",
    "norm_1.weight",
    "norm_2.weight",
    "layer_scalar",
    "router.scale",
    "per_expert_scale",
)


#: Buffers that follow from the config.
_DERIVED = ("inv_freq", "mup_vector")


def random_model(config, seed: int):
    """transformers' model, with every parameter away from where it begins."""
    torch.manual_seed(seed)
    sees = hasattr(config, "vision_config")
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(_DERIVED) or not parameter.is_floating_point():
            continue
        if parameter.ndim == 1:
            centre = 1.0 if name.endswith(_AROUND_ONE) else 0.0
            torch.nn.init.normal_(parameter, mean=centre, std=0.3)
        elif parameter.ndim > 1:
            # Large enough that attention is far from uniform and logits far from equal.
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def write_family(directory: Path, family: str, seed: int = 0, **changes) -> Path:
    random_model(fixed_config(family, **changes), seed).save_pretrained(directory)
    return directory
