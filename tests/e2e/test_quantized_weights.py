"""The law for quantized targets: the same tokens and bits with and without speculation."""

from __future__ import annotations

import re

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from helpers.checkpoints import LLAMA, llama_tensors, read_checkpoint, write_checkpoint
from helpers.compressed import written
from helpers.families import write_family
from helpers.gguf_families import write_family_gguf
from helpers.gguf_files import write_gguf
from helpers.harness import requests_of, run
from helpers.hybrids import EXPERTS, hybrid_config, hybrid_tensors
from helpers.latents import write_nextn
from helpers.mxfp4 import write_mxfp4
from helpers.nemotron import write_nemotron
from helpers.quantized import (
    STATIC,
    TOKEN,
    block_config,
    compressed_config,
    gptq_llama,
    quantize_tensors,
)
from helpers.recorded import RecordedLogits
from helpers.small_engines import build
from helpers.static_steps import in_steps
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.errors import UnsupportedError
from sametoken.models.quantize import quantize_checkpoint

PROMPTS = [[1, 2, 3, 4] * 5, [0, 7, 7], list(range(17))]
MAX_TOKENS = 10
# What counts drafts has limits of its own: experts make those of random models cost too much.
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "draft_limits": "fixed",
}


def dense(folder, strategy: str, activations: dict | None):
    config = LLAMA | {"hidden_size": 160, "intermediate_size": 136, "num_hidden_layers": 2}
    tensors = llama_tensors(config)
    fixed = [0.02, 0.03] * 7 if activations is STATIC else ()
    stored, _ = quantize_tensors(tensors, strategy, scale_name="weight_scale", input_scales=fixed)
    config |= {"quantization_config": compressed_config(strategy, activations)}
    return write_checkpoint(folder, config, stored)


def hybrid(folder):
    """Target and MTP module in blocks, except the gates, as Qwen publishes them."""
    config = hybrid_config("qwen3_5", hidden_size=136, **EXPERTS)
    chosen = ("proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "mtp.fc.weight")
    stored, _ = quantize_tensors(
        hybrid_tensors(config, seed=3), chosen=lambda name: name.endswith(chosen)
    )
    ignored = [f"model.language_model.layers.{i}.linear_attn.in_proj_a" for i in range(4)]
    config |= {"quantization_config": block_config(modules_to_not_convert=["lm_head", *ignored])}
    return write_checkpoint(folder, config, stored)


def ran(path, spec: dict | None, steps: str = "compact", prompts=PROMPTS, **options):
    """Tokens by prompt, the logits of emitted tokens by prompt and position, drafts offered."""
    core = build(path, spec, **{"enable_prefix_caching": False} | options)
    recorded = RecordedLogits()
    core._runner = in_steps(recorded.runner(core._runner), steps)
    return run(core, requests_of(prompts, MAX_TOKENS, 0.0, 0.7)), recorded.rows


def require_same(path, spec: dict, dtype: str, **options) -> int:
    """Returns how many drafts were accepted in the last run."""
    plain, truth = ran(path, None, dtype=dtype, max_num_seqs=1, **options)
    for steps, chunk in (("compact", 16), ("static", 8)):
        drafted, rows = ran(
            path, spec, steps, dtype=dtype, prefill_chunk_size=chunk, steps_in_flight=2, **options
        )
        assert drafted.tokens == plain.tokens
        assert drafted.offered > 0
        same = [torch.equal(row, truth[key]) for key, row in rows.items() if key in truth]
        assert all(same)
        assert len(same) >= len(PROMPTS) * MAX_TOKENS
    return drafted.accepted


@pytest.mark.parametrize(
    ("strategy", "activations", "dtype"),
    [
        ("channel", TOKEN, "bfloat16"),
        ("block", TOKEN, "float32"),
        ("tensor", STATIC, "bfloat16"),
        ("channel", None, "float32"),
    ],
)
def test_speculation_changes_no_bit_of_a_float8_target(tmp_path, strategy, activations, dtype):
    require_same(dense(tmp_path, strategy, activations), NGRAM, dtype)


def test_nor_of_a_hybrid_in_blocks_whose_module_is_quantized_too(tmp_path):
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    require_same(hybrid(tmp_path), spec, "float32")


def quantized_in_place(folder, chosen, **changes) -> None:
    """A checkpoint's chosen matrices in blocks, as DeepSeek publishes them."""
    config, tensors = read_checkpoint(folder)
    names = [name for name in tensors if name.endswith(".weight") and tensors[name].dim() == 2]
    stored, _ = quantize_tensors(
        tensors, chosen=lambda name: name in names and bool(chosen.search(name))
    )
    plain = [name.removesuffix(".weight") for name in names if not chosen.search(name)]
    config |= {"quantization_config": block_config(modules_to_not_convert=plain, **changes)}
    write_checkpoint(folder, config, stored)


@pytest.mark.parametrize("form", ["float", "ue8m0"])
def test_nor_of_latent_attention_and_its_nextn_module_in_blocks(tmp_path, form):
    write_nextn(tmp_path, "deepseek_v3")
    quantized_in_place(tmp_path, re.compile(r"proj|mqa|head"), scale_fmt=form)
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    require_same(tmp_path, spec, "float32")


def test_nor_of_nemotron_with_experts_in_blocks(tmp_path):
    write_nemotron(tmp_path)
    quantized_in_place(tmp_path, re.compile(r"^(backbone|mtp).*(in|out|up|down|eh|[qkvo])_proj"))
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    require_same(tmp_path, spec, "float32")


def test_nor_of_a_module_that_we_quantized_to_four_bits(tmp_path):
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "mamba_head_dim", "head_dim"), 32)
    experts = ("moe_intermediate_size", "moe_shared_expert_intermediate_size")
    write_nemotron(tmp_path / "source", **sizes, **dict.fromkeys(experts, 32))
    quantize_checkpoint(tmp_path / "source", tmp_path / "copy", "w4a16")
    names = load_file(tmp_path / "copy" / "model.safetensors")
    assert any("eh_proj.weight_packed" in name for name in names)
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    require_same(tmp_path / "copy", spec, "float32")


