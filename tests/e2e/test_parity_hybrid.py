"""Hybrids of Gated DeltaNet and attention compute what transformers computes."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from helpers.checkpoints import change_tensors
from helpers.forward import Bench, load
from helpers.hybrids import FULL, LINEAR, TINY, merged_experts
from helpers.parity import (
    BACKENDS,
    drawn_models,
    require_logits,
    require_logits_of_edited,
    require_parity,
    saved_and_loaded,
)
from helpers.rows import ragged_rows

ROPES = (
    {"rope_type": "default"},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
)
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
PUBLISHED_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "rope_type": "default",
    "rope_theta": 10_000_000,
    "partial_rotary_factor": 0.25,
}


def without_dense_size(sizes: dict) -> dict:
    return {key: value for key, value in sizes.items() if key != "intermediate_size"}


@st.composite
def architectures(draw):
    """A small random transformers config of one of the three text classes."""
    config_class = draw(st.sampled_from([Qwen3NextConfig, Qwen3_5TextConfig, Qwen3_5MoeTextConfig]))
    num_kv_heads, num_key_heads = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 4]))
    # Their cache cannot do without a layer of full attention.
    others = draw(st.lists(st.sampled_from([LINEAR, LINEAR, FULL]), max_size=3))
    kinds = draw(st.permutations([FULL, *others]))
    own = {
        "vocab_size": draw(st.sampled_from([61, 128])),
        "hidden_size": draw(st.sampled_from([24, 40])),
        "num_hidden_layers": len(kinds),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": draw(st.sampled_from([16, 24])),
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * draw(st.sampled_from([1, 2, 3])),
        "linear_key_head_dim": draw(st.sampled_from([4, 8, 12])),
        # A head of few elements may put out next to nothing, which its norm then enlarges:
        # transformers' own two forms of the rule differ by up to 1e-4 there.
        "linear_value_head_dim": draw(st.sampled_from([12, 16, 20])),
        "linear_conv_kernel_dim": draw(st.sampled_from([2, 3, 4, 5])),
        "layer_types": kinds,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "rope_parameters": {
            **draw(st.sampled_from(ROPES)),
            "rope_theta": draw(st.sampled_from([100.0, 10_000.0])),
            "partial_rotary_factor": draw(st.sampled_from([0.25, 0.5, 1.0])),
        },
    }
    if config_class is not Qwen3_5MoeTextConfig:
        own["intermediate_size"] = draw(st.sampled_from([24, 44]))
    if config_class is Qwen3NextConfig:
        own |= {
            "norm_topk_prob": draw(st.booleans()),
            "decoder_sparse_step": draw(st.sampled_from([1, 2])),
            "mlp_only_layers": draw(st.sampled_from([[], [0]])),
        }
    if config_class is not Qwen3_5TextConfig:
        num_experts = draw(st.sampled_from([2, 5]))
        own |= EXPERTS | {
            "num_experts": num_experts,
            "num_experts_per_tok": draw(st.integers(1, num_experts)),
        }
    return config_class(**own, max_position_embeddings=128, eos_token_id=None)


def randomised(model, seed: int):
    """Norms and biases away from what they begin with, gates over a useful range."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("linear_attn.norm.weight"):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        elif parameter.ndim == 1 or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def transformers_model(config, seed: int):
    return randomised(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed)


