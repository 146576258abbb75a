"""4-bit checkpoints in the published layouts: what they stand for, and files that are refused."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import (
    LLAMA,
    change_config,
    change_tensors,
    llama_shapes,
    random_weight,
    write_checkpoint,
)
from helpers.compressed import written
from helpers.forward import CPU, TOKENS, load, logits_of
from helpers.quantized import require_meant
from helpers.thread_ranks import run_ranks
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.models.load.huggingface import open_weights
from sametoken.models.load.quantization import read_quantization
from sametoken.models.load.weights import Part, WeightReader
from sametoken.ops.model.gemm.int4 import Int4Weight
from sametoken.ops.model.gemm.stacked import StackedWeight
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

SIZES = {
    "vocab_size": 48,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
Q_PROJ = "model.layers.0.self_attn.q_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(values: torch.Tensor, order=range(8)) -> torch.Tensor:
    """[..., 8 n] below 16 to [..., n] int32: of eight, number ``order[i]`` at bits 4 i."""
    eights = values.long().unflatten(-1, (-1, 8))
    packed = sum(eights[..., place] << 4 * i for i, place in enumerate(order))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def quantized(weight: torch.Tensor, size: int, index: torch.Tensor, generator, zeros: range):
    """Values [N, K], scales and zeros [N, G] fp16 and uint8, and what they stand for."""
    rows, columns = weight.shape
    groups = columns // size
    zero = torch.randint(zeros.start, zeros.stop, (rows, groups), generator=generator)
    scale = (weight.abs().amax() / 8 * (1 + torch.rand(rows, groups, generator=generator))).half()
    by_feature, zero_of = scale.float()[:, index], zero[:, index]
    values = (weight / by_feature + zero_of).round().clamp(0, 15)
    return values.long(), scale, zero, (values - zero_of) * by_feature


def made(
    layout: str,
    size: int,
    *,
    permuted: bool = False,
    symmetric: bool = False,
    seed: int = 0,
    chosen: str = "proj.weight",
    **sizes,
):
    """A config, the tensors as stored, and those that they stand for."""
    config = LLAMA | SIZES | sizes
    generator = torch.Generator().manual_seed(seed)
    stored, meant = {}, {}
    for name, shape in llama_shapes(config).items():
        weight = random_weight(generator, *shape)
        if not name.endswith(chosen):
            stored[name] = meant[name] = weight
            continue
        group = shape[1] if size == -1 else size
        index = torch.arange(shape[1]) // group
        if permuted:
            index = index[torch.randperm(shape[1], generator=generator)]
        # Stored less 1, so a zero of 16 fits.
        zeros = range(8, 9) if symmetric else range(1, 17 if layout == "gptq" else 16)
        values, scale, zero, meant[name] = quantized(weight, group, index, generator, zeros)
        module = name.removesuffix(".weight")
        if layout == "awq":
            stored[f"{module}.qweight"] = words(values.t(), AWQ_ORDER)
            stored[f"{module}.qzeros"] = words(zero.t(), AWQ_ORDER)
        else:
            stored[f"{module}.qweight"] = words(values).t()
            shift = 1 if layout == "gptq" else 0
            stored[f"{module}.qzeros"] = words(zero.t() - shift)
            stored[f"{module}.g_idx"] = index.to(torch.int32)
        stored[f"{module}.scales"] = scale.t()
    return config, stored, meant


def quantization(layout: str, size: int, **changes) -> dict:
    if layout == "awq":
        own = {"quant_method": "awq", "version": "gemm", "zero_point": True}
        own["modules_to_not_convert"] = None
    else:
        own = {"quant_method": "gptq", "checkpoint_format": layout, "desc_act": True}
        own |= {"sym": False, "damp_percent": 0.1, "true_sequential": True}
    return own | {"bits": 4, "group_size": size} | changes


def write(folder, layout: str, size: int, edit=None, **options):
    config, stored, _ = made(layout, size, **options)
    if edit is not None:
        edit(stored)
    return write_checkpoint(
        folder, config | {"quantization_config": quantization(layout, size)}, stored
    )


@pytest.mark.parametrize("kernels", [ReferenceKernels(), NativeKernels()])
@pytest.mark.parametrize(
    ("layout", "size", "permuted"),
    [
        ("gptq", 32, False),
        ("gptq", 64, True),
        ("gptq_v2", 32, True),
        ("gptq", -1, False),
        ("awq", 64, False),
        ("awq", -1, False),
    ],
)
def test_a_checkpoint_stands_for_its_expanded_twin(tmp_path, layout, size, permuted, kernels):
    twins = made(layout, size, permuted=permuted)
    model = require_meant(tmp_path, *twins, quantization(layout, size), kernels)
    assert torch.equal(logits_of(model, 1, 2), logits_of(model))


def test_groups_of_any_multiple_of_32_run(tmp_path):
    sizes = {"hidden_size": 192, "intermediate_size": 192, "num_attention_heads": 6}
    require_meant(tmp_path, *made("gptq", 96, **sizes), quantization("gptq", 96))


@pytest.mark.parametrize(("layout", "stored"), [("gptq", 7), ("gptq", 8), ("gptq_v2", 8)])
def test_symmetric_zeros_are_8_whatever_is_stored(tmp_path, layout, stored):
    """Qwen/Qwen3.5-27B-GPTQ-Int4 says ``gptq`` and stores 8, which would be 9 (vllm#38966)."""
    config, tensors, meant = made(layout, 32, symmetric=True)
    for name, tensor in tensors.items():
        if name.endswith(".qzeros"):
            groups, eights = tensor.shape
            tensors[name] = words(torch.full((groups, 8 * eights), stored))
    require_meant(tmp_path, config, tensors, meant, quantization(layout, 32, sym=True))


@pytest.mark.parametrize(
    ("packing", "layout"),
    [("auto_round:auto_gptq", "gptq"), ("auto_round", "gptq_v2"), ("auto_round:auto_awq", "awq")],
)
def test_auto_round_stores_one_of_the_layouts(tmp_path, packing, layout):
    config, stored, meant = made(layout, 32)
    _, wider, of_wider = made(layout, 64, chosen="down_proj.weight")
    wider = {name: one for name, one in wider.items() if "down_proj" in name}
    meant |= {name: one for name, one in of_wider.items() if "down_proj" in name}
    # It writes no order of features.
    stored = {name: one for name, one in (stored | wider).items() if "g_idx" not in name}
    stored = {name: one for name, one in stored.items() if Q_PROJ not in name}
    stored[f"{Q_PROJ}.weight"] = meant[f"{Q_PROJ}.weight"]
    own = {".*down_proj.*": {"group_size": 64}, Q_PROJ: {"bits": 16, "data_type": "fp"}}
    written = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
    written |= {"packing_format": packing, "extra_config": own}
    require_meant(tmp_path, config, stored, meant, written)


@pytest.mark.parametrize(("layout", "size", "permuted"), [("gptq", 64, True), ("awq", 32, False)])
def test_a_matrix_is_expanded_for_what_is_no_product(tmp_path, layout, size, permuted):
    _, _, meant = made(layout, size, permuted=permuted)
    path = write(tmp_path, layout, size, permuted=permuted)
    formats = read_quantization({"quantization_config": quantization(layout, size)}, "")
    reader = WeightReader(
        open_weights(path), ReferenceKernels(), torch.float32, CPU, quantization=formats
    )
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        module = f"model.layers.0.{name}"
        matrix = meant[f"{module}.weight"]
        got = reader.expanded(matrix.shape[1], Part(module, matrix.shape[0]))
        assert torch.allclose(got, matrix, rtol=1e-6, atol=1e-6)


def test_awq_is_read_as_compressed_tensors_converts_it():
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    _, stored, meant = made("awq", 64)
    converted = AutoAWQConverter(group_size=64).process(
        {name: tensor.contiguous() for name, tensor in stored.items() if Q_PROJ in name}
    )
    values = unpack_from_int32(converted[f"{Q_PROJ}.weight_packed"], 4, (64, 128))
    zeros = unpack_from_int32(converted[f"{Q_PROJ}.weight_zero_point"], 4, (64, 2), packed_dim=0)
    scales = converted[f"{Q_PROJ}.weight_scale"].float().repeat_interleave(64, 1)
    expanded = (values - zeros.repeat_interleave(64, 1)) * scales
    assert torch.allclose(expanded, meant[f"{Q_PROJ}.weight"])


@pytest.mark.parametrize("size", [32, 128, None])
@pytest.mark.parametrize(("symmetric", "ignored"), [(True, ["lm_head"]), (False, [])])
def test_logits_are_those_of_the_library_that_packed_the_file(tmp_path, symmetric, ignored, size):
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    if size is not None:
        weights |= {"strategy": "group", "group_size": size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}}
    expected = written(tmp_path, groups, ignored, TOKENS)
    for kernels in (ReferenceKernels(), NativeKernels()):
        assert torch.allclose(logits_of(load(tmp_path, kernels)), expected, rtol=1e-3, atol=1e-3)


