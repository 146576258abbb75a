"""Float8 checkpoints: the logits that their writers mean, and files that are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import (
    LLAMA,
    change_config,
    llama_tensors,
    read_checkpoint,
    write_checkpoint,
)
from helpers.compressed import FLOAT as FLOAT_ARGUMENTS
from helpers.compressed import written
from helpers.families import write_family
from helpers.forward import TOKENS, load, logits_of
from helpers.hybrids import EXPERTS, hybrid_config, hybrid_tensors
from helpers.latents import write_latent
from helpers.quantized import (
    STATIC,
    block_config,
    compressed_config,
    is_projection,
    quantize_tensors,
    require_meant,
)
from helpers.thread_ranks import run_ranks
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.models.experts import MIXTRAL
from sametoken.models.load.fp8_linear import Fp8Linear
from sametoken.models.load.huggingface import open_weights
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.model.gemm.fp8 import Fp8Weight
from sametoken.ops.model.gemm.stacked import StackedWeight
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

SIZES = {
    "vocab_size": 48,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def a_llama(**changes) -> tuple[dict, dict[str, torch.Tensor]]:
    config = LLAMA | SIZES | changes
    return config, llama_tensors(config)


def write_block(folder, edit=None, **changes):
    config, tensors = a_llama()
    stored, _ = quantize_tensors(tensors)
    config |= {"quantization_config": block_config(**changes)}
    if edit is not None:
        edit(stored)
    return write_checkpoint(folder, config, stored)


SCHEMES = {
    "channel-token": ("channel", {"strategy": "token", "dynamic": True}),
    "tensor-token": ("tensor", {"strategy": "token", "dynamic": True}),
    "tensor-static": ("tensor", {"strategy": "tensor", "dynamic": False}),
    "block-group": ("block", {"strategy": "group", "group_size": 128, "dynamic": True}),
    "channel-none": ("channel", None),
}


@pytest.mark.parametrize(
    ("scheme", "ignored"), [*((name, ["lm_head"]) for name in SCHEMES), ("channel-token", [])]
)
def test_logits_are_those_of_the_library_that_wrote_the_file(tmp_path, scheme, ignored):
    strategy, activations = SCHEMES[scheme]
    weights = FLOAT_ARGUMENTS | {"strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    group = {"targets": ["Linear"], "weights": weights, "format": "float-quantized"}
    if activations is not None:
        group["input_activations"] = FLOAT_ARGUMENTS | activations
    expected = written(tmp_path, {"group_0": group}, ignored, TOKENS)
    for kernels in (ReferenceKernels(), NativeKernels()):
        difference = (logits_of(load(tmp_path, kernels)) - expected).abs().amax(1)
        # A row in which one activation rounds to the other neighbour may differ more.
        assert (difference < 1e-3).sum() >= len(TOKENS) - 2
        assert difference.max() < 0.02 * expected.abs().max()


def test_groups_of_the_library_each_have_their_own_scheme(tmp_path):
    token = FLOAT_ARGUMENTS | {"strategy": "token", "dynamic": True}
    groups = {
        "group_0": {
            "targets": ["re:.*self_attn.*", "model.layers.0.mlp.down_proj"],
            "weights": FLOAT_ARGUMENTS | {"strategy": "channel"},
            "input_activations": token,
            "format": "float-quantized",
        },
        "group_1": {
            "targets": ["Linear"],
            "weights": FLOAT_ARGUMENTS | {"strategy": "tensor"},
            "input_activations": token,
            "format": "float-quantized",
        },
    }
    ignored = ("lm_head", "model.layers.1.self_attn.k_proj", "re:.*1.mlp.up")
    expected = written(tmp_path, groups, ignored, TOKENS)
    model = load(tmp_path)
    assert isinstance(model.layers[1].attention.qkv.weight, StackedWeight)
    assert torch.allclose(logits_of(model), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_a_hybrid_stands_for_its_expanded_twin(tmp_path, kind):
    """Blocks over rows that are permuted and fused, experts one by one, plain parts between.

    Activations are not rounded here: another choice of experts would hide anything.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 192, "linear_value_head_dim": 80}
    experts = EXPERTS | {"moe_intermediate_size": 144, "shared_expert_intermediate_size": 130}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = hybrid_config(kind, **sizes, **experts, **layers, vocab_size=48)
    tensors = hybrid_tensors(config)
    chosen = ("proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight")
    stored, meant = quantize_tensors(
        {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp")},
        scale_name="weight_scale",
        chosen=lambda name: name.endswith(chosen),
    )
    require_meant(tmp_path, config, stored, meant, compressed_config("block", None))


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_latent_attention_expands_what_it_absorbs(tmp_path, strategy):
    """DeepSeek's checkpoints hold ``kv_b_proj`` in blocks, as its other projections."""
    config, tensors = read_checkpoint(write_latent(tmp_path / "plain", "deepseek_v3"))
    stored, meant = quantize_tensors(
        tensors,
        strategy,
        scale_name="weight_scale",
        chosen=lambda name: name.endswith(("proj.weight", "mqa.weight")) and ".mlp." not in name,
    )
    ignored = compressed_config(strategy, None, ignore=["lm_head", "re:.*mlp.*"])
    require_meant(tmp_path, config, stored, meant, ignored)


def test_experts_of_minimax_as_they_are_published(tmp_path):
    """Projections in blocks under Mixtral's names. All experts are chosen, as roundings may."""
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 2}
    config, tensors = read_checkpoint(write_family(tmp_path / "plain", "minimax_m2", **sizes))
    stored, meant = quantize_tensors(
        tensors,
        chosen=lambda name: name.endswith(tuple(f"{end}.weight" for end in ("proj", *MIXTRAL))),
    )
    expected = logits_of(load(write_checkpoint(tmp_path / "meant", config, meant)))
    kept = ["gate", "e_score_correction_bias", "lm_head"]
    config |= {
        "quantization_config": block_config(fmt="float8_e4m3fn", modules_to_not_convert=kept),
        "attn_type_list": [1, 1, 1],
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }
    stored |= {f"model.layers.{index}.enorm.weight": torch.ones(32) for index in (3, 5)}
    model = load(write_checkpoint(tmp_path / "fp8", config, stored))
    mlp = model.layers[0].mlp
    experts = mlp.experts.experts
    assert all(isinstance(one, Fp8Weight) for one in (*experts.gate_up, *experts.down))
    assert not isinstance(mlp.router.weight, Fp8Weight)
    difference = (logits_of(model) - expected).norm() / expected.norm()
    assert 0 < difference < 0.1