@drawn_models(16)
@given(
    config=architectures(),
    seed=st.integers(0, 2**20),
    kernels=st.sampled_from(BACKENDS),
    chunks=st.lists(st.integers(1, 12), max_size=4),
    merge=st.booleans(),
)
def test_random_hybrids_agree(config, seed, kernels, chunks, merge):
    theirs = transformers_model(config, seed)
    prompt = torch.randint(config.vocab_size, (37,)).tolist()
    edit = partial(change_tensors, change=merged_experts) if merge else None
    ours = saved_and_loaded(theirs, kernels, edit)
    require_parity(ours, theirs, prompt, chunks)
    assert torch.equal(Bench(ours).logits(prompt, [1, 5, 20]), Bench(ours).logits(prompt, [1] * 36))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_text_part_of_a_model_that_also_sees(tmp_path, sparse, tied):
    text = without_dense_size(TINY) | EXPERTS if sparse else TINY
    text = text | {"rope_parameters": PUBLISHED_ROPE, "tie_word_embeddings": tied}
    if sparse:
        config = Qwen3_5MoeConfig(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
        theirs = Qwen3_5MoeForConditionalGeneration(config)
    else:
        config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
        theirs = Qwen3_5ForConditionalGeneration(config)
    theirs = randomised(theirs, seed=1)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.language_model.embed_tokens.weight" in tensors
    assert any(name.startswith("model.visual.") for name in tensors)
    change_tensors(
        tmp_path, lambda tensors: merged_experts(tensors) | {"mtp.fc.weight": torch.zeros(32, 64)}
    )
    ours = load(tmp_path)
    prompt = torch.randint(61, (29,)).tolist()
    require_logits(ours, theirs, prompt, [7, 13])


def test_qwen3_5_normalises_the_weights_of_experts_whatever_its_config_says(tmp_path):
    sizes = without_dense_size(TINY) | EXPERTS
    theirs = transformers_model(Qwen3_5MoeTextConfig(**sizes), seed=2)
    passed_over = {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [0]}
    prompt = torch.randint(61, (29,)).tolist()
    require_logits_of_edited(tmp_path, theirs, passed_over, prompt, [11])


def test_a_config_as_qwen3_next_is_published(tmp_path):
    """Old key names; no ``layer_types``, but an interval; a head that predicts several tokens."""
    sizes = {key: value for key, value in TINY.items() if key != "layer_types"}
    config = Qwen3NextConfig(**sizes | EXPERTS | {"num_hidden_layers": 5})
    theirs = transformers_model(config, seed=2)
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.pop("layer_types") == [LINEAR, LINEAR, LINEAR, FULL, LINEAR]
    rope = written.pop("rope_parameters")
    written |= {
        "full_attention_interval": 4,
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
        "torch_dtype": written.pop("dtype"),
    }
    (tmp_path / "config.json").write_text(json.dumps(written))
    change_tensors(tmp_path, lambda tensors: tensors | {"mtp.norm.weight": torch.zeros(32)})
    ours = load(tmp_path)
    prompt = torch.randint(61, (29,)).tolist()
    require_logits(ours, theirs, prompt, [11])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_in_every_company(tmp_path, dtype):
    """Chunks of a prompt beside another slot's rows: experts see other numbers of rows."""
    sizes = without_dense_size(TINY) | EXPERTS
    transformers_model(Qwen3_5MoeTextConfig(**sizes), seed=3).save_pretrained(tmp_path)
    for kernels in BACKENDS:
        ours = load(tmp_path, kernels, dtype=dtype)
        prompt, other = torch.randint(61, (2, 70)).tolist()
        whole = Bench(ours).logits(prompt, [])
        assert torch.equal(Bench(ours).logits(prompt, [1] * 69), whole)
        bench = Bench(ours, num_slots=2)
        bench.run(prompt[:40], 0, slot=1)
        together = run_both(bench, (other[:23], 0), (prompt[40:], 40))
        assert torch.equal(together[23:], whole[40:])


def run_both(bench: Bench, first: tuple[list[int], int], second: tuple[list[int], int]):
    """Logits of rows of slot 0 and of slot 1, computed in one pass."""
    token_ids = torch.tensor(first[0] + second[0])
    runs = [(slot, start, len(ids)) for slot, (ids, start) in enumerate((first, second))]
    rows = ragged_rows(runs, bench.sequences.block_table, bench.sequences.block_size)
    return bench.model.compute_logits(bench.model.forward(token_ids, rows, bench.kv).last)
