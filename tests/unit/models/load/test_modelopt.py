"""Model Optimizer's checkpoints mean what compressed-tensors' of the same values mean."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.checkpoints import read_checkpoint, write_checkpoint
from helpers.compressed import written
from helpers.forward import Bench, load
from helpers.quantized import FLOAT, NVFP4, STATIC
from sametoken.errors import CheckpointError, SametokenError
from sametoken.models.load.by_target import ByTarget
from sametoken.models.load.fp8_linear import Fp8Linear
from sametoken.models.load.nvfp4_linear import MODELOPT, Nvfp4Linear
from sametoken.models.load.quantization import kv_strategy, read_quantization

TOKENS = [3, 40, 17, 5, 5, 21, 0]
EIGHT = {"dynamic": False, "num_bits": 8, "type": "float"}
FOUR = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
FLOAT8 = {"input_activations": EIGHT, "weights": EIGHT, "targets": ["Linear"]}
SIXTEENTHS = {"input_activations": FOUR, "weights": FOUR, "targets": ["Linear"]}
KV = {"kv_cache_scheme": EIGHT}
UP = ("gate", "up", "down")


def quantization(group: dict, **more) -> dict:
    """``quantization_config`` as Model Optimizer converts its own."""
    return {
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "model.layers.0.mlp.gate*"],
        "quant_algo": "FP8",
        "producer": {"name": "modelopt", "version": "0.41.0"},
        "quant_method": "modelopt",
    } | more


def logits_of(folder) -> torch.Tensor:
    return Bench(load(folder), max_len=16).logits(TOKENS, [])


def as_modelopt(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    module, _, kind = name.rpartition(".")
    if kind == "weight_packed":
        return f"{module}.weight", tensor
    if kind == "weight_global_scale":
        return f"{module}.weight_scale_2", tensor.reshape(()).reciprocal()
    return name, tensor


def both_forms(folder, group: dict, theirs: dict, rename=as_modelopt, ignore=("lm_head",)):
    """A checkpoint that compressed-tensors wrote, and its values in Model Optimizer's form.

    ``rename`` gives a tensor's new name and value.
    """
    old = folder / "old"
    written(old, {"group_0": {"targets": ["Linear"], **group}}, ignore)
    config, tensors = read_checkpoint(old)
    config["quantization_config"] = quantization(theirs)
    renamed = dict(rename(*one) for one in tensors.items())
    return old, write_checkpoint(folder / "new", config, renamed)


TENSOR = {"weights": FLOAT | {"strategy": "tensor"}, "input_activations": STATIC}


@pytest.mark.parametrize(
    ("group", "theirs"),
    [
        (TENSOR, FLOAT8),
        ({"weights": NVFP4}, SIXTEENTHS),
        ({"weights": NVFP4}, {"weights": FOUR, "targets": ["Linear", "Experts"]}),
    ],
)
def test_values_are_those_of_compressed_tensors(tmp_path, group, theirs):
    old, new = both_forms(tmp_path, group, theirs)
    assert torch.equal(logits_of(new), logits_of(old))


LINEARS = (*(f"self_attn.{one}_proj" for one in "qkvo"), *(f"mlp.{one}_proj" for one in UP))
BY_LAYER = {
    f"model.layers.{index}.{name}": {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    for index in range(2)
    for name in LINEARS
}


def told_by_a_file(folder, quantization: dict) -> None:
    """Write what Model Optimizer wrote until 2025."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    own = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))


@pytest.mark.parametrize(
    ("group", "told"),
    [
        (TENSOR, {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}),
        ({"weights": NVFP4}, {"quant_algo": "NVFP4", "group_size": 16}),
        ({"weights": NVFP4}, {"quant_algo": "MIXED_PRECISION", "quantized_layers": BY_LAYER}),
    ],
)
def test_a_file_of_its_own_says_the_same(tmp_path, group, told):
    old, new = both_forms(tmp_path, group, {})
    told_by_a_file(new, told)
    assert torch.equal(logits_of(new), logits_of(old))


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"quant_algo": "INT8_SQ"}, "quant_algo='INT8_SQ'"),
        ({"quant_algo": ["FP8"]}, "quant_algo="),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size': 32"),
        ({"quant_algo": "NVFP4", "group_size": "16"}, "group_size='16'"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": "FP8"}}, "a.b"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {}}}, "MIXED_PRECISION"),
    ],
)
def test_a_file_of_its_own_that_cannot_be_read_is_refused(tmp_path, told, named):
    written(tmp_path, {"group_0": {"targets": ["Linear"], "weights": NVFP4}})
    told_by_a_file(tmp_path, told)
    with pytest.raises(SametokenError, match=named):
        load(tmp_path)


def test_a_linear_without_scales_is_not_quantized(tmp_path):
    """Whatever ``ignore`` says, whose names may have wildcards."""
    ignore = ["lm_head", "re:.*gate.*"]
    old, new = both_forms(tmp_path, {"weights": NVFP4}, SIXTEENTHS, ignore=ignore)
    assert torch.equal(logits_of(new), logits_of(old))


def test_layers_of_both_kinds():
    names = {"layers.0.q_proj": FLOAT8, "layers.0.up_proj": SIXTEENTHS}
    groups = {name: group | {"targets": [name]} for name, group in names.items()}
    config = quantization({}, config_groups=groups, quant_algo="MIXED_PRECISION", **KV)
    formats = read_quantization({"quantization_config": config}, "config.json")
    assert isinstance(formats, ByTarget)
    assert kv_strategy({"quantization_config": config}, "config.json") == "tensor"
    assert formats.format_named("layers.0.q_proj") == Fp8Linear(
        "tensor", "tensor", ("weight_scale",)
    )
    assert formats.format_named("layers.0.up_proj") == Nvfp4Linear(MODELOPT)
    assert formats.format_named("layers.0.down_proj") is None


@pytest.mark.parametrize(
    ("group", "more", "named"),
    [
        (SIXTEENTHS | {"weights": FOUR | {"group_size": 128}}, {}, "group_size.*128"),
        (SIXTEENTHS | {"input_activations": EIGHT}, {}, "input_activations"),
        (FLOAT8 | {"weights": EIGHT | {"type": "int"}}, {}, "type"),
        (FLOAT8 | {"pre_quant_scale": True}, {}, "pre_quant_scale"),
        (FLOAT8, {"rotation": True}, "rotation"),
        (FLOAT8, {"config_groups": {}, "quant_algo": "FP8_PB_WO"}, "FP8_PB_WO"),
        (FLOAT8, {"config_groups": {"group_0": "FP8"}}, "group_0"),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_key(group, more, named):
    with pytest.raises(SametokenError, match=named):
        read_quantization({"quantization_config": quantization(group, **more)}, "config.json")


def test_a_matrix_without_its_factor_is_refused(tmp_path):
    def without_factor(name, tensor):
        name, tensor = as_modelopt(name, tensor)
        return name.replace("up_proj.weight_scale_2", "up_proj.other"), tensor

    _, new = both_forms(tmp_path, {"weights": NVFP4}, SIXTEENTHS, without_factor)
    with pytest.raises(CheckpointError, match="up_proj"):
        load(new)
