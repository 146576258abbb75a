"""The config.json of every shape that ``drive.py`` runs with random weights.

    python benchmarks/under_load/shapes.py DIR

Sizes are those of the published models named beside each; there are no tokenizers and no weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_BF16 = {"dtype": "bfloat16", "torch_dtype": "bfloat16", "tie_word_embeddings": False}


def _compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, *besides: str
) -> dict:
    """``quantization_config`` of compressed-tensors over every linear but the head and others."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "ignore": ["lm_head", *besides],
            "config_groups": {"group_0": group},
        }
    }


def _float8(strategy: str, dynamic: bool) -> dict[str, Any]:
    bits = {"num_bits": 8, "type": "float", "symmetric": True}
    return bits | {"strategy": strategy, "dynamic": dynamic}


FP8 = _compressed("float-quantized", _float8("channel", False), _float8("token", True))
# RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8's form: a scale per tensor, of activations too
FP8_STATIC = _compressed("float-quantized", _float8("tensor", False), _float8("tensor", False))
_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
W4A16 = _compressed("pack-quantized", _INT4 | {"dynamic": False}, None)
W4A16_MOE = _compressed("pack-quantized", _INT4 | {"dynamic": False}, None, "re:.*mlp.gate$")
_FP4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
}
# RedHatAI/Qwen3-30B-A3B-NVFP4's form; before Blackwell activations stay in 16 bits.
NVFP4_MOE = _compressed(
    "nvfp4-pack-quantized", _FP4 | {"dynamic": False}, _FP4 | {"dynamic": "local"}, "re:.*mlp.gate$"
)

# Qwen/Qwen3-8B
QWEN3_8B = _BF16 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
}
# Qwen/Qwen3-0.6B
QWEN3_06B = QWEN3_8B | {
    "tie_word_embeddings": True,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
# meta-llama/Llama-3.1-8B
LLAMA_8B = QWEN3_8B | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
# Qwen/Qwen3.5-9B; vLLM reads sizes of the image encoder too, which neither engine runs.
QWEN35_9B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "text_config": {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
    "vision_config": {
        "model_type": "qwen3_5",
        "depth": 2,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
# Qwen/Qwen3.5-35B-A3B, and -FP8
QWEN35_MOE = QWEN35_9B | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": QWEN35_9B["text_config"]
    | {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "vision_config": QWEN35_9B["vision_config"]
    | {"model_type": "qwen3_5_moe", "out_hidden_size": 2048},
}
_UNQUANTIZED = (
    "linear_attn.conv1d",
    "linear_attn.in_proj_a",
    "linear_attn.in_proj_b",
    "mlp.gate",
    "mlp.shared_expert_gate",
)
QWEN35_MOE_FP8 = QWEN35_MOE | {
    "quantization_config": _BLOCKS
    | {
        "modules_to_not_convert": [
            f"model.language_model.layers.{layer}.{name}"
            for layer in range(QWEN35_MOE["text_config"]["num_hidden_layers"])
            for name in _UNQUANTIZED
        ]
        + ["lm_head", "mtp.fc", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]
    }
}
# HuggingFaceTB/SmolLM2-135M
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
}
# Qwen/Qwen3-30B-A3B
QWEN3_MOE = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Qwen/Qwen3-8B-FP8 and Qwen/Qwen3-30B-A3B-FP8: a scale per 128 x 128 elements of a weight
FP8_BLOCKS = {"quantization_config": _BLOCKS}
FP8_BLOCKS_MOE = {
    "quantization_config": _BLOCKS
    | {"modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(48)]}
}
# nvidia/Nemotron-3.5-Lightning-30B-A3B: Nano's sizes, and an MTP module
NEMOTRON = _BF16 | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1856,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
    "use_conv_bias": True,
    "use_bias": False,
    "mlp_bias": False,
    "attention_bias": False,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}
# nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8, with KV in 16 bits, attention's weights in 8
NEMOTRON_FP8 = NEMOTRON | {
    "num_nextn_predict_layers": 0,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "config_groups": {
            "group_0": {
                "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
                "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                "targets": ["Linear"],
            }
        },
        "ignore": ["lm_head"]
        + [
            f"backbone.layers.{layer}.mixer{part}"
            for layer, kind in enumerate(NEMOTRON["hybrid_override_pattern"])
            for part in {"*": (), "M": (".conv1d",), "E": (".gate",)}[kind]
        ],
    },
}
# zai-org/GLM-4.7-Flash
GLM_FLASH = _BF16 | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 1.8,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
}
# openai/gpt-oss-20b
GPT_OSS = _BF16 | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
# google/gemma-3-12b-it, its text decoder
GEMMA3 = _BF16 | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "tie_word_embeddings": True,
    "vocab_size": 262208,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 8,
    "sliding_window": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
# ibm-granite/granite-4.0-h-small
GRANITE_H = _BF16 | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "tie_word_embeddings": True,
    "vocab_size": 100352,
    "hidden_size": 4096,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "position_embedding_type": "nope",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 16.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
# Heads over the 32,000 most frequent tokens, as published for these targets.
_HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "draft_vocab_size": 32000,
}
SHAPES = {
    "smollm2-135m": SMOLLM2,
    "llama-3.1-8b": LLAMA_8B,
    "eagle3-llama-3.1-8b": LLAMA_8B | _HEAD,
    "qwen35-9b": QWEN35_9B,
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-8b": QWEN3_8B,
    "eagle3-qwen3-8b": QWEN3_8B | _HEAD,
    "qwen3-8b-fp8": QWEN3_8B | FP8,
    "qwen3-8b-fp8-blocks": QWEN3_8B | FP8_BLOCKS,
    "qwen3-8b-fp8-static": QWEN3_8B | FP8_STATIC,
    "qwen3-8b-w4a16": QWEN3_8B | W4A16,
    "qwen3-30b-a3b": QWEN3_MOE,
    "qwen3-30b-a3b-fp8": QWEN3_MOE | FP8,
    "qwen3-30b-a3b-fp8-blocks": QWEN3_MOE | FP8_BLOCKS_MOE,
    "qwen35-35b-a3b-fp8": QWEN35_MOE_FP8,
    "qwen3-30b-a3b-w4a16": QWEN3_MOE | W4A16_MOE,
    "qwen3-30b-a3b-nvfp4": QWEN3_MOE | NVFP4_MOE,
    "lightning-30b-a3b": NEMOTRON,
    "nano-30b-a3b-fp8": NEMOTRON_FP8,
    "glm-4.7-flash": GLM_FLASH,
    "gpt-oss-20b": GPT_OSS,
    "gemma-3-12b": GEMMA3,
    "granite-4.0-h-small": GRANITE_H,
}


def main() -> None:
    for name, config in SHAPES.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