@pytest.mark.parametrize("name", ["granite_hybrid", "falcon_h1"])
def test_nor_of_a_hybrid_that_we_quantized_to_float8(tmp_path, name):
    write_family(tmp_path / "source", name)
    quantize_checkpoint(tmp_path / "source", tmp_path / "copy", "fp8-dynamic")
    names = load_file(tmp_path / "copy" / "model.safetensors")
    mlp = "feed_forward.gate_proj" if name == "falcon_h1" else "shared_mlp.input_linear"
    for module in (mlp, "mamba.in_proj"):
        assert f"model.layers.0.{module}.weight_scale" in names
    require_same(tmp_path / "copy", NGRAM, "bfloat16")


def test_nor_of_a_target_in_four_bits(tmp_path):
    config, stored = gptq_llama()
    require_same(write_checkpoint(tmp_path, config, stored), NGRAM, "bfloat16")


def test_nor_of_a_gguf_file_in_its_bits(tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    require_same(path, NGRAM, "bfloat16", load_format="gguf-packed")


def test_nor_of_a_gguf_file_s_experts_in_their_bits(tmp_path):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    tensor_type = GGMLQuantizationType.Q4_1
    _, path = write_family_gguf(tmp_path / "model", "qwen3moe", sizes, tensor_type=tensor_type)
    itself = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    assert require_same(path, itself, "bfloat16", load_format="gguf-packed") > 0


@pytest.mark.parametrize("method", ["gguf", "gptq"])
def test_a_target_in_four_bits_accepts_what_it_drafts_itself(tmp_path, method):
    if method == "gguf":
        path, options = write_gguf(tmp_path / "model.gguf"), {"load_format": "gguf-packed"}
    else:
        path, options = write_checkpoint(tmp_path, *gptq_llama()), {}
    spec = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    drafted, _ = ran(path, spec, dtype="float32", **options)
    assert drafted.offered > 0
    if method == "gptq":
        assert drafted.accepted == drafted.offered
    else:
        # The draft model is expanded: the same weights, rounded as fp32 rounds.
        assert drafted.accepted >= 0.9 * drafted.offered


def test_weights_in_a_gguf_file_s_bits_do_not_change(tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    options = {"load_format": "gguf-packed", "max_model_len": 48, "kv_cache_memory_bytes": 2**20}
    core = build_engine(EngineConfig.from_options(model=str(path), **options))
    with pytest.raises(UnsupportedError, match="do not change under load_format 'gguf-packed'"):
        core.weights.load(None, "model")


def test_nor_of_a_target_in_nvfp4(tmp_path):
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    written(tmp_path, {"group_0": {"targets": ["Linear"], "weights": weights}})
    assert require_same(tmp_path, NGRAM, "bfloat16") > 0


def test_nor_of_experts_in_mxfp4_behind_sinks(tmp_path):
    assert require_same(write_mxfp4(tmp_path), NGRAM, "bfloat16") > 0
