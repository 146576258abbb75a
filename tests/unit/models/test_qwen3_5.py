"""Hybrid checkpoints: what is read, refused and kept in which precision; their forward pass."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import change_config, change_tensors, random_tensors, write_checkpoint
from helpers.forward import Bench, load, require_logits_by_kernels
from helpers.hybrids import write_hybrid
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.loader import read_config
from sametoken.ops.cache_types import PagedKV, Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta

CONFIG = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
LINEAR = "model.layers.0.linear_attn"
ATTENTION = "model.layers.1.self_attn"


def shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of ``CONFIG`` as Qwen3.5 is published: experts stacked."""
    out = {
        "model.embed_tokens.weight": (23, 16),
        "lm_head.weight": (23, 16),
        "model.norm.weight": (16,),
        f"{LINEAR}.A_log": (4,),
        f"{LINEAR}.dt_bias": (4,),
        f"{LINEAR}.conv1d.weight": (56, 1, 3),
        f"{LINEAR}.in_proj_qkv.weight": (56, 16),
        f"{LINEAR}.in_proj_z.weight": (24, 16),
        f"{LINEAR}.in_proj_b.weight": (4, 16),
        f"{LINEAR}.in_proj_a.weight": (4, 16),
        f"{LINEAR}.norm.weight": (6,),
        f"{LINEAR}.out_proj.weight": (16, 24),
        f"{ATTENTION}.q_proj.weight": (64, 16),
        f"{ATTENTION}.k_proj.weight": (16, 16),
        f"{ATTENTION}.v_proj.weight": (16, 16),
        f"{ATTENTION}.o_proj.weight": (16, 32),
        f"{ATTENTION}.q_norm.weight": (16,),
        f"{ATTENTION}.k_norm.weight": (16,),
    }
    for layer in ("model.layers.0", "model.layers.1"):
        out |= {
            f"{layer}.input_layernorm.weight": (16,),
            f"{layer}.post_attention_layernorm.weight": (16,),
            f"{layer}.mlp.gate.weight": (3, 16),
            f"{layer}.mlp.experts.gate_up_proj": (3, 24, 16),
            f"{layer}.mlp.experts.down_proj": (3, 16, 12),
            f"{layer}.mlp.shared_expert.gate_proj.weight": (20, 16),
            f"{layer}.mlp.shared_expert.up_proj.weight": (20, 16),
            f"{layer}.mlp.shared_expert.down_proj.weight": (16, 20),
            f"{layer}.mlp.shared_expert_gate.weight": (1, 16),
        }
    return out


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path, CONFIG, random_tensors(shapes(), seed=0))


def test_what_slots_and_blocks_hold(checkpoint):
    model = load(checkpoint, dtype=torch.bfloat16)
    recurrent, attention = model.caches
    assert recurrent == Recurrent(GatedDelta(2, 4, 8, 6, 3), torch.bfloat16)
    assert recurrent.rule.conv_channels == 56
    assert attention == PagedKV(1, attention.k_dim, attention.k_dim, torch.bfloat16)
    matrices = sum(
        torch.Size(shape).numel()
        for name, shape in shapes().items()
        if len(shape) > 1 and "conv1d" not in name
    )
    assert model.weights_bytes == 2 * matrices


def test_full_attention_alone_has_no_recurrent_state(checkpoint):
    change_tensors(
        checkpoint,
        lambda tensors: {
            name.replace("layers.1", "layers.0"): tensor
            for name, tensor in tensors.items()
            if "layers.0" not in name
        },
    )
    change_config(checkpoint, num_hidden_layers=1, layer_types=["full_attention"])
    model = load(checkpoint)
    assert [type(cache) for cache in model.caches] == [PagedKV]
    assert Bench(model).logits([1, 2, 3], [2]).isfinite().all()


