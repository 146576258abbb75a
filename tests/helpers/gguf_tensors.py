"""Tensors of GGUF files, as llama.cpp's converter makes them of a checkpoint's."""

from __future__ import annotations

import re

import gguf
import torch

from helpers.gguf_keys import HYBRIDS, INTERLEAVED, num_modules
from helpers.gguf_mamba2 import ARCHITECTURES, mamba2_parts

_CENTRED = ("gemma3", *HYBRIDS)
#: Of Gemma 4's router.
_OF_ROUTER = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
#: The module of Qwen3.5, below ``mtp``, as that of GLM is called.
_OF_MTP = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
_NEXTN = re.compile(
    r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|embed_tokens|shared_head\.\w+)\.weight"
)
#: Tensors that the converter calls otherwise before it looks up their names.
_RENAMED = (
    (r"backbone\.layers\.(\d+)\.mixer\.experts\.", r"model.layers.\1.mlp.experts."),
    (r"self_attn\.sinks$", "self_attn.sinks.weight"),
    (r"layer_scalar$", "layer_scalar.weight"),
    (r"\.dt_bias$", ".dt_proj.bias"),
    (r"_proj_bias$", "_proj.bias"),
    (r"e_score_correction_bias$", "e_score_correction.bias"),
    (r"(experts\.w\d|experts\.(?:gate|up|down|gate_up)_proj)$", r"\1.weight"),
)


def converted_tensors(arch, config, stored):
    """Names in a GGUF file, and tensors, of those that a checkpoint stores."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    keys = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(keys[arch], config["num_hidden_layers"] + 1)
    text = {name: data for name, data in stored.items() if "visual." not in name}
    plain = {name.replace(".language_model.", "."): data for name, data in text.items()}
    modules, layers = num_modules(arch, config), config["num_hidden_layers"]
    plain = {_past_layers(name, layers): data for name, data in plain.items()}
    dropped = () if modules else (f"model.layers.{layers}.",)
    plain = {name: data for name, data in plain.items() if not name.startswith(dropped)}
    for name, data in _stacked(plain).items():
        for part, values in _parts(arch, name, data, config):
            made = _reordered(arch, part, values, heads)
            is_whole = arch in ARCHITECTURES
            yield _new_name(names, part), made if is_whole else torch.atleast_1d(made.squeeze())
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


def _past_layers(name, layers):
    """Qwen's module as the layer past the last."""
    _, _, own = name.rpartition("mtp.")
    if own == name:
        return name
    if own.startswith("layers."):
        return name.replace("mtp.layers.0", f"model.layers.{layers}")
    module, _, ending = own.partition(".")
    return f"model.layers.{layers}.{_OF_MTP[module]}.{ending}"


def _new_name(names, name):
    if match := _NEXTN.fullmatch(name):
        return f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}.weight"
    if name.startswith("blk."):
        return name
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
    if arch in INTERLEAVED and kind in heads:
        return values.unflatten(0, (heads[kind], 2, -1)).transpose(1, 2).reshape(values.shape)
    return values + 1 if arch in _CENTRED and name.endswith("norm.weight") else values


def _parts(arch, name, data, config):
    """What the converter makes of a tensor: experts' gates and ups apart, outputs first."""
    if "linear_attn" in name:
        yield from _linear_parts(arch, name, data, config)
        return
    if arch in ARCHITECTURES:
        yield from mamba2_parts(name, data, config)
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
