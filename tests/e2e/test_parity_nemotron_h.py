"""Nemotron-H computes what transformers computes, whatever its pattern and its config's form."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NemotronHConfig, NemotronHForCausalLM

from helpers.checkpoints import change_tensors
from helpers.forward import Bench
from helpers.parity import BACKENDS, drawn_models, require_parity, saved_and_loaded

MAMBA, FULL, MOE, MLP = "linear_attention", "full_attention", "moe", "mlp"
LETTERS = {MAMBA: "M", FULL: "*", MOE: "E", MLP: "-"}
OLD_NAMES = {MAMBA: "mamba", FULL: "attention", MOE: "moe", MLP: "mlp"}


@st.composite
def architectures(draw):
    """A small random config; its cache in transformers cannot do without attention."""
    others = draw(st.lists(st.sampled_from([MAMBA, MAMBA, MOE, MLP, FULL]), max_size=4))
    kinds = draw(st.permutations([FULL, *others]))
    num_groups, num_experts = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([3, 6]))
    groups = draw(st.sampled_from([1, 3]))
    num_kv_heads = draw(st.sampled_from([1, 2]))
    return NemotronHConfig(
        vocab_size=draw(st.sampled_from([61, 128])),
        hidden_size=draw(st.sampled_from([24, 40])),
        layers_block_type=kinds,
        num_attention_heads=num_kv_heads * draw(st.sampled_from([1, 2])),
        num_key_value_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([8, 16])),
        intermediate_size=draw(st.sampled_from([20, 32])),
        mamba_num_heads=num_groups * draw(st.sampled_from([1, 2])),
        mamba_head_dim=draw(st.sampled_from([12, 16])),
        n_groups=num_groups,
        ssm_state_size=draw(st.sampled_from([5, 16, 24])),
        conv_kernel=draw(st.sampled_from([2, 4])),
        use_conv_bias=draw(st.booleans()),
        use_bias=draw(st.booleans()),
        chunk_size=8,
        # transformers clamps by it the steps of prompts, and not those of decoded rows.
        time_step_min=1e-30,
        n_routed_experts=num_experts,
        n_group=groups if num_experts == 6 else 1,
        topk_group=1,
        num_experts_per_tok=draw(st.sampled_from([1, 2])),
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        moe_intermediate_size=draw(st.sampled_from([12, 20])),
        moe_shared_expert_intermediate_size=draw(st.sampled_from([8, 20])),
        moe_latent_size=draw(st.sampled_from([None, 16])),
        layer_norm_epsilon=draw(st.sampled_from([1e-5, 1e-2])),
        max_position_embeddings=128,
        eos_token_id=None,
    )


def transformers_model(config, seed: int):
    torch.manual_seed(seed)
    model = NemotronHForCausalLM._from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight") or "norm_f" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim == 1 else 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return model


def rewritten(directory: Path, form: str) -> None:
    """config.json in an older form: a pattern of letters, older names, or Puzzle's blocks."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    if form == "new":
        return
    kinds = config.pop("layers_block_type")
    config |= {"rope_theta": 10000, "partial_rotary_factor": 1.0}
    if form == "pattern":
        config["hybrid_override_pattern"] = "".join(LETTERS[kind] for kind in kinds)
        config["num_hidden_layers"] = len(kinds)
        config["time_step_limit"] = [0.0, float("inf")]
        config["mamba_n_groups"] = config.pop("n_groups")
        config["mamba_d_conv"] = config.pop("conv_kernel")
    elif form == "old names":
        config["layers_block_type"] = [OLD_NAMES[kind] for kind in kinds]
    else:
        keys = ("moe_intermediate_size", "num_experts_per_tok")
        own = {key: config.pop(key) for key in keys}
        blocks = [{"block_type": OLD_NAMES[kind], **(own if kind == MOE else {})} for kind in kinds]
        config["block_configs"] = blocks
        config["architectures"] = ["NemotronHPuzzleForCausalLM"]
        change_tensors(
            directory, lambda old: {n.replace("backbone.", "model."): t for n, t in old.items()}
        )
    file.write_text(json.dumps(config))


@drawn_models(9)
@given(
    config=architectures(),
    seed=st.integers(0, 2**20),
    kernels=st.sampled_from(BACKENDS),
    chunks=st.lists(st.integers(1, 12), max_size=4),
    form=st.sampled_from(["new", "pattern", "old names", "puzzle"]),
)
def test_random_models_agree(config, seed, kernels, chunks, form):
    theirs = transformers_model(config, seed)
    prompt = torch.randint(config.vocab_size, (37,)).tolist()
    ours = saved_and_loaded(theirs, kernels, partial(rewritten, form=form))
    require_parity(ours, theirs, prompt, chunks)
    assert torch.equal(Bench(ours).logits(prompt, [1, 5, 20]), Bench(ours).logits(prompt, [1] * 36))