def test_scales_are_powers_of_two_of_activations_too_where_the_format_says_so(tmp_path):
    def in_powers(dtype):
        def edit(stored):
            for name in [name for name in stored if name.endswith("_scale_inv")]:
                stored[name] = stored[name].log2().ceil().exp2().to(dtype)

        return edit

    def loaded(name, dtype, form):
        return load(write_block(tmp_path / name, in_powers(dtype), scale_fmt=form))

    models = {
        "numbers": loaded("numbers", torch.float32, "ue8m0"),
        "bytes": loaded("bytes", torch.float8_e8m0fnu, "ue8m0"),
        "others": loaded("others", torch.float32, "float"),
    }
    roundings = [model.layers[0].attention.output.weight.rounding for model in models.values()]
    assert [one.form for one in roundings] == [(True, True), (True, True), (True, False)]
    logits = {name: logits_of(model) for name, model in models.items()}
    assert torch.equal(logits["numbers"], logits["bytes"])
    # Two roundings of activations to three bits each.
    difference = (logits["numbers"] - logits["others"]).norm() / logits["others"].norm()
    assert 0 < difference < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", [ReferenceKernels, NativeKernels])
def test_chunks_of_a_prompt_change_no_bit(tmp_path, kernels, dtype):
    model = load(write_block(tmp_path), kernels(), dtype=dtype)
    whole = logits_of(model)
    for chunks in ([1] * len(TOKENS), [2, 3], [5]):
        assert torch.equal(logits_of(model, *chunks), whole)


def test_weights_stay_in_eight_bits_where_the_config_says_so(tmp_path):
    model = load(write_block(tmp_path))
    assert isinstance(model.layers[0].attention.qkv.weight, Fp8Weight)
    assert model.head.matrix.dtype == model.embedding.matrix.dtype == torch.float32


