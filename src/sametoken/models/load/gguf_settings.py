"""Settings of a GGUF file that follow from several keys, or from its tensors' names."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from sametoken.errors import UnsupportedError
from sametoken.layers.rotary import DEFAULT_THETA
from sametoken.models.layer_types import FULL, SLIDING, full_every
from sametoken.models.load.gguf_architecture import Turns
from sametoken.models.load.gguf_file import GGUFTensor
from sametoken.models.load.settings import COMPARE, MAX_LAYERS, Settings, require_values

WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
#: Factors on cos and sin of a scaled rope, by the converters of the time.
ATTENTION_FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
QUERY_GROWTH, LOG_MULTIPLIER = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"
#: Of recurrent layers: heads and features of values, heads of keys or groups, elements of a state,
#: taps of a convolution.
SSM_HEADS, SSM_FEATURES = "ssm.time_step_rank", "ssm.inner_size"
SSM_GROUPS, SSM_STATE, SSM_KERNEL = "ssm.group_count", "ssm.state_size", "ssm.conv_kernel"
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
CORRECTION = "exp_probs_b.bias"


def windows(settings: Settings, tensors: Mapping[str, GGUFTensor], every: int) -> dict[str, Any]:
    """The window, and the layers that have it: all but each ``every``-th, if no pattern is given.

    Raises:
        UnsupportedError: the pattern is neither a period nor one switch for each layer.
    """
    num_layers = settings.integer("block_count", most=MAX_LAYERS)
    if not settings.get(WINDOW):
        return {"sliding_window": None, "layer_types": [FULL] * num_layers}
    pattern = settings.get(PATTERN, every)
    if isinstance(pattern, list) and set(pattern) <= {False, True}:
        types = [SLIDING if has_window else FULL for has_window in pattern]
    elif isinstance(pattern, int) and pattern > 0:
        types = full_every(pattern, num_layers)
    else:
        raise UnsupportedError(
            f"{settings.location}: {settings.prefix}{PATTERN}={short(pattern)} is not supported",
            COMPARE,
        )
    return {"sliding_window": settings.positions(WINDOW), "layer_types": types}


def gemma3(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """Windows in five layers of six; only the model of 62 layers has a scale of its own."""
    hidden, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    head_dim = settings.integer("attention.key_length", max(hidden // heads, 1))
    is_27b = settings.get("block_count") == 62
    scale = {"query_pre_attn_scalar": hidden // heads if is_27b else head_dim}
    return scale | windows(settings, tensors, 6)


#: Of heads with a window, where others have another size.
SIZE_IN_WINDOWS = "attention.key_length_swa"
KV_HEADS, FEED_FORWARD = "attention.head_count_kv", "feed_forward_length"
PER_LAYER = "per_layer_token_embd.weight"


def gemma4(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """Layers that see all differ from those with a window; those without values take keys.

    Raises:
        UnsupportedError: layers with a window rotate a part of a head.
    """
    require_values(settings, {"rope.dimension_count_swa": (settings.get(SIZE_IN_WINDOWS),)})
    own = windows(settings, tensors, 6)
    types, sizes = own["layer_types"], settings.get(FEED_FORWARD)
    heads = settings.get(KV_HEADS)
    heads = heads if isinstance(heads, list) else [heads] * len(types)
    by_type = dict(zip(types, heads, strict=False))
    num_shared = settings.count("attention.shared_kv_layers")
    full = [index for index, kind in enumerate(types[: len(types) - num_shared]) if kind == FULL]
    theta = settings.number("rope.freq_base_swa", DEFAULT_THETA)
    return own | {
        "num_key_value_heads": by_type.get(SLIDING, by_type.get(FULL)),
        "num_global_key_value_heads": by_type.get(FULL),
        "global_head_dim": settings.integer("attention.key_length"),
        "attention_k_eq_v": any(f"blk.{index}.attn_v.weight" not in tensors for index in full),
        "num_kv_shared_layers": num_shared,
        "intermediate_size": min(sizes) if isinstance(sizes, list) else sizes,
        "use_double_wide_mlp": isinstance(sizes, list) and max(sizes) > min(sizes),
        "hidden_size_per_layer_input": settings.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": tensors[PER_LAYER].shape[0] if PER_LAYER in tensors else None,
        "enable_moe_block": bool(settings.get("expert_count")),
        # That of layers that see all is the file's table of divisors.
        "rope_parameters": {FULL: {}, SLIDING: {"rope_type": "default", "rope_theta": theta}},
    }


def open_yarn(settings: Settings) -> dict[str, Any]:
    """The borders of gpt-oss's ramp are not rounded."""
    return {"truncate": False}