def test_gptq_s_lm_head_is_quantized_if_the_config_says_so(tmp_path):
    config, stored, meant = made("gptq", 32, permuted=True, chosen="lm_head.weight")
    model = require_meant(tmp_path, config, stored, meant, quantization("gptq", 32, lm_head=True))
    assert isinstance(model.head, Int4Weight)
    wanted = logits_of(model)
    path = tmp_path / "stored"
    for one in run_ranks(2, lambda rank: logits_of(load(path, parallel=rank))):
        assert torch.allclose(one, wanted, rtol=1e-4, atol=1e-4)
    change_config(path, quantization_config=quantization("gptq", 32, lm_head=False))
    with pytest.raises(CheckpointError, match=r"lacks the tensor lm_head.weight"):
        load(path)


def test_parts_in_one_order_are_one_matrix_and_others_are_not(tmp_path):
    model = load(write(tmp_path / "a", "gptq", 32))
    assert isinstance(model.layers[0].attention.qkv.weight, Int4Weight)
    model = load(write(tmp_path / "b", "gptq", 32, permuted=True))
    assert isinstance(model.layers[0].attention.qkv.weight, StackedWeight)


@pytest.mark.parametrize(
    ("layout", "size", "kv_heads"), [("gptq", 32, 1), ("gptq", 64, 2), ("awq", -1, 1)]
)
def test_ranks_divide_groups(tmp_path, layout, size, kv_heads):
    path = write(tmp_path, layout, size, num_key_value_heads=kv_heads)
    expected = logits_of(load(path))
    for got in run_ranks(2, lambda rank: logits_of(load(path, parallel=rank))):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_ranks_cannot_divide_features_in_another_order(tmp_path):
    path = write(tmp_path, "gptq", 32, permuted=True)
    with pytest.raises(ConfigError, match=r"o_proj, which act-order permutes"):
        run_ranks(2, lambda rank: load(path, parallel=rank))