def test_decay_is_not_rounded_with_the_other_weights(checkpoint):
    """A_log and dt_bias count in an exponent; checkpoints may store them in fp32."""
    params = load(checkpoint, dtype=torch.bfloat16).layers[0].attention.params
    tensors = load_file(checkpoint / "model.safetensors")
    assert torch.equal(params.A_log, tensors[f"{LINEAR}.A_log"])
    assert torch.equal(params.dt_bias, tensors[f"{LINEAR}.dt_bias"])
    assert params.conv_weight.dtype == torch.bfloat16


def test_norms_add_one_in_fp32(checkpoint):
    stored = load_file(checkpoint / "model.safetensors")["model.norm.weight"].bfloat16()
    weight = load(checkpoint, dtype=torch.bfloat16).final_norm.weight
    assert torch.equal(weight, 1.0 + stored.float())


def test_dummy_weights_run(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    model = load(checkpoint, load_format="dummy")
    assert Bench(model).logits([1, 2, 3, 4, 5], [2]).isfinite().all()


def test_tied_embeddings_of_a_nested_decoder_are_compared(checkpoint):
    change_tensors(checkpoint, partial(with_decoder_at, "model.language_model."))
    change_config(checkpoint, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"differs from model\.language_model\.embed_tokens"):
        load(checkpoint)


def with_decoder_at(prefix, tensors):
    return {name.replace("model.", prefix): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("repeated", "encoder"),
    [(1, "model.visual"), (2, "model.visual"), (3, "model.language_model.visual")],
)
def test_a_decoder_and_its_encoder_of_images_load_by_any_prefix(checkpoint, repeated, encoder):
    """transformers 5.4 to 5.5.3 repeats the decoder's (transformers#45216 and #45357)."""
    nested = "model." + "language_model." * repeated
    change_tensors(checkpoint, partial(with_decoder_at, nested))
    of_images = {f"{encoder}.blocks.0.norm1.weight": torch.zeros(3)}
    change_tensors(checkpoint, lambda tensors: tensors | of_images)
    change_config(checkpoint, architectures=["Qwen3_5MoeForConditionalGeneration"])
    load(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 3}, "3 value heads over 2 key heads"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim=0"),
        ({"layer_types": ["linear_attention"]}, "does not name 2 layers"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok=None"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
        ({"linear_conv_kernel_dim": 4}, r"conv1d\.weight .* has shape \[56, 1, 3\]"),
        ({"num_experts": 4}, r"has shape \[3, 16\], the config expects \[4, 16\]"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "cannot be rotated in pairs"),
    ],
)
def test_impossible_configs_are_named(checkpoint, changes, message):
    change_config(checkpoint, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)


def test_other_layer_types_are_refused(checkpoint):
    change_config(checkpoint, layer_types=["linear_attention", "sliding_attention"])
    with pytest.raises(UnsupportedError, match="sliding_attention"):
        load(checkpoint)


def test_stacked_experts_are_checked(checkpoint):
    name = "model.layers.1.mlp.experts.down_proj"
    broken = torch.zeros(3, 16, 12)
    broken[2, 3, 4] = torch.nan
    change_tensors(checkpoint, lambda tensors: tensors | {name: broken})
    with pytest.raises(CheckpointError, match=rf"{name} .* NaN"):
        load(checkpoint)
    change_tensors(checkpoint, lambda tensors: tensors | {name: torch.zeros(3, 12, 16)})
    with pytest.raises(CheckpointError, match=r"has shape \[3, 12, 16\]"):
        load(checkpoint)


def test_the_text_part_is_named_by_its_architecture(checkpoint):
    text = {key: value for key, value in CONFIG.items() if key != "architectures"}
    change = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    (checkpoint / "config.json").write_text(json.dumps(change))
    assert read_config(checkpoint).architecture == "Qwen3_5MoeForConditionalGeneration"
    assert Bench(load(checkpoint)).logits([1, 2, 3], []).isfinite().all()


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_logits_are_the_reference_s_in_whatever_chunks(tmp_path, kind):
    """Gated attention with partial rotation, Gated DeltaNet, a mixture of experts."""
    path = write_hybrid(
        tmp_path, kind, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    require_logits_by_kernels(path, [3, 1, 4, 1, 5, 9], [3, 1])