@pytest.mark.parametrize(
    ("rows", "size", "rank", "whole"),
    [
        ((256, 128), 1, 0, True),
        ((256, 72), 1, 0, True),
        ((200, 128), 1, 0, False),
        ((64, 64), 1, 0, False),
        ((384,), 2, 0, True),
        ((384,), 2, 1, False),
        ((256,), 4, 1, True),
    ],
)
def test_blocks_are_whole_where_their_rows_begin_together(tmp_path, rows, size, rank, whole):
    """Of several parts and of a rank's share, from each multiple of 128 rows on."""
    parts = tuple(Part(f"fc{place}", n, split=Split.ROWS) for place, n in enumerate(rows))
    tensors = {f"{part.name}.weight": torch.randn(part.rows, 128) for part in parts}
    save_file(quantize_tensors(tensors, chosen=bool)[0], tmp_path / "model.safetensors")
    reader = WeightReader(
        open_weights(tmp_path),
        ReferenceKernels(),
        torch.float32,
        torch.device("cpu"),
        SimpleNamespace(size=size, rank=rank),
    )
    packed = []
    reader = replace(reader, kernels=SimpleNamespace(pack_fp8=lambda one, _: packed.append(one)))
    Fp8Linear("block", "group", ("weight_scale_inv",)).read(reader, 128, parts)
    scales = packed[0].scale
    assert packed[0].blocks == whole
    assert whole == all((run == run[0]).all() for run in scales.split(128))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_ranks_divide_scales_with_rows_and_columns(tmp_path, strategy):
    # They share the KV head.
    config, tensors = a_llama(intermediate_size=512, num_key_value_heads=1)
    stored, _ = quantize_tensors(
        tensors, strategy, scale_name="weight_scale", chosen=is_projection_or_head
    )
    config |= {"quantization_config": compressed_config(strategy, None, ignore=[])}
    path = write_checkpoint(tmp_path, config, stored)
    whole = load(path)
    expected = logits_of(whole)
    models = run_ranks(2, lambda rank: load(path, parallel=rank))
    for got in run_ranks(2, lambda rank: logits_of(load(path, parallel=rank))):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
    for index, model in enumerate(models):
        assert torch.equal(bits(model.head), bits(whole.head).chunk(2)[index])
        assert torch.equal(bits(model.whole_head()), bits(whole.head))


def is_projection_or_head(name: str) -> bool:
    return is_projection(name) or name == "lm_head.weight"


def bits(weight: Fp8Weight) -> torch.Tensor:
    return weight.matrix.view(torch.uint8)


def test_a_quantized_head_that_the_config_ties_is_refused(tmp_path):
    config, tensors = a_llama(tie_word_embeddings=True)
    stored, _ = quantize_tensors(tensors, chosen=is_projection_or_head)
    config |= {"quantization_config": block_config(modules_to_not_convert=[])}
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from .*embed_tokens"):
        load(write_checkpoint(tmp_path, config, stored))


def test_ranks_that_cut_a_block_are_refused(tmp_path):
    path = write_block(tmp_path)
    with pytest.raises(ConfigError, match=r"cuts the 320 features of .*down_proj"):
        run_ranks(2, lambda rank: load(path, parallel=rank))


def test_rows_are_cut_within_a_block_and_features_are_not(tmp_path):
    tensors = {"fc.weight": torch.randn(200, 768)}
    stored, meant = quantize_tensors(tensors, chosen=lambda name: True)
    save_file(stored, tmp_path / "model.safetensors")
    source, linear = open_weights(tmp_path), Fp8Linear("block", "group", ("weight_scale_inv",))

    def read(size, rank, split):
        parallel = SimpleNamespace(size=size, rank=rank)
        reader = WeightReader(
            source, ReferenceKernels(), torch.float32, torch.device("cpu"), parallel
        )
        return linear.expanded(reader, 768, Part("fc", 200, split=split))

    for dim, split, size in ((0, Split.ROWS, 2), (0, Split.ROWS, 8), (1, Split.COLUMNS, 3)):
        for rank, own in enumerate(meant["fc.weight"].chunk(size, dim)):
            assert torch.equal(read(size, rank, split), own)
    with pytest.raises(ConfigError, match=r"cuts the 768 features of fc .* Use 1 or 2 or 3$"):
        read(4, 0, Split.COLUMNS)


