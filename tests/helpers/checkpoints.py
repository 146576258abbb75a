"""Tiny random checkpoints on disk: a Llama target, and EAGLE heads in both layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VOCAB = 23
HIDDEN = 16
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
DRAFT_IDS = (0, 1, 4, 7, 11, 12, 13, 20, 22)


def random_weight(generator: torch.Generator, *shape: int, is_factor: bool = True) -> torch.Tensor:
    """Factors about 1, other vectors about 0, matrices that keep the scale of their input."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise / shape[-1] ** 0.5
    return 1 + 0.1 * noise if is_factor else 0.3 * noise


def random_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int, factors: str = ""
) -> dict[str, torch.Tensor]:
    """Vectors are factors if their name contains ``factors``."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: random_weight(generator, *shape, is_factor=factors in name)
        for name, shape in shapes.items()
    }


def layer_shapes(config: dict, prefix: str, in_features: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (q_size, in_features),
        f"{prefix}.self_attn.k_proj.weight": (kv_size, in_features),
        f"{prefix}.self_attn.v_proj.weight": (kv_size, in_features),
        f"{prefix}.self_attn.o_proj.weight": (hidden, q_size),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }


def llama_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"]),
        "model.norm.weight": (config["hidden_size"],),
        "lm_head.weight": (config["vocab_size"], config["hidden_size"]),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, f"model.layers.{index}", config["hidden_size"])
    return shapes


def llama_tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    return random_tensors(llama_shapes(config), seed)


def write_llama(directory: Path, seed: int = 0, **changes) -> Path:
    config = LLAMA | changes
    return write_checkpoint(directory, config, llama_tensors(config, seed))


#: The ``eagle_config`` of a head that reads the target's last state alone.
NO_FC = {"use_aux_hidden_state": False}


def head_tensors(
    seed: int = 0, *, own_embedding: bool = False, full_vocab: bool = False, **flags
) -> dict[str, torch.Tensor]:
    """An EAGLE-3 head's tensors under the names of ``speculators``."""
    config = LLAMA | flags
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = layer_shapes(config, "layers.0", 2 * hidden)
    shapes |= {
        "layers.0.hidden_norm.weight": (hidden,),
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab if full_vocab else len(DRAFT_IDS), hidden),
    }
    if flags.get("eagle_config") == NO_FC:
        del shapes["fc.weight"]
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * hidden,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(3)}
    if flags.get("attention_bias"):
        for name, size in (("q", 16), ("k", 8), ("v", 8), ("o", hidden)):
            shapes[f"layers.0.self_attn.{name}_proj.bias"] = (size,)
    tensors = random_tensors(shapes, seed)
    if not full_vocab:
        ids = torch.tensor(DRAFT_IDS)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.isin(torch.arange(vocab), ids)
    return tensors


def write_safeailab(directory: Path, tensors: dict[str, torch.Tensor], **changes) -> Path:
    """One flat config.json, ``midlayer.*`` tensors; without an lm_head the vocabularies are one."""
    config = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    if "lm_head.weight" in tensors:
        config["draft_vocab_size"] = tensors["lm_head.weight"].shape[0]
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    return write_checkpoint(directory, config | changes, renamed)


def write_speculators(
    directory: Path, tensors: dict[str, torch.Tensor], layer: dict | None = None, **changes
) -> Path:
    """A nested config.json, ``layers.0.*`` tensors and the verifier's, which are not used."""
    layer_config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
        "transformer_layer_config": layer_config | {"num_hidden_layers": 1} | (layer or {}),
        "draft_vocab_size": tensors["lm_head.weight"].shape[0],
        "target_hidden_size": None,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": None,
    }
    verifier = {"verifier_norm.weight": torch.ones(HIDDEN)}
    return write_checkpoint(directory, config | changes, tensors | verifier)


def eagle1_tensors(
    seed: int = 0,
    *,
    num_layers: int = 1,
    fc_bias: bool = False,
    qkv_bias: bool = False,
    own: bool = False,
    **sizes,
) -> dict[str, torch.Tensor]:
    """A head of the first EAGLE under SafeAILab's names; ``own`` adds embedding and lm_head."""
    config = LLAMA | sizes
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    for index in range(num_layers):
        shapes |= layer_shapes(config, f"layers.{index}", hidden)
    del shapes["layers.0.input_layernorm.weight"]
    if fc_bias:
        shapes["fc.bias"] = (hidden,)
    if qkv_bias:
        ends = tuple(f"{part}_proj.weight" for part in "qkv")
        projections = [name for name in shapes if name.endswith(ends)]
        shapes |= {name.replace("weight", "bias"): shapes[name][:1] for name in projections}
    if own:
        shapes |= dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (vocab, hidden))
    return random_tensors(shapes, seed)


def write_eagle1(directory: Path, tensors: dict[str, torch.Tensor], **changes) -> Path:
    """SafeAILab's layout: the config.json of a Llama with as many layers as the head."""
    num_layers = sum(name.endswith("q_proj.weight") for name in tensors)
    return write_checkpoint(directory, LLAMA | {"num_hidden_layers": num_layers} | changes, tensors)


def write_eagle1_speculators(directory: Path, tensors: dict[str, torch.Tensor], **changes) -> Path:
    """A nested config.json, ``transformer.*`` and ``fusion_fc.*`` tensors."""
    layer_config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "speculators_config": {"algorithm": "eagle", "verifier": {"name_or_path": "target"}},
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer_config,
        "fusion_bias": "fc.bias" in tensors,
        "layernorms": False,
    }
    renamed = {
        name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): value
        for name, value in tensors.items()
    }
    return write_checkpoint(directory, config | changes, renamed)


def write_config(directory: Path, config: dict = LLAMA, **changes) -> Path:
    """A model without weights, for ``load_format="dummy"``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return directory


def write_checkpoint(directory: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    write_config(directory, config)
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, directory / "model.safetensors"
    )
    return directory


def read_checkpoint(directory: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """The config and the tensors of ``write_checkpoint``."""
    config = json.loads((directory / "config.json").read_text())
    return config, load_file(directory / "model.safetensors")


def change_config(directory: Path, **changes) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def change_tensors(directory: Path, change: Callable[[dict], dict]) -> Path:
    """``change`` gives new tensors for the old ones."""
    path = directory / "model.safetensors"
    save_file({name: t.contiguous() for name, t in change(load_file(path)).items()}, path)
    return directory


def as_pickle(directory: Path, num_shards: int = 1) -> Path:
    """Replace a checkpoint's model.safetensors by pytorch_model.bin, or by shards and an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    if num_shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin")
        return directory
    weight_map = {}
    for shard in range(num_shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{num_shards:05d}.bin"
        names = list(tensors)[shard::num_shards]
        torch.save({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (directory / "pytorch_model.bin.index.json").write_text(index)
    return directory
