"""Adapters in PEFT's format: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.load import adapter
from sametoken.models.load.adapter import open_adapter, read_adapter_config
from sametoken.models.safetensors_file import write_safetensors

Q, V = "layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj"
DOWN = f"base_model.model.model.{Q}.lora_A.weight"
UP = DOWN.replace("lora_A", "lora_B")
#: What PEFT 0.21 writes beside the settings of a test.
OF_TRAINING = {
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "auto_mapping": {"base_model_class": "LlamaForCausalLM"},
    "base_model_name_or_path": "tiny/llama",
    "bias": "none",
    "ensure_weight_tying": False,
    "eva_config": {"rho": 2.0},
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": "eva",
    "layers_to_transform": [0, 1],
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "switch_of_a_later_version": False,
    "target_modules": ["v_proj", "q_proj"],
    "task_type": "CAUSAL_LM",
    "use_dora": False,
}


def factors(*modules: str, prefix: str = "model.", adapter: str = ""):
    """Tensors of modules with 6 inputs and 10 outputs."""
    shapes = {"A": (4, 6), "B": (10, 4)}
    return {
        f"base_model.model.{prefix}{module}.lora_{factor}{adapter}.weight": torch.randn(shape)
        for module in modules
        for factor, shape in shapes.items()
    }


def write(path: Path, tensors: dict[str, Tensor] | None = None, **settings) -> Path:
    path.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | settings
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors = factors(Q, V) if tensors is None else tensors
    write_safetensors(path / "adapter_model.safetensors", tensors)
    return path


def test_factors_are_those_of_the_file(tmp_path):
    tensors = factors(Q, V)
    tensors[DOWN] = tensors[DOWN].bfloat16()
    found = open_adapter(write(tmp_path, tensors, **OF_TRAINING)).read()
    assert found.location == str(tmp_path)
    assert found.modules.keys() == {Q, V}
    assert found.modules[Q].down.dtype == torch.bfloat16
    assert torch.equal(found.modules[Q].down, tensors[DOWN])
    assert torch.equal(found.modules[Q].up, tensors[UP])
    assert found.modules[V].scale == 2.0


def test_pickled_factors_are_the_same(tmp_path):
    tensors = factors(Q)
    path = write(tmp_path, tensors)
    (path / "adapter_model.safetensors").unlink()
    torch.save(tensors, path / "adapter_model.bin")
    found = open_adapter(path).read().modules[Q]
    assert torch.equal(found.down, tensors[DOWN])
    assert torch.equal(found.up, tensors[UP])


def test_files_that_are_written_meanwhile_are_refused(tmp_path, monkeypatch):
    """A trainer saves its next step: between the two files, or over tensors that are mapped."""
    for suffix in ("safetensors", "bin"):
        path = write(tmp_path / suffix)
        weights = path / f"adapter_model.{suffix}"
        if suffix == "bin":
            torch.save(load_file(path / "adapter_model.safetensors"), weights)
            (path / "adapter_model.safetensors").unlink()
        again = weights.read_bytes()
        for name, left in (("read_adapter_config", again), ("_copy", b"")):
            own = getattr(adapter, name)

            def overtaken(*given, own=own, left=left, weights=weights):
                weights.write_bytes(left)
                return own(*given)

            with monkeypatch.context() as patch:
                patch.setattr(adapter, name, overtaken)
                with pytest.raises(CheckpointError, match="written while it was read"):
                    open_adapter(path).read()
            weights.write_bytes(again)
        assert open_adapter(path).read().modules.keys() == {Q, V}


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "model.",
        "backbone.",
        "language_model.",
        "model.language_model.",
        "language_model.model.",
    ],
)
@pytest.mark.parametrize("adapter", ["", ".default"])
def test_a_module_is_named_from_its_layer_on(tmp_path, prefix, adapter):
    path = write(tmp_path, factors(Q, prefix=prefix, adapter=adapter))
    assert open_adapter(path).read().modules.keys() == {Q}


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"use_rslora": True}, 4.0),
        ({"lora_alpha": None}, 2.0),
        ({"alpha_pattern": {"q_proj": 3, Q: 5}}, 0.75),
        ({"alpha_pattern": {r"layers\.[0-3]\.self_attn\.q_proj": 3}}, 0.75),
        ({"alpha_pattern": {f"^model.{Q}": 3}, "use_rslora": True}, 1.5),
        ({"alpha_pattern": {f"^{Q}": 3, "proj": 3, "self_attn": 3, "k_proj|v_proj": 3}}, 2.0),
        ({"r": 7, "rank_pattern": {"q_proj": 4, "self_attn.q_proj": 9}}, 2.0),
        ({"r": 16, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 2}}, 0.5),
    ],
)
def test_patterns_and_scales_are_peft_s(tmp_path, settings, scale):
    """A pattern is the whole name or its end from a dot on; the first one that matches counts."""
    path = write(tmp_path, factors(Q), **settings)
    assert open_adapter(path).read().modules[Q].scale == scale


@pytest.mark.parametrize(
    "setting",
    [
        {"peft_type": "ADALORA"},
        {"use_dora": True},
        {"bias": "lora_only"},
        {"fan_in_fan_out": True},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [3]},
        {"layer_replication": [[0, 2], [1, 3]]},
        {"use_qalora": True},
        {"alora_invocation_tokens": [5, 6]},
        {"megatron_config": {"num_layers": 2}},
        {"kasa_config": {"beta": 1e-4}},
        {"use_rslora": "yes"},
        {"setting_of_a_later_version": 1},
        *({"init_lora_weights": name} for name in ("pissa", "pissa_niter_4", "olora", "corda")),
        *({"init_lora_weights": name} for name in ("loftq", "lora_ga")),
        {"r": 513},
        {"rank_pattern": {"q_proj": 513}},
    ],
)
def test_what_would_change_the_result_is_refused_before_tensors_are_read(tmp_path, setting):
    path = write(tmp_path, **setting)
    (path / "adapter_model.safetensors").write_bytes(b"no tensors")
    (key,) = setting
    with pytest.raises(UnsupportedError, match=rf"config\.json: {key}.* not supported") as caught:
        open_adapter(path).read()
    assert "merge it into its model" in caught.value.remedy


def test_the_remedy_for_changed_weights_is_peft_s_conversion(tmp_path):
    with pytest.raises(UnsupportedError) as caught:
        open_adapter(write(tmp_path, init_lora_weights="pissa")).read()
    assert "path_initial_model_for_weight_conversion" in caught.value.remedy


def test_a_model_is_no_adapter(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds no adapter_config\.json") as caught:
        read_adapter_config(tmp_path)
    assert "PEFT" in caught.value.remedy


def test_an_alpha_beyond_any_use_is_refused(tmp_path):
    for settings in ({"lora_alpha": 1e30}, {"alpha_pattern": {"q_proj": 1e30}}):
        with pytest.raises(UnsupportedError, match=r"1e\+30 is not supported"):
            open_adapter(write(tmp_path, **settings)).read()


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"peft_type": None}, "names no peft_type"),
        ({"peft_type": ""}, "names no peft_type"),
        ({"r": 0}, "r=0 is not a positive integer"),
        ({"r": "4"}, "r='4' is not"),
        ({"r": False}, "r=False is not"),
        ({"lora_alpha": "8"}, "lora_alpha='8' is not a number"),
        ({"lora_alpha": 1e400}, "lora_alpha=inf is not"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj=0 is not"),
        ({"rank_pattern": [4]}, r"rank_pattern=\[4\] is not an object"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern: q_proj=None is not"),
        ({"alpha_pattern": {"(": 1}}, "no regular expression"),
    ],
)
def test_impossible_settings_are_refused(tmp_path, settings, cause):
    with pytest.raises(CheckpointError, match=cause):
        open_adapter(write(tmp_path, **settings)).read()


@pytest.mark.parametrize(
    "name",
    [
        DOWN.removeprefix("base_model.model."),
        DOWN.replace(Q, "lm_head"),
        DOWN.replace(f"model.{Q}", f"mtp.{Q}"),
        DOWN.replace("layers.0", "layers.\N{ARABIC-INDIC DIGIT ZERO}"),
        DOWN.replace(f"model.{Q}", f"vision_tower.encoder.{Q}"),
        DOWN.replace(f"{Q}.lora_A.weight", "embed_tokens.lora_embedding_A"),
        DOWN.replace("lora_A.weight", "lora_magnitude_vector"),
        DOWN.replace("lora_A.weight", "lora_B.bias"),
        DOWN.replace("lora_A", "lora_A.another"),
        DOWN.replace("lora_A", "base_layer"),
    ],
)
def test_other_tensors_are_named_and_refused(tmp_path, name):
    path = write(tmp_path, factors(Q) | {name: torch.ones(4, 6)})
    with pytest.raises(UnsupportedError) as caught:
        open_adapter(path).read()
    assert name in caught.value.cause


def test_a_module_has_both_factors_once(tmp_path):
    tensors = factors(Q)
    with pytest.raises(CheckpointError, match="in two ways"):
        open_adapter(write(tmp_path, tensors | factors(Q, adapter=".default"))).read()
    half = {DOWN: tensors[DOWN], UP.replace("model.layers", "layers"): tensors[UP]}
    with pytest.raises(CheckpointError, match="in two ways"):
        open_adapter(write(tmp_path, half)).read()
    for name in (DOWN, UP):
        with pytest.raises(CheckpointError, match=f"holds {name} without its pair"):
            open_adapter(write(tmp_path, {name: tensors[name]})).read()
    with pytest.raises(CheckpointError, match="holds no tensors"):
        open_adapter(write(tmp_path, {})).read()


@pytest.mark.parametrize(
    ("name", "tensor", "cause"),
    [
        (DOWN, torch.ones(3, 6), r"shape \[3, 6\], not \[r, in_features\] with the r of 4"),
        (UP, torch.ones(10, 5), r"shape \[10, 5\], not \[out_features, r\]"),
        (DOWN, torch.ones(4), r"shape \[4\]"),
        (DOWN, torch.ones(4, 6, 1), r"shape \[4, 6, 1\]"),
        (UP, torch.ones(0, 4), r"shape \[0, 4\]"),
        (DOWN, torch.full((4, 6), torch.nan), "NaN or infinite"),
        (UP, torch.full((10, 4), -torch.inf).half(), "NaN or infinite"),
    ],
)
def test_broken_factors_are_refused(tmp_path, name, tensor, cause):
    with pytest.raises(CheckpointError, match=cause) as caught:
        open_adapter(write(tmp_path, factors(Q) | {name: tensor})).read()
    assert name in caught.value.cause


EXPERTS = "layers.0.mlp.experts"
BOTH = ["experts.down_proj", "gate_up_proj"]


def stacks(*wrapped: str, rank: int = 4) -> dict[str, Tensor]:
    """Of parameters of three experts with 6 inputs and 10 outputs."""
    return {
        f"base_model.model.model.{EXPERTS}{one}.lora_{factor}.weight": torch.randn(shape)
        for one in wrapped
        for factor, shape in {"A": (rank * 3, 6), "B": (10, rank * 3)}.items()
    }


def test_stacks_of_experts_are_peft_s(tmp_path):
    """The base layer is the parameter that was wrapped first; patterns name parameters."""
    tensors = stacks(".base_layer") | stacks("", rank=2)
    settings = {"target_parameters": BOTH, "rank_pattern": {"experts.down_proj": 2}}
    settings["alpha_pattern"] = {"gate_up_proj": 12}
    found = open_adapter(write(tmp_path, tensors | factors(Q), **settings)).read()
    assert found.modules.keys() == {Q}
    assert found.changed - found.modules.keys() - found.stacks.keys() == {EXPERTS}
    assert found.rank == 4
    for wrapped, name, rank, scale in ((".base_layer", "gate_up", 4, 3), ("", "down", 2, 4)):
        down, up = (
            tensors[f"base_model.model.model.{EXPERTS}{wrapped}.lora_{x}.weight"] for x in "AB"
        )
        own = found.stacks[f"{EXPERTS}.{name}_proj"]
        assert (own.shape, own.rank, own.scale) == ((3, 10, 6), rank, scale)
        by_peft = torch.einsum("o r e, e r i -> e o i", up.view(10, rank, 3), down.view(3, rank, 6))
        torch.testing.assert_close(own.up @ own.down, by_peft)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("block_sparse_moe.experts.3.w1", "mlp.experts.3.gate_proj"),
        ("block_sparse_moe.gate", "mlp.gate"),
        ("mlp.experts.3.w3", "mlp.experts.3.up_proj"),
        ("experts.3.w2", "experts.3.down_proj"),
        ("mlp.shared_experts.w1", "mlp.shared_experts.w1"),
    ],
)
def test_mixtral_s_modules_have_the_names_that_came_after(tmp_path, one, other):
    found = open_adapter(write(tmp_path, factors(f"layers.0.{one}"))).read()
    assert found.modules.keys() == {f"layers.0.{other}"}


@pytest.mark.parametrize(
    ("tensors", "parameters", "cause"),
    [
        (stacks(""), (), "1 parameters of .*experts', and target_parameters names none"),
        (stacks(""), BOTH, "1 parameters of .* names gate_up_proj, down_proj"),
        (stacks("", ".base_layer"), BOTH[:1], "2 parameters of .* names down_proj"),
        (stacks(".base_layer"), BOTH[:1], "1 parameters of .* names down_proj"),
        (stacks("", rank=5), BOTH[:1], r"shape \[15, 6\], not \[r, in_features\]"),
        (
            stacks("") | factors(f"{EXPERTS}.0.up_proj"),
            BOTH[:1],
            r"names layers\.0\.mlp\.experts in two",
        ),
        (
            factors("layers.0.block_sparse_moe.experts.0.w2", f"{EXPERTS}.0.down_proj"),
            (),
            "in two ways",
        ),
    ],
)
def test_broken_stacks_are_refused(tmp_path, tensors, parameters, cause):
    with pytest.raises(CheckpointError, match=cause):
        open_adapter(write(tmp_path, tensors, target_parameters=list(parameters))).read()


def test_factors_of_integers_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="has dtype I8"):
        open_adapter(write(tmp_path, factors(Q) | {UP: torch.ones(10, 4).to(torch.int8)})).read()


def test_files_that_are_missing_or_broken(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere holds no adapter_config\.json"):
        open_adapter(tmp_path / "nowhere").read()
    path = write(tmp_path)
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is truncated"):
        open_adapter(path).read()
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"holds no adapter_model\.safetensors or"):
        open_adapter(path).read()