def test_a_scale_of_activations_per_part_is_its_own(tmp_path):
    """q, k and v with unlike static scales are not fused; equal ones are."""
    config, tensors = a_llama()
    config |= {"quantization_config": compressed_config("tensor", STATIC)}
    for scales, kind in ((cycle((0.02, 0.03)), StackedWeight), (cycle((0.02,)), Fp8Weight)):
        stored, _ = quantize_tensors(
            tensors, "tensor", scale_name="weight_scale", input_scales=scales
        )
        model = load(write_checkpoint(tmp_path, config, stored))
        assert isinstance(model.layers[0].attention.qkv.weight, kind)


def without(name):
    return lambda tensors: tensors.pop(name)


def with_changed(name, change):
    def edit(tensors):
        tensors[name] = change(tensors[name])

    return edit


def with_first(value):
    def change(scale):
        scale[0, 0] = value
        return scale

    return change


SCALE = f"{Q_PROJ}.weight_scale_inv"
BROKEN = {
    "missing scale": (without(SCALE), "lacks the tensor .*q_proj.weight_scale_inv"),
    "missing weight": (without(f"{Q_PROJ}.weight"), "lacks the tensor .*q_proj.weight"),
    "shape": (with_changed(SCALE, lambda s: s[:1]), r"q_proj.weight_scale_inv .*\[1, 2\]"),
    "NaN scale": (with_changed(SCALE, with_first(torch.nan)), "weight_scale_inv .* NaN"),
    "infinite scale": (with_changed(SCALE, with_first(torch.inf)), "weight_scale_inv .* infinite"),
    "zero scale": (with_changed(SCALE, with_first(0.0)), "weight_scale_inv .* not positive"),
    "negative scale": (with_changed(SCALE, with_first(-1.0)), "weight_scale_inv .* not positive"),
    "integers": (
        with_changed(SCALE, lambda s: s.to(torch.int32)),
        "weight_scale_inv .* has dtype I32",
    ),
    "weight in floats": (
        with_changed(f"{Q_PROJ}.weight", lambda w: w.float()),
        "q_proj.weight .* has dtype float32, .* wants float8_e4m3fn",
    ),
    "other float8": (
        with_changed(f"{Q_PROJ}.weight", lambda w: w.float().to(torch.float8_e5m2)),
        "q_proj.weight .* has dtype float8_e5m2",
    ),
    "NaN weight": (
        with_changed(f"{Q_PROJ}.weight", lambda w: (w.float() * torch.nan).to(w.dtype)),
        "q_proj.weight .* NaN",
    ),
    "head": (
        with_changed("lm_head.weight", lambda w: w.to(torch.float8_e4m3fn)),
        "lm_head.weight .* has dtype F8_E4M3",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_by_the_name_of_the_tensor(tmp_path, name):
    edit, message = BROKEN[name]
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        load(write_block(tmp_path, edit))


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan])
def test_a_scale_of_activations_that_cannot_be_is_refused(tmp_path, scale):
    config, tensors = a_llama()
    config |= {"quantization_config": compressed_config("tensor", STATIC)}
    stored, _ = quantize_tensors(
        tensors, "tensor", scale_name="weight_scale", input_scales=cycle((scale,))
    )
    with pytest.raises(CheckpointError, match=r"q_proj.input_scale"):
        load(write_checkpoint(tmp_path, config, stored))


def test_a_linear_in_floats_without_a_scale_is_what_it_is(tmp_path):
    """DeepSeek's routers: of the class that the config names, and never quantized."""
    _, tensors = a_llama()

    def plain(stored):
        stored[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"]
        del stored[SCALE]

    assert isinstance(
        load(write_block(tmp_path, plain)).layers[0].attention.qkv.weight, StackedWeight
    )


def test_scales_that_nobody_reads_are_refused(tmp_path):
    path = change_config(write_block(tmp_path), quantization_config=None)
    with pytest.raises(UnsupportedError, match="dtype F8_E4M3"):
        load(path)