def phi3(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """Of Phi-4, which has no window, the converter writes one of 0."""
    return {"sliding_window": settings.get(WINDOW) or None}


def mistral3(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """Ministral 3 where queries grow with their position, else Mistral Small 3."""
    name = "Ministral3ForCausalLM" if settings.get(QUERY_GROWTH) else "MistralForCausalLM"
    return {"architectures": [name], "sliding_window": None}


def ministral_yarn(settings: Settings) -> dict[str, Any]:
    """The multiplier is ``mscale_all_dim``, which ``mscale`` is too in what it was made of."""
    mscale = settings.get(LOG_MULTIPLIER)
    growth = {"llama_4_scaling_beta": settings.get(QUERY_GROWTH)}
    return growth | ({"mscale": mscale, "mscale_all_dim": mscale} if mscale else {})


def deepseek2(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """V3 behind a sigmoid router, else V2; files of GLM-4.7-Flash do not say which.

    Only a sigmoid's scores are corrected.

    Sizes of a head are those of the model, or in newer files, where ``key_length`` is that of a
    latent, have keys of their own. Files without groups run without them.
    """
    is_new = settings.get("attention.key_length_mla")
    ending = "_mla" if is_new else ""
    key, value = (settings.integer(f"attention.{one}_length{ending}") for one in ("key", "value"))
    rope, groups = settings.integer("rope.dimension_count"), settings.get("expert_group_count", 1)
    is_corrected = any(name.endswith(CORRECTION) for name in tensors)
    is_v3 = settings.get("expert_gating_func", SIGMOID if is_corrected else SOFTMAX) == SIGMOID
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
        **layers_and_modules(settings),
    }


def deepseek_yarn(settings: Settings) -> dict[str, Any]:
    """The multiplier is a tenth of ``mscale_all_dim``, which llama.cpp takes ``mscale`` to be."""
    tenth = settings.get(LOG_MULTIPLIER)
    mscale = round(10 * settings.number(LOG_MULTIPLIER), 6) if tenth else None
    return {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {}


def seed_oss(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """A bias on the output where the file has one."""
    return {"attention_out_bias": "blk.0.attn_output.bias" in tensors}


def layers_and_modules(settings: Settings) -> dict[str, Any]:
    """``block_count`` counts the layers of a NextN module too."""
    num_modules = settings.count("nextn_predict_layers")
    num_layers = settings.integer("block_count", most=MAX_LAYERS) - num_modules
    return {"num_hidden_layers": num_layers, "num_nextn_predict_layers": num_modules}


def value_size(settings: Settings) -> int:
    """Features of a head of a recurrent layer's values."""
    return settings.integer(SSM_FEATURES) // settings.integer(SSM_HEADS)


def gated_delta_net(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """The size of a head of values."""
    return {"linear_value_head_dim": value_size(settings), **layers_and_modules(settings)}


def value_heads(settings: Settings) -> dict[str, Turns]:
    """Qwen3.5's, which llama.cpp meets with heads of keys that are repeated as a whole."""
    num_keys, size = settings.integer(SSM_GROUPS), value_size(settings)
    ratio = settings.integer(SSM_HEADS) // num_keys
    rows = Turns(2 * num_keys * settings.integer(SSM_STATE), num_keys, ratio, size)
    by_head = rows._replace(first=0, size=1)
    return {
        "in_proj_qkv.weight": rows,
        "conv1d.weight": rows,
        "in_proj_z.weight": rows._replace(first=0),
        "out_proj.weight": rows._replace(first=0, in_columns=True),
        **dict.fromkeys(("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"), by_head),
    }


def glm4_moe(settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """Norms of q and k where the file has them."""
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors, **layers_and_modules(settings)}
