"""Which linears a config quantizes, and configs that are refused by the name of their key."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from helpers.quantized import FLOAT, GROUP, NVFP4, STATIC, TOKEN, block_config, compressed_config
from sametoken.errors import CheckpointError, SametokenError, UnsupportedError
from sametoken.models.load.fp8_linear import Fp8Linear
from sametoken.models.load.int4_linear import Int4Linear
from sametoken.models.load.linear_format import UNQUANTIZED
from sametoken.models.load.nvfp4_linear import Nvfp4Linear
from sametoken.models.load.quantization import kv_strategy, read_quantization, require_unquantized

LAYER = "model.layers.11"


class Everything:
    """A source in which every linear is stored in float8."""

    location = "here"

    def names(self):
        return self

    def __contains__(self, name):
        return True

    def stored_dtype(self, name):
        return torch.float8_e4m3fn


def read(config: dict):
    return read_quantization({"quantization_config": config}, "config.json")


def covered(config: dict, *modules: str) -> list[bool]:
    quantization = read(config)
    return [quantization.format_of(module, Everything()) is not None for module in modules]


def test_no_config_is_unquantized():
    assert read_quantization({}, "here") is UNQUANTIZED
    assert read_quantization({"quantization_config": None}, "here") is UNQUANTIZED


def test_either_key_holds_it():
    assert read_quantization({"compression_config": compressed_config("channel")}, "here")


@pytest.mark.parametrize(
    ("ignored", "left"),
    [
        (["lm_head"], ["lm_head"]),
        ([f"{LAYER}.mlp"], [f"{LAYER}.mlp.gate", f"{LAYER}.mlp.gate_proj"]),
        ([f"{LAYER}.mlp.gate"], [f"{LAYER}.mlp.gate"]),
        (["gate"], [f"{LAYER}.mlp.gate"]),
        (["model.layers.1"], []),
        ([], []),
    ],
)
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_fp8_leaves_out_modules_by_prefix_or_ending(ignored, left, key):
    modules = ["lm_head", f"{LAYER}.mlp.gate", f"{LAYER}.mlp.gate_proj", f"{LAYER}.self_attn.q"]
    config = block_config(modules_to_not_convert=None) | {key: ignored}
    assert covered(config, *modules) == [module not in left for module in modules]


def test_fp8_agrees_with_transformers_on_what_it_leaves_out():
    from transformers.quantizers.quantizers_utils import should_convert_module

    modules = ["lm_head", f"{LAYER}.mlp.gate", f"{LAYER}.mlp.gate_proj", "model.layers.1.mlp.up"]
    for ignored in (["lm_head"], ["mlp.gate"], ["model.layers.1"], [f"{LAYER}.mlp"], ["up"]):
        expected = [should_convert_module(module, ignored) for module in modules]
        assert covered(block_config(modules_to_not_convert=ignored), *modules) == expected


def test_mxfp4_agrees_with_transformers_on_what_it_leaves_out():
    from transformers.quantizers.quantizers_utils import should_convert_module

    modules = [f"{LAYER}.mlp.experts", "model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    for ignored in (
        ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        ["model.layers.1"],
        [f"{LAYER}.mlp"],
        [r"model\.layers\.[12]\.mlp"],
        ["experts"],
        [],
    ):
        quantization = read({"quant_method": "mxfp4", "modules_to_not_convert": ignored})
        for module in modules:
            stack = quantization.stack_of(f"{module}.down_proj", Everything())
            assert (stack is not None) == should_convert_module(module, ignored), (module, ignored)
            assert quantization.format_of(f"{module}.down_proj", Everything()) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": 16}, "block_size=16"),
        ({"modules_to_not_convert": ["(a+)+b"]}, "repeats too much"),
    ],
)
def test_mxfp4_configs_that_are_refused(changes, said):
    with pytest.raises(UnsupportedError, match=re.escape(said)):
        read({"quant_method": "mxfp4"} | changes)


def groups(*targets: list[str]) -> dict:
    """One group each; they differ in how they round activations."""
    config = compressed_config("channel")
    template = config["config_groups"]["group_0"]
    kinds = (TOKEN, STATIC, GROUP)
    config["config_groups"] = {
        f"group_{i}": template | {"targets": names, "input_activations": kinds[i]}
        for i, names in enumerate(targets)
    }
    return config


def test_the_closest_target_decides_then_the_first():
    config = groups(["Linear"], ["re:.*mlp.*", f"{LAYER}.q"], [f"{LAYER}.mlp.up", f"{LAYER}.q"])
    quantization = read(config)

    def kind(module):
        return quantization.format_of(module, Everything()).activations

    assert kind(f"{LAYER}.k") == "token"
    assert kind(f"{LAYER}.mlp.down") == "tensor"
    assert kind(f"{LAYER}.mlp.up") == "group"
    assert kind(f"{LAYER}.q") == "tensor"


def test_without_a_class_only_named_modules_are_quantized():
    config = groups([f"{LAYER}.q", r"re:.*\.layers\.\d+\.mlp"])
    found = covered(config, f"{LAYER}.q", f"{LAYER}.q2", f"{LAYER}.mlp.up", "mtp.fc")
    assert found == [True, False, True, False]


def test_what_is_ignored_stays_whoever_names_it():
    config = groups(["Linear"], [f"{LAYER}.q"]) | {"ignore": [f"{LAYER}.q", "re:.*gate$"]}
    assert covered(config, f"{LAYER}.q", f"{LAYER}.mlp.gate", f"{LAYER}.k") == [False, False, True]


def test_a_group_may_name_its_own_format():
    config = compressed_config("channel", format="mixed-precision")
    config["config_groups"]["group_0"]["format"] = "float-quantized"
    assert covered(config, f"{LAYER}.q") == [True]


def test_fp8_without_blocks_has_one_scale_a_tensor():
    quantization = read(block_config(weight_block_size=None, activation_scheme="static"))
    assert quantization.format_of("x", Everything()) == Fp8Linear(
        "tensor", "tensor", ("weight_scale_inv", "weight_scale")
    )


def changed(config: dict, path: str, value: object) -> dict:
    """A config with one value changed; ``path`` goes through the first group."""
    config = copy.deepcopy(config)
    inner, names = config, path.split(".")
    if len(names) > 1 or path in ("targets", "input_activations", "output_activations"):
        inner = config["config_groups"]["group_0"]
    for name in names[:-1]:
        inner = inner[name]
    inner[names[-1]] = value
    return config


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM", "zero_point": True}
#: As AutoRound 0.12 writes Intel's checkpoints.
AUTO_ROUND = {
    "autoround_version": "0.12.3",
    "bits": 4,
    "block_name_to_quantize": "model.language_model.layers",
    "data_type": "int",
    "group_size": 128,
    "iters": 0,
    "low_gpu_mem_usage": True,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "seqlen": 256,
    "sym": True,
}
PACKED = compressed_config("channel", None, format="pack-quantized")
PACKED["config_groups"]["group_0"]["weights"] = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 128,
    "symmetric": True,
    "actorder": "weight",
}
NVFP4_PACKED = changed(PACKED, "format", "nvfp4-pack-quantized")
NVFP4_PACKED["config_groups"]["group_0"]["weights"] = NVFP4
CHANNEL, BLOCK = compressed_config("channel"), compressed_config("block", GROUP)
REFUSED = [
    (block_config(), "quant_method", "bitsandbytes"),
    (block_config(), "quant_method", None),
    (block_config(), "fmt", "e5m2"),
    (block_config(), "weight_block_size", [64, 64]),
    (block_config(), "weight_block_size", "128"),
    (block_config(), "activation_scheme", "later"),
    (block_config(), "scale_fmt", "ue4m3"),
    (block_config(activation_scheme="static"), "scale_fmt", "ue8m0"),
    (block_config(weight_block_size=None), "scale_fmt", "ue8m0"),
    (block_config(), "expert_dtype", "fp4"),
    (block_config(), "modules_to_convert", ["embed"]),
    (block_config(), "modules_to_not_convert", "lm_head"),
    (block_config(), "surprise", 1),
    (GPTQ, "bits", 8),
    (GPTQ, "group_size", 0),
    (GPTQ, "group_size", "128"),
    (GPTQ, "checkpoint_format", "marlin"),
    (GPTQ, "lm_head", "yes"),
    (GPTQ, "dynamic", {"-:.*attn.*": {}, "+:.*down_proj": {"bits": 8}}),
    (GPTQ, "format", "gptq_p"),
    (GPTQ, "act_bits", 8),
    (GPTQ, "data_type", "mx_fp"),
    (GPTQ, "sym", "yes"),
    (AWQ, "bits", 3),
    (AWQ, "version", "gemv"),
    (AWQ, "zero_point", "no"),
    (AWQ, "checkpoint_format", "gemv_fast"),
    (AWQ, "desc_act", True),
    (AWQ, "dynamic", {".*": {"group_size": 32}}),
    (AUTO_ROUND, "bits", 2),
    (AUTO_ROUND, "bits", 8),
    (AUTO_ROUND, "act_bits", 8),
    (AUTO_ROUND, "data_type", "mx_fp"),
    (AUTO_ROUND, "packing_format", "auto_round:llm_compressor"),
    (AUTO_ROUND, "packing_format", ["auto_round"]),
    (AUTO_ROUND | {"packing_format": None}, "backend", "auto_round:exllamav2"),
    (AUTO_ROUND, "desc_act", True),
    (AUTO_ROUND, "extra_config", [1]),
    (AUTO_ROUND, "rotation_config", {"hadamard_type": "random"}),
    (AUTO_ROUND | {"sym": False, "packing_format": "auto_round"}, "model_free", True),
    (PACKED, "weights.num_bits", 8),
    (PACKED, "weights.type", "float"),
    (PACKED, "weights.strategy", "tensor"),
    (PACKED, "weights.group_size", None),
    (PACKED, "input_activations", TOKEN),
    (NVFP4_PACKED, "weights.type", "int"),
    (NVFP4_PACKED, "weights.strategy", "group"),
    (NVFP4_PACKED, "weights.group_size", 32),
    (NVFP4_PACKED, "weights.symmetric", False),
    (NVFP4_PACKED, "input_activations", NVFP4 | {"group_size": 32}),
    (NVFP4_PACKED, "input_activations", NVFP4 | {"num_bits": 8}),
    (CHANNEL, "config_groups", {}),
    (CHANNEL, "config_groups", [1]),
    (CHANNEL, "config_groups", {"group_0": "W4A16"}),
    (CHANNEL, "format", "marlin-24"),
    (CHANNEL, "format", None),
    (CHANNEL, "ignore", "lm_head"),
    (CHANNEL, "quantization_status", "initialized"),
    (CHANNEL, "sparsity_config", {"format": "sparse-24-bitmask"}),
    (CHANNEL, "transform_config", {"config_groups": {"a": 1}}),
    (CHANNEL, "output_activations", FLOAT),
    (CHANNEL, "weights.strategy", "row"),
    (CHANNEL, "weights.strategy", "group"),
    (CHANNEL, "weights.dynamic", True),
    (CHANNEL, "weights.num_bits", 4),
    (CHANNEL, "weights.type", "int"),
    (CHANNEL, "weights.symmetric", False),
    (BLOCK, "weights.block_structure", [64, 128]),
    (CHANNEL, "input_activations.strategy", "channel"),
    (CHANNEL, "input_activations.dynamic", False),
    (CHANNEL, "input_activations.dynamic", "local"),
    (BLOCK, "input_activations.group_size", 64),
    (CHANNEL, "input_activations.num_bits", 4),
]


@pytest.mark.parametrize(("config", "path", "value"), REFUSED)
def test_what_is_not_implemented_is_refused_by_its_key(config, path, value):
    key = path.split(".")[-1]
    with pytest.raises(SametokenError, match=key):
        read(changed(config, path, value))


def test_four_bits_are_read_from_all_methods():
    kinds = [read(one).format_of("x", Everything()) for one in (GPTQ, AWQ, PACKED, NVFP4_PACKED)]
    assert kinds == [
        Int4Linear("gptq", 128, True),
        Int4Linear("awq", 128),
        Int4Linear("pack-quantized", 128, True),
        Nvfp4Linear(),
    ]


#: As GPTQModel 7 writes them for both methods, and AutoRound's exports for them.
GPTQMODEL = {
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "lm_head": False,
    "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:7.3.4"]},
    "dynamic": {"lm_head": {}, "-:.*attn.*": {}, "-:.*mtp.*": {}},
}
AUTOROUND = {
    "bits": 4,
    "group_size": 128,
    "sym": False,
    "data_type": "int",
    "autoround_version": "0.13.0",
    "enable_quanted_input": False,
    "iters": 0,
    "nsamples": 512,
    "provider": "auto-round",
}


#: As they wrote them in 2025 and 2024.
OLDER = (
    GPTQMODEL | {"hyb_act": False, "pack_impl": "gpu"},
    AUTOROUND | {"train_bs": 8, "n_samples": 512, "to_quant_block_names": ["model.layers"]},
    AUTOROUND | {"act_bits": 16, "act_data_type": "int", "act_dynamic": True, "act_sym": True},
)


@pytest.mark.parametrize("written", [GPTQMODEL, AUTOROUND, *OLDER])
@pytest.mark.parametrize(
    ("method", "layout", "names"),
    [
        ("gptq", "gptq", {"sym": True}),
        ("gptq", "gptq_v2", {"method": "gptq", "format": "gptq_v2"}),
        ("gptq", "gptq_v2", {"format": "gptq_v2", "checkpoint_format": "gptq_v2"}),
        ("awq", "awq", {"zero_point": True, "version": "gemm", "format": "gemm"}),
        ("awq", "awq", {"zero_point": False, "sym": True, "version": "gemm"}),
        ("awq", "awq", {"zero_point": True, "method": "awq", "checkpoint_format": "gemm"}),
    ],
)
def test_four_bits_by_other_writers_are_read(written, method, layout, names):
    settings = {"quant_method": method} | written | names
    quantization, symmetric = read(settings), method == "gptq" and settings.get("sym") is True
    assert quantization.format_of("x", Everything()) == Int4Linear(layout, 128, symmetric)
    assert quantization.format_of("lm_head", Everything()) is None


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, Int4Linear("gptq", 128, True)),
        ({"act_bits": 16, "model_free": True, "super_bits": None}, Int4Linear("gptq", 128, True)),
        ({"packing_format": "auto_round:auto_awq"}, Int4Linear("awq", 128, True)),
        ({"packing_format": "auto_round", "sym": False}, Int4Linear("gptq_v2", 128)),
        ({"sym": False, "group_size": -1}, Int4Linear("gptq", -1)),
        ({"packing_format": None}, Int4Linear("gptq", 128, True)),
        ({"packing_format": None, "backend": "auto_round"}, Int4Linear("gptq_v2", 128, True)),
    ],
)
def test_auto_round_names_its_layout(written, expected):
    quantization = read(AUTO_ROUND | written)
    assert quantization.format_of("x", Everything()) == expected
    assert quantization.format_of("lm_head", Everything()) is None


def test_auto_round_s_own_settings_of_modules():
    own = {
        ".*mlp\\.gate.*": {"bits": 16, "act_bits": 16},
        "mlp.gate_proj$": {"group_size": 32},
        f"{LAYER}.mlp.gate_proj": {"sym": False, "act_bits": None},
        "k_proj$": {"group_size": 32},
        f"{LAYER}.q": {"bits": 16, "data_type": "float"},
        "lm_head": {"bits": 4, "group_size": 64, "sym": True, "data_type": "int"},
    }
    quantization = read(AUTO_ROUND | {"extra_config": own})
    found = {
        name: quantization.format_of(name, Everything())
        for name in (f"{LAYER}.mlp.gate", f"{LAYER}.mlp.gate_proj", f"{LAYER}.q", "lm_head")
    }
    # A name goes before expressions, of which the first decides.
    assert list(found.values()) == [
        None, Int4Linear("gptq", 128), None, Int4Linear("gptq", 64, True),
    ]  # fmt: skip
    assert quantization.format_of("model.layers.1.mlp.gate_proj", Everything()) is None
    assert quantization.format_of(f"{LAYER}.k_proj", Everything()) == Int4Linear("gptq", 32, True)
    assert quantization.format_of(f"{LAYER}.v_proj", Everything()) == Int4Linear("gptq", 128, True)


@pytest.mark.parametrize(
    ("key", "own", "said"),
    [
        (f"{LAYER}.q", {"bits": 8}, r"layers.11.q: bits=8"),
        (f"{LAYER}.q", {"act_bits": 8}, r"layers.11.q: act_bits=8"),
        ("(a+)+b", {"bits": 16}, "repeats too much"),
    ],
)
def test_modules_that_auto_round_gives_what_is_not_served(key, own, said):
    with pytest.raises(UnsupportedError, match=said):
        read(AUTO_ROUND | {"extra_config": {key: own}})


def test_compressed_tensors_by_another_writer_are_read():
    """AutoRound names itself and its kernels (sglang#23062)."""
    written = {"backend": "compressed-tensors", "provider": "auto-round"}
    assert read(PACKED | written).groups == read(PACKED).groups


def test_a_sparsity_that_was_only_measured_is_no_format():
    measured = {"format": "dense", "global_sparsity": 0.13, "registry_requires_subclass": False}
    assert read(PACKED | {"sparsity_config": measured}).groups == read(PACKED).groups


def test_a_dynamic_scale_of_a_whole_batch_would_break_the_law():
    activations = STATIC | {"dynamic": True}
    with pytest.raises(UnsupportedError, match="rows depend on each other"):
        read(compressed_config("channel", activations))


@pytest.mark.parametrize(
    "expression",
    [
        *("re:(a+)+$", "re:(.*)*x", "re:" + "a" * 500, "re:.*.*.*.*.*.*x"),
        *("re:" + "(.|.)" * 24, "re:" + ".?" * 24, "re:.*.*.*.*.*(a|a)(a|a)(a|a)(a|a)x"),
    ],
)
def test_expressions_that_could_take_long_are_refused(expression):
    with pytest.raises(UnsupportedError, match="repeats too much"):
        read(changed(CHANNEL, "targets", [expression]))


def test_expressions_that_together_could_take_long_are_refused():
    """A name is matched with one after the other."""
    expressions = [f"{'.*' * 5}{index}" for index in range(9)]
    named = [f"re:{one}" for one in expressions]
    group = compressed_config("channel")["config_groups"]["group_0"]
    keys = {one.removeprefix(".*"): {"bits": 16} for one in expressions}
    for config in (
        compressed_config("channel", ignore=named),
        compressed_config(
            "channel", config_groups={one: group | {"targets": [one]} for one in named}
        ),
        {"quant_method": "auto-round", "bits": 4, "sym": True, "extra_config": keys},
        {"quant_method": "mxfp4", "modules_to_not_convert": expressions},
    ):
        with pytest.raises(UnsupportedError, match="repeat too much, one after the other"):
            read(config)
    read(compressed_config("channel", ignore=named[:8]))


@pytest.mark.parametrize("expression", ["re:[a", "re:a{4294967296}"])
def test_what_is_no_expression_is_refused(expression):
    with pytest.raises(CheckpointError, match="no regular expression"):
        read(compressed_config("channel", ignore=[expression]))


def test_quantized_keys_and_values_alone_leave_weights_as_they_are():
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    given = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    config = {"quantization_config": given}
    assert read_quantization(config, "here") is UNQUANTIZED
    assert kv_strategy(config, "here") == "tensor"
    with pytest.raises(UnsupportedError, match="quantized keys and values, which a test"):
        require_unquantized(config, "here", "a test")
    assert kv_strategy({}, "here") is kv_strategy({"quantization_config": CHANNEL}, "here") is None