def test_ranks_that_cut_a_group_are_refused(tmp_path):
    path = write(tmp_path, "gptq", 32, head_dim=48)
    said = r"cuts the 96 features of .*o_proj within a group of 32\. Use 1$"
    with pytest.raises(ConfigError, match=said):
        run_ranks(2, lambda rank: load(path, parallel=rank))


def changed(name: str, change):
    def edit(tensors):
        tensors[f"{Q_PROJ}.{name}"] = change(tensors[f"{Q_PROJ}.{name}"])

    return edit


def without(name: str):
    return lambda tensors: tensors.pop(f"{Q_PROJ}.{name}")


BROKEN = {
    "no scales": (without("scales"), "lacks the tensor .*q_proj.scales"),
    "no zeros": (without("qzeros"), "lacks the tensor .*q_proj.qzeros"),
    "no values": (without("qweight"), "lacks the tensor .*q_proj.qweight"),
    "shape": (changed("qweight", lambda w: w[:-1]), r"q_proj.qweight .*\[16, 64\]"),
    "zeros' shape": (changed("qzeros", lambda w: w[:, :-1]), r"q_proj.qzeros .*\[4, 8\]"),
    "dtype": (changed("qweight", lambda w: w.long()), "q_proj.qweight .* dtype int64"),
    "scales' dtype": (changed("scales", lambda s: s.int()), "q_proj.scales .* dtype I32"),
    "NaN": (changed("scales", lambda s: s * torch.nan), "q_proj.scales .* NaN"),
    "groups": (changed("g_idx", torch.zeros_like), "q_proj.g_idx .* does not give each of 4"),
    "negative group": (changed("g_idx", lambda g: -g), "q_proj.g_idx"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_by_the_name_of_the_tensor(tmp_path, name):
    edit, message = BROKEN[name]
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        load(write(tmp_path, "gptq", 32, edit))


def test_a_shape_may_be_stored_in_32_bits_and_must_be_the_config_s(tmp_path):
    """As transformers saves a compressed model again."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}}
    written(tmp_path, groups)
    shape = f"{Q_PROJ}.weight_shape"
    change_tensors(tmp_path, lambda tensors: tensors | {shape: tensors[shape].int()})
    load(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors | {shape: tensors[shape] + 1})
    with pytest.raises(CheckpointError, match=r"q_proj.weight_shape .* says \[129, 129\]"):
        load(tmp_path)


@pytest.mark.parametrize("size", [48, 100])
def test_groups_that_products_do_not_have_are_refused(tmp_path, size):
    config, stored, _ = made("gptq", 32)
    config |= {"quantization_config": quantization("gptq", size)}
    with pytest.raises(UnsupportedError, match="group"):
        load(write_checkpoint(tmp_path, config, stored))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("module", "rows"), [("q_proj", 64), ("o_proj", 128)])
def test_biases_of_zeros_are_passed_over_and_others_refused(tmp_path, module, rows, size):
    """AutoGPTQ once wrote a bias for every linear."""

    def with_bias(value: float):
        def edit(tensors):
            name = Q_PROJ.replace("q_proj", module)
            tensors[f"{name}.bias"] = torch.full((rows,), value).half()

        return edit

    def load_on_all(path):
        return run_ranks(size, lambda rank: load(path, parallel=rank))

    assert load_on_all(write(tmp_path / "zero", "gptq", 32, with_bias(0.0)))
    with pytest.raises(UnsupportedError, match=rf"{module}.bias"):
        load_on_all(write(tmp_path / "one", "gptq", 32, with_bias(1.0)))
