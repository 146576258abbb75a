"""GGUF files of any family, as llama.cpp's converter makes them of checkpoints of transformers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import gguf
import torch
from gguf import GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

from helpers.checkpoints import write_checkpoint
from helpers.families import GEMMA_4, SEEING, random_model, write_family
from helpers.gguf_files import F32, interleaved
from helpers.hybrids import EXPERTS, FULL, LINEAR, hybrid_config, hybrid_tensors, without_mtp
from helpers.latents import LATENTS, YARN, write_latent

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
    "qwen35moe": (
        "qwen3_5",
        _HYBRID | EXPERTS | {"architectures": ["Qwen3_5MoeForCausalLM"]},
    ),
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
            },
        },
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
    "glm4moe": ("glm4_moe", {}),
    "seed_oss": ("seed_oss", {}),
    "hunyuan-dense": ("hunyuan_dense", {"tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-moe": ("ernie4_5_moe", {"moe_num_shared_experts": 1}),
}
_NAMES = {"gemma4-small": "gemma4", "olmo3": "olmo2", "deepseek2-lite": "deepseek2"}
_HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
_CENTRED = ("gemma3", *_HYBRIDS)
_INTERLEAVED = ("llama", "granite", "smollm3", "mistral3")
#: Of Gemma 4's router.
_OF_ROUTER = {
    "scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
}
#: Tensors that the converter calls otherwise before it looks up their names.
_RENAMED = (
    (r"self_attn\.sinks$", "self_attn.sinks.weight"),
    (r"layer_scalar$", "layer_scalar.weight"),
    (r"\.dt_bias$", ".dt_proj.bias"),
    (r"_proj_bias$", "_proj.bias"),
    (r"e_score_correction_bias$", "e_score_correction.bias"),
    (r"(experts\.w\d|experts\.(?:gate|up|down|gate_up)_proj)$", r"\1.weight"),
)


def write_family_gguf(
    directory: Path, arch: str, tensor_type=F32, tokens=None, **changes
) -> tuple[Path, Path]:
    """A random model of an architecture's family as transformers saves it, and its GGUF file."""
    family, own = FAMILIES[arch]
    if arch in _HYBRIDS:
        _write_hybrid(directory, family, **own | changes)
    elif family in SEEING and arch.endswith("vl"):
        random_model(SEEING[family](), seed=0).save_pretrained(directory)
    else:
        write = write_latent if family in LATENTS else write_family
        write(directory, family, **own | changes)
    config = json.loads((directory / "config.json").read_text())
    # transformers writes some of Gemma 4's sizes by layer, which the converter reads as they were.
    sizes = GEMMA_4 | own if family == "gemma4" else {}
    config = sizes | config.get("text_config", config)
    name = _NAMES.get(arch, arch)
    path = directory.with_suffix(".gguf")
    writer = GGUFWriter(path, name)
    _add_settings(writer, name, config)
    tokens = tokens or [str(i) for i in range(config["vocab_size"])]
    writer.add_array("tokenizer.ggml.tokens", tokens)
    for tensor, data in _tensors(name, config, load_file(directory / "model.safetensors")):
        _add_tensor(writer, tensor, data, tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory, path


def _write_hybrid(directory, family, architectures=None, **changes):
    """With decays whose logarithms a file can say, which has their exponentials."""
    config = hybrid_config(family, **changes)
    config["architectures"] = architectures or config["architectures"]
    tensors = without_mtp(hybrid_tensors(config))
    for name in [name for name in tensors if name.endswith(".A_log")]:
        while not torch.equal(tensors[name], again := tensors[name].exp().log()):
            tensors[name] = again
    write_checkpoint(directory, config, tensors)


def _add_tensor(writer, name, data, tensor_type):
    is_matrix = data.ndim > 1 and name.endswith(".weight")
    fits = data.shape[-1] % gguf.GGML_QUANT_SIZES[tensor_type][0] == 0
    own = tensor_type if is_matrix and fits and "gate_inp" not in name else F32
    writer.add_tensor(name, quantize(data.contiguous().numpy(), own), raw_dtype=own)


def _add_settings(writer, arch, config):
    ropes = config.get("rope_parameters") or {"rope_type": "default", **config}
    rope = ropes.get("full_attention", ropes)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    modules = config.get("num_nextn_predict_layers") or 0
    writer.add_block_count(config["num_hidden_layers"] + (modules if arch == "glm4moe" else 0))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(heads)
    if arch != "gemma4":
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count_kv(1 if arch == "deepseek2" else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    _add_rope_scaling(writer, config, rope)
    if arch == "deepseek2":
        _add_latent_sizes(writer, config, rope)
    elif arch == "gemma4":
        _add_sizes_by_layer(writer, config)
    elif config.get("head_dim") and arch not in ("granite", "phi3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if local := ropes.get("sliding_attention"):
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if arch in _INTERLEAVED or ("partial_rotary_factor" in rope and arch != "gemma4"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if arch in _HYBRIDS:
        heads = config["linear_num_value_heads"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
        writer.add_full_attention_interval(config["full_attention_interval"])
    _add_optional(writer, arch, config)


def _add_sizes_by_layer(writer, config):
    """Of Gemma 4."""
    types, size = config["layer_types"], config["intermediate_size"]
    pattern = [kind == "sliding_attention" for kind in types]
    own = len(types) - config["num_kv_shared_layers"]
    kv_heads = config["num_global_key_value_heads"], config["num_key_value_heads"]
    each = [kv_heads[has_window] for has_window in pattern]
    writer.add_head_count_kv(kv_heads[1] if None in kv_heads else each)
    sizes = [size * (1 + (index >= own)) for index in range(len(types))]
    writer.add_feed_forward_length(sizes if config["use_double_wide_mlp"] else size)
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(pattern)
    writer.add_key_length(config["global_head_dim"])
    writer.add_value_length(config["global_head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(config["global_head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])


def _add_latent_sizes(writer, config, rope):
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_rope_scaling(writer, config, rope):
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("longrope", "yarn"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "yarn" and "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    factor = rope.get("attention_factor")
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        times = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(times) / math.log(original))
    if factor is not None:
        writer.add_rope_scaling_attn_factors(factor)


def _add_optional(writer, arch, config):
    """Keys of config.json that are those of metadata, where there are any."""
    sliding = "sliding_attention" in (config.get("layer_types") or ()) or arch == "phi3"
    added = {
        writer.add_expert_count: ("num_local_experts", "num_experts", "n_routed_experts"),
        writer.add_expert_used_count: ("num_experts_per_tok", "moe_k", "top_k_experts"),
        writer.add_expert_group_count: ("n_group",),
        writer.add_expert_group_used_count: ("topk_group",),
        writer.add_expert_weights_scale: ("routed_scaling_factor",),
        writer.add_expert_shared_count: ("n_shared_experts", "moe_num_shared_experts"),
        writer.add_leading_dense_block_count: ("first_k_dense_replace", "moe_layer_start_index"),
        writer.add_interleave_moe_layer_step: ("moe_layer_interval",),
        writer.add_expert_shared_feed_forward_length: ("shared_expert_intermediate_size",),
        writer.add_final_logit_softcapping: ("final_logit_softcapping",),
        writer.add_attention_scale: ("attention_multiplier",),
        writer.add_embedding_scale: ("embedding_multiplier",),
        writer.add_residual_scale: ("residual_multiplier",),
        writer.add_logit_scale: ("logits_scaling",),
    }
    for add, keys in added.items():
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        if value is not None:
            add(value)
    if arch == "ernie4_5-moe":
        writer.add_expert_count(config["moe_num_experts"])
    if arch == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch in ("gpt-oss", "minimax-m2"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    elif config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == "glm4moe":
        writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if sliding:
        writer.add_sliding_window(config["sliding_window"] or 0)
    if sliding and arch == "olmo2":
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(pattern)


def _tensors(arch, config, stored):
    """Names in a GGUF file, and tensors, of those that a checkpoint stores."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    keys = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(keys[arch], config["num_hidden_layers"] + 1)
    text = {name: data for name, data in stored.items() if "visual." not in name}
    plain = {name.replace(".language_model.", "."): data for name, data in text.items()}
    for name, data in _stacked(plain).items():
        for part, values in _parts(arch, name, data, config):
            yield (
                _new_name(names, part),
                torch.atleast_1d(_reordered(arch, part, values, heads).squeeze()),
            )
    if arch == "gemma4":
        size = config["global_head_dim"] // 2
        rotated = int(size * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
        yield "rope_freqs.weight", torch.tensor([1.0] * rotated + [1e30] * (size - rotated))
    for kind in ("long", "short"):
        if factors := config.get("rope_parameters", {}).get(f"{kind}_factor"):
            yield f"rope_factors_{kind}.weight", torch.tensor(factors)


def _stacked(stored):
    """The tensors, with those of all experts in one."""
    found, stacks = {}, {}
    for name, data in stored.items():
        if match := re.search(r"\.experts\.(\d+)\.", name):
            stack = name.replace(match[0], ".experts.").removesuffix(".weight")
            stacks.setdefault(stack, {})[int(match[1])] = data
        else:
            found[name] = data
    for name, each in stacks.items():
        found[name] = torch.stack([each[index] for index in range(len(each))])
    return found


def _new_name(names, name):
    before, _, end = name.partition(".router.")
    if end in _OF_ROUTER:
        return f"blk.{before.split('.')[-1]}.{_OF_ROUTER[end]}"
    for pattern, new in _RENAMED:
        name = re.sub(pattern, new, name)
    return names.get_name(name, try_suffixes=(".weight", ".bias"))


def _reordered(arch, name, values, heads):
    if name.endswith("linear_attn.norm.weight"):
        return values
    kind = name.split(".")[-2]
    if arch in _INTERLEAVED and kind in heads:
        return torch.from_numpy(interleaved(values.numpy(), heads[kind]))
    return values + 1 if arch in _CENTRED and name.endswith("norm.weight") else values


def _parts(arch, name, data, config):
    """What the converter makes of a tensor: experts' gates and ups apart, outputs first."""
    if "linear_attn" in name:
        yield from _linear_parts(arch, name, data, config)
        return
    if "kv_b_proj" in name:
        heads = data.unflatten(0, (config["num_attention_heads"], -1))
        keys, values = heads.split((config["qk_nope_head_dim"], config["v_head_dim"]), dim=1)
        yield name.replace("kv_b", "k_b"), keys.mT
        yield name.replace("kv_b", "v_b"), values
        return
    if name == "lm_head.weight" and arch == "hunyuan-dense":
        return
    if arch == "gpt-oss" and "experts" in name:
        data = data.mT if data.ndim == 3 else data
        if "gate_up_proj" in name:
            yield name.replace("gate_up_proj", "gate_proj"), data[:, ::2]
            yield name.replace("gate_up_proj", "up_proj"), data[:, 1::2]
            return
    elif "experts.gate_up_proj" in name and arch != "gemma4":
        gate, up = data.chunk(2, dim=1)
        yield name.replace("gate_up_proj", "gate_proj"), gate
        yield name.replace("gate_up_proj", "up_proj"), up
        return
    yield name, data


def _linear_parts(arch, name, data, config):
    """Of Gated DeltaNet: z apart, and Qwen3.5's heads of values by turns of those of keys."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    own, before = name.split("linear_attn.")[1], 2 * keys * key_dim
    data = -data.exp() if own == "A_log" else data.squeeze(1) if "conv1d" in own else data
    if "qkvz" in own:
        values = heads // keys * value_dim
        sizes = (key_dim, key_dim, values, values)
        q, k, v, z = (one.flatten(0, 1) for one in data.unflatten(0, (keys, -1)).split(sizes, 1))
        yield name.replace("qkvz", "qkv"), torch.cat((q, k, v))
        yield name.replace("qkvz", "z"), z
        return
    if arch != "qwen3next" and not own.startswith("norm"):
        data = data.T if own.startswith("out_proj") else data
        first = before if own.startswith(("in_proj_qkv", "conv1d")) else 0
        turned = data[first:].unflatten(0, (keys, heads // keys, -1)).transpose(0, 1).flatten(0, 2)
        data = torch.cat((data[:first], turned))
        data = data.T if own.startswith("out_proj") else data
    yield name, data
