"""GGUF files of any family, as llama.cpp's converter makes them of checkpoints of transformers."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from helpers.checkpoints import change_tensors, write_checkpoint
from helpers.families import GEMMA_4, SEEING, fixed_config, random_model, write_family
from helpers.gguf_files import write_converted
from helpers.gguf_keys import HYBRIDS
from helpers.hybrids import EXPERTS, FULL, LINEAR, hybrid_config, hybrid_tensors
from helpers.latents import LATENTS, YARN, write_latent, write_nextn
from helpers.nemotron import EPS, write_nemotron
from helpers.nextn_files import nextn_tensors

#: Three heads of values to each of keys.
_HYBRID = {
    "layer_types": [LINEAR, FULL, LINEAR, FULL],
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "vocab_size": 64,
}
#: By architecture: the family of transformers, and changes of its config to what a file can say.
FAMILIES = {
    "llama": ("mixtral", {"sliding_window": None}),
    "qwen3moe": ("qwen3_moe", {"mlp_only_layers": [], "norm_topk_prob": True}),
    "qwen2vl": ("qwen2_5", {}),
    "qwen3vl": ("qwen3", {}),
    "qwen2moe": ("qwen2_moe", {"mlp_only_layers": [], "norm_topk_prob": False}),
    "qwen3next": ("qwen3_next", _HYBRID),
    "qwen35": ("qwen3_5", _HYBRID),
    "qwen35moe": ("qwen3_5", _HYBRID | EXPERTS | {"architectures": ["Qwen3_5MoeForCausalLM"]}),
    "gemma3": (
        "gemma3",
        {
            "num_hidden_layers": 6,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma4": ("gemma4", {}),
    "gemma4-small": (
        "gemma4",
        {
            "attention_k_eq_v": False,
            "num_global_key_value_heads": None,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
        },
    ),
    "gpt-oss": ("gpt_oss", {"swiglu_limit": 7.0}),
    "phi3": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0, 1.5, 1.25],
                "long_factor": [1.75, 2.0, 3.0],
            },
            "original_max_position_embeddings": 16,
        },
    ),
    "granite": ("granite", {"attention_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "attention_factor": 1.25,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            }
        },
    ),
    "granitehybrid": ("granite_hybrid", {"embedding_multiplier": 3.0}),
    "granitehybrid-dense": (
        "granite_hybrid",
        {"num_local_experts": 0, "mamba_conv_bias": False, "attention_bias": True},
    ),
    "granitehybrid-bamba": ("bamba", {"attn_rotary_emb": 4, "mamba_proj_bias": True}),
    "falcon-h1": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "embedding_multiplier": 4.0,
            "lm_head_multiplier": 0.5,
            "key_multiplier": 0.5,
            "attention_in_multiplier": 2.0,
            "attention_out_multiplier": 0.5,
            "ssm_in_multiplier": 0.25,
            "ssm_out_multiplier": 2.0,
            "mlp_multipliers": [0.5, 2.0],
            "ssm_multipliers": [0.5, 2.0, 4.0, 1.0, 2.0],
        },
    ),
    "nemotron_h": ("nemotron", {"pattern": "M-*M-", "num_hidden_layers": 5}),
    "nemotron_h_moe": (
        "nemotron",
        {"pattern": "ME*ME", "num_hidden_layers": 5, "moe_latent_size": 8, "head_dim": 16},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "mistral3": (
        "ministral3",
        {
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "minimax-m2": ("minimax_m2", {}),
    "deepseek2": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0}}),
    "deepseek2-lite": ("deepseek_v2", {}),
    "deepseek2-flash": ("glm4_moe_lite", {"first_k_dense_replace": 1}),
    "glm4moe": ("glm4_moe", {}),
    "seed_oss": ("seed_oss", {}),
    "hunyuan-dense": ("hunyuan_dense", {"tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-moe": ("ernie4_5_moe", {"moe_num_shared_experts": 1}),
}
#: That config.json implies, or has by other names.
NEMOTRON_KEYS = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "rms_norm_eps": EPS}
_NAMES = {
    "gemma4-small": "gemma4",
    "granitehybrid-dense": "granitehybrid",
    "granitehybrid-bamba": "granitehybrid",
    "olmo3": "olmo2",
    "deepseek2-lite": "deepseek2",
    "deepseek2-flash": "deepseek2",
}


def write_family_gguf(directory: Path, arch: str, changes=(), **options) -> tuple[Path, Path]:
    """A random model of an architecture's family as transformers saves it, and its GGUF file.

    Args:
        directory: of the checkpoint; the file lies beside it.
        arch: one of ``FAMILIES``.
        changes: of the model's config.
        options: of ``write_converted``.
    """
    family, own = FAMILIES[arch]
    own = own | dict(changes)
    if arch in HYBRIDS:
        _write_hybrid(directory, family, **own)
    elif family in SEEING and arch.endswith("vl"):
        random_model(SEEING[family](), seed=0).save_pretrained(directory)
    elif family == "glm4_moe_lite":
        write_nextn(directory, family, **own)
    elif family == "nemotron":
        write_nemotron(directory, **own)
    else:
        write = write_latent if family in LATENTS else write_family
        write(directory, family, **own)
        if family == "glm4_moe":
            _add_nextn(directory, fixed_config(family, **own))
    # transformers writes some of Gemma 4's sizes by layer, which the converter reads as they were.
    sizes = GEMMA_4 | own if family == "gemma4" else NEMOTRON_KEYS if family == "nemotron" else {}
    return directory, gguf_of(directory, _NAMES.get(arch, arch), sizes, **options)


def gguf_of(directory: Path, name: str, sizes=(), **options) -> Path:
    """The file beside a checkpoint that the converter makes of it.

    Logarithms of decays become values of bf16, as published ones are: a file has exponentials.

    Args:
        directory: of the checkpoint.
        name: of the architecture in GGUF's words.
        sizes: for keys that config.json has otherwise, or not.
        options: of ``write_converted``.
    """
    config = json.loads((directory / "config.json").read_text())
    config = dict(sizes) | config.get("text_config", config)
    weights = directory / "model.safetensors"
    stored = load_file(weights)
    decays = {key: data.bfloat16().float() for key, data in stored.items() if "A_log" in key}
    save_file(stored | decays, weights)
    path = directory.with_suffix(".gguf")
    return write_converted(path, name, config, stored | decays, **options)


def _write_hybrid(directory, family, architectures=None, **changes):
    config = hybrid_config(family, **changes)
    config["architectures"] = architectures or config["architectures"]
    write_checkpoint(directory, config, hybrid_tensors(config))


def _add_nextn(directory, config):
    change_tensors(directory, lambda old: old | nextn_tensors(config, old, seed=0))
