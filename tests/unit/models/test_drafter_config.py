"""The drafter's checkpoint tells its method and its k; what is given stays as it is."""

from __future__ import annotations

import json

import pytest

from helpers.checkpoints import (
    LLAMA,
    eagle1_tensors,
    head_tensors,
    write_eagle1,
    write_eagle1_speculators,
    write_llama,
    write_safeailab,
    write_speculators,
)
from helpers.state_heads import write_medusa, write_mlp
from sametoken.config import SpeculativeConfig
from sametoken.errors import CheckpointError, ConfigError
from sametoken.models.drafter_config import complete_drafter
from sametoken.models.names import HEAD_DIRECTORY


def proposal(k) -> dict:
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": k}]}}


def completed(path, **given) -> SpeculativeConfig:
    spec, reasons = complete_drafter(SpeculativeConfig(model=str(path), **given))
    assert spec.method in reasons["speculative_config"]
    return spec


@pytest.mark.parametrize(
    ("write", "method"),
    [
        (lambda path: write_speculators(path, head_tensors()), "eagle3"),
        (lambda path: write_safeailab(path, head_tensors()), "eagle3"),
        (lambda path: write_safeailab(path, head_tensors(full_vocab=True)), "eagle3"),
        (lambda path: write_eagle1_speculators(path, eagle1_tensors()), "eagle"),
        (lambda path: write_eagle1(path, eagle1_tensors()), "eagle"),
        (write_llama, "draft_model"),
        (lambda path: write_medusa(path, num_heads=4), "medusa"),
        (lambda path: write_medusa(path, num_heads=4, architectures=None), "medusa"),
        (
            lambda path: write_medusa(
                path, architectures=None, model_type=None, num_heads=None, medusa_num_heads=4
            ),
            "medusa",
        ),
        (lambda path: write_mlp(path, n_predict=4), "mlp_speculator"),
    ],
    ids=[
        *("speculators", "SafeAILab", "whole vocabulary", "EAGLE speculators", "EAGLE", "Llama"),
        *("Medusa", "Medusa by model type", "FasterDecoding", "MLP speculator"),
    ],
)
def test_the_checkpoint_tells_the_method(tmp_path, write, method):
    spec = completed(write(tmp_path / "drafter"))
    assert (spec.method, spec.num_speculative_tokens, spec.is_complete) == (method, 4, True)


@pytest.mark.parametrize("named", [5, {"first": "LlamaForCausalLM"}, [], [None]])
def test_a_config_without_a_list_of_architectures_is_told_by_its_tensors(tmp_path, named):
    path = write_eagle1(tmp_path / "head", eagle1_tensors(), architectures=named)
    assert completed(path).method == "eagle"


def test_a_gguf_file_is_a_draft_model(tmp_path):
    (tmp_path / "small.gguf").touch()
    assert completed(tmp_path / "small.gguf").method == "draft_model"


@pytest.mark.parametrize("architecture", ["Qwen3NextMTP", "DeepseekV3ForCausalLMNextN"])
def test_a_checkpoint_of_an_mtp_module_is_refused_with_the_reason(tmp_path, architecture):
    config = LLAMA | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'mtp' loads no drafter") as caught:
        completed(tmp_path)
    assert 'leave "model" out' in caught.value.remedy


def test_the_head_tells_its_k_unless_one_is_given(tmp_path):
    head = write_speculators(tmp_path / "head", head_tensors(), **proposal(7))
    assert completed(head).num_speculative_tokens == 7
    assert completed(head, method="eagle3").num_speculative_tokens == 7
    assert completed(head, num_speculative_tokens=2).num_speculative_tokens == 2
    assert completed(HEAD_DIRECTORY).num_speculative_tokens == 4
    assert completed(write_medusa(tmp_path / "medusa")).num_speculative_tokens == 3
    raw = write_medusa(tmp_path / "raw", num_heads=None, medusa_num_heads=2)
    assert completed(raw, method="medusa").num_speculative_tokens == 2
    assert completed(write_mlp(tmp_path / "mlp")).num_speculative_tokens == 3


@pytest.mark.parametrize("k", [0, 65, "5", None, True])
def test_an_impossible_k_of_a_head_is_passed_over(tmp_path, k):
    head = write_speculators(tmp_path / "head", head_tensors(), **proposal(k))
    assert completed(head).num_speculative_tokens == 4


def test_a_key_that_the_method_does_not_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'draft_model' takes no token_map"):
        completed(write_llama(tmp_path / "small"), token_map="map.json")


def test_a_broken_config_is_a_typed_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        completed(tmp_path)


def test_what_is_complete_is_not_looked_up(tmp_path):
    spec = SpeculativeConfig("eagle3", 3, str(tmp_path / "nowhere"))
    assert complete_drafter(spec) == (spec, {})
    assert complete_drafter(None) == (None, {})
