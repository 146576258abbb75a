"""The frozen target of training against the engine's own model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import LLAMA, VOCAB, random_weight, write_checkpoint, write_llama
from sametoken import LLM, SamplingParams
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.extraction.shards import ExtractedStates
from sametoken.train.compute import Compute
from sametoken.train.target import FrozenTarget, open_target, require_layers

CPU = torch.device("cpu")
EXACT = Compute(CPU, torch.float32)
OPTIONS = {"aux_layers": (0, 2, 4), "max_positions": 64}


def write_qwen3(directory):
    write_llama(directory, 5)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(6)
    for index in range(LLAMA["num_hidden_layers"]):
        for name in ("q_norm", "k_norm"):
            weight = random_weight(generator, LLAMA["head_dim"])
            tensors[f"model.layers.{index}.self_attn.{name}.weight"] = weight
    config = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
    return write_checkpoint(directory, config, tensors)


def extracted(model, directory, dtype: str, prompts: list[list[int]]) -> ExtractedStates:
    options = {
        "method": "extract_hidden_states",
        "shared_storage_path": str(directory),
        "eagle_aux_hidden_state_layer_ids": [0, 2, 4],
    }
    llm = LLM(
        str(model), skip_tokenizer_init=True, device="cpu", dtype=dtype, speculative_config=options
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return ExtractedStates(directory)


@pytest.mark.parametrize(
    ("write", "dtype", "tolerance"),
    [
        (write_llama, "float32", 1e-5),
        (write_qwen3, "float32", 1e-5),
        (write_llama, "bfloat16", 0.03),
    ],
    ids=["llama", "qwen3", "llama-bf16"],
)
def test_its_states_are_the_engine_s(tmp_path, write, dtype, tolerance):
    model = write(tmp_path / "model")
    prompts = [[1, 2, 3], [7, 5, 3, 2, 1, 0, 4], [22]]
    states = extracted(model, tmp_path / "states", dtype, prompts)
    target = FrozenTarget(open_target(model), Compute(CPU, getattr(torch, dtype)), **OPTIONS)
    for index in range(len(states)):
        one = states[index]
        found = target.states(one.token_ids[None, :-1]).auxiliary[0].float()
        wanted = one.hidden_states.flatten(1).float()
        error = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert error.max() < tolerance


def test_padding_changes_no_row_before_it(tmp_path):
    target = FrozenTarget(open_target(write_llama(tmp_path)), EXACT, **OPTIONS)
    short = torch.tensor([[3, 1, 4, 1, 5]])
    padded = torch.cat((short, torch.full((1, 6), 9)), dim=1)
    torch.testing.assert_close(
        target.states(padded).last[:, :5], target.states(short).last, rtol=0, atol=1e-5
    )


def test_a_tied_target_has_one_embedding(tmp_path):
    write_llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    target = FrozenTarget(open_target(tmp_path), EXACT, **OPTIONS)
    assert target.head is target.embedding
    assert target.head.shape[0] == VOCAB


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, UnsupportedError, "or 'Qwen3For"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, UnsupportedError, "cannot be a target"),
        ({"num_hidden_layers": 5}, CheckpointError, r"layers\.4"),
        ({"num_hidden_layers": 3}, UnsupportedError, "does not use"),
        ({"vocab_size": VOCAB + 1}, CheckpointError, "embed_tokens"),
        ({"num_attention_heads": 4, "num_key_value_heads": 1}, CheckpointError, "q_proj"),
    ],
)
def test_what_it_cannot_run_is_refused_by_name(tmp_path, changes, error, says):
    write_llama(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA | changes))
    with pytest.raises(error, match=says):
        open_target(tmp_path)


def test_layers_that_it_lacks_are_refused(tmp_path):
    config = open_target(write_llama(tmp_path)).config
    require_layers((0, 2, 4), config)
    with pytest.raises(ConfigError, match="no layers"):
        require_layers((0, 2, 5), config)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value):
    write_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight .* holds NaN"):
        FrozenTarget(open_target(tmp_path), EXACT, **OPTIONS)
