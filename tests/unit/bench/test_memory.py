"""Memory that is counted without loading anything, against engines that are built."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from helpers.adapters import write_stacks
from helpers.calculator import NGRAM
from helpers.checkpoints import write_config
from helpers.families import write_family
from helpers.hybrids import hybrid_config
from helpers.nemotron import nemotron_config
from helpers.packed import packed_in
from sametoken.bench import memory
from sametoken.bench.memory import measure_memory
from sametoken.config import EngineConfig
from sametoken.engine import resolve
from sametoken.engine.build import build_engine
from sametoken.errors import CheckpointError, ConfigError
from sametoken.models.heads.eagle import Eagle1Checkpoint
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.loader import load_model, read_config
from sametoken.ops.model.attention import hopper
from sametoken.ops.model.low_rank import Room
from sametoken.ops.model.low_rank_experts_triton import StackedPairUpdates
from sametoken.ops.reference import ReferenceKernels

MB, GB = 10**6, 10**9
HEADS = {"eagle": Eagle1Checkpoint, "eagle3": Eagle3Checkpoint, "mtp": MTPCheckpoint}
# Qwen3.5-9B's sizes, as its config.json has them.
QWEN_3_5_9B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "full_attention_interval": 4,
        "mtp_num_hidden_layers": 1,
    },
}
# Nemotron-3-Super's sizes, from notes on its config.json.
SUPER = {
    "architectures": ["NemotronHForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
    "EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024,
    "routed_scaling_factor": 5.0,
    "max_position_embeddings": 32768,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}


def config(path, spec: dict | None = None, **options) -> EngineConfig:
    return EngineConfig.from_options(model=str(path), speculative_config=spec, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_64_drafts_cost_a_hybrid_of_9b_less_than_60_mb_and_a_state_each_over_3_gb(tmp_path, dtype):
    path = write_config(tmp_path, QWEN_3_5_9B)
    plain = measure_memory(config(path, dtype=dtype))
    found = measure_memory(config(path, NGRAM, dtype=dtype))
    assert found.per_request - plain.per_request == found.speculation_per_request < 60 * MB
    assert found.request.state_per_draft > 3 * GB
    assert found.request.recurrent_state == plain.request.recurrent_state
    assert 50 * MB < found.request.recurrent_state < 53 * MB
    assert found.weights == plain.weights
    elements = found.weights / (2 if dtype == "bfloat16" else 4)
    assert 8.9e9 < elements < 9.0e9


def test_a_request_of_nemotron_s_super_holds_168_mb_of_state(tmp_path):
    """40 layers of 128 x 64 x 128 in fp32; 64 drafts add their raw inputs, not 64 states."""
    path = write_config(tmp_path, SUPER)
    spec = {"method": "ngram", "num_speculative_tokens": 64}
    found = measure_memory(config(path, spec, dtype="bfloat16"))
    state, history = 40 * 128 * 64 * 128 * 4, 40 * 3 * 10240 * 2
    assert found.request.recurrent_state == state + history
    assert round(state / MB) == 168
    # [x | B | C] and dt of 64 rows in 40 layers, and KV of 8 attention layers.
    row = 40 * (10240 + 128) * 2
    assert (found.request.least_pending, found.request.pending) == (3 * row, 61 * row)
    assert found.speculation_per_request == found.request.pending + 64 * 8 * 2 * 2 * 128 * 2
    assert found.speculation_per_request < 54 * MB
    assert found.request.state_per_draft > 10 * GB
    assert 118e9 < found.weights / 2 < 123e9


def cases(tmp_path):
    llama = write_config(tmp_path / "llama")
    tied = write_config(tmp_path / "tied", tie_word_embeddings=True)
    positions = {"max_position_embeddings": 64}
    hybrid = write_config(tmp_path / "hybrid", hybrid_config("qwen3_next"), **positions)
    nemotron = nemotron_config(moe_latent_size=6)
    nemotron = write_config(tmp_path / "nemotron", nemotron, **positions)
    eagle = write_config(tmp_path / "eagle", num_hidden_layers=2)
    eagle3 = write_config(tmp_path / "eagle3", num_hidden_layers=1, draft_vocab_size=9)
    return {
        "plain": (tied, None),
        "ngram": (hybrid, {"method": "ngram", "num_speculative_tokens": 5}),
        "draft_model": (
            llama,
            {"method": "draft_model", "model": str(hybrid), "num_speculative_tokens": 2},
        ),
        "eagle": (llama, {"method": "eagle", "model": str(eagle), "num_speculative_tokens": 3}),
        "eagle3": (tied, {"method": "eagle3", "model": str(eagle3), "num_speculative_tokens": 3}),
        "mtp": (hybrid, {"method": "mtp", "num_speculative_tokens": 3}),
        "nemotron": (nemotron, {"method": "mtp", "num_speculative_tokens": 5}),
    }


@pytest.mark.parametrize(
    "method", ["plain", "ngram", "draft_model", "eagle", "eagle3", "mtp", "nemotron"]
)
def test_what_is_counted_is_what_an_engine_holds(tmp_path, monkeypatch, method):
    monkeypatch.setenv("SAMETOKEN_KERNELS", "reference")
    path, spec = cases(tmp_path)[method]
    options = {"load_format": "dummy", "max_num_seqs": 2, "num_kv_blocks": 8, "device": "cpu"}
    asked = config(path, spec, **options)
    found = measure_memory(asked)
    resolved = build_engine(asked).resolved
    assert found.request == resolved.request_memory
    assert found.weights == resolved.weights_bytes
    assert found.kv_per_block * 9 == resolved.kv_bytes
    request = found.request
    recurrent = request.recurrent_state + request.all_pending + request.draft_recurrent
    assert recurrent * 3 == resolved.recurrent_bytes
    assert found.request.kept_state == recurrent
    assert found.num_kept_states == resolved.num_kept_states
    assert found.kept_states == resolved.kept_states_bytes
    assert found.max_model_len == resolved.max_model_len
    assert found.total == found.weights + found.draft_weights + 2 * found.per_request
    # The same count over tensors that exist.
    monkeypatch.setattr(memory, "SHAPES_ONLY", torch.device("cpu"))
    assert measure_memory(asked) == found
    assert bool(found.draft_weights) == (method not in ("plain", "ngram"))


def test_on_a_gpu_adapters_are_counted_before_they_come(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "resolve_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(hopper, "is_hopper", lambda device: False)
    path, _ = cases(tmp_path)["plain"]
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": 2**20}
    plain = measure_memory(config(path, **options))
    found = measure_memory(config(path, **options, enable_lora=True, max_loras=2, max_lora_rank=20))
    sizes = read_config(Path(path))
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    # Inputs and outputs of each module; ranks are padded to powers of two.
    modules = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)]
    modules += [(hidden, inner), (hidden, inner), (inner, hidden)]
    elements = sizes.num_layers * sum(map(sum, modules)) * 32
    assert found.weights - plain.weights == 2 * elements * 2


def test_on_a_gpu_adapters_of_experts_are_counted_as_they_lie_there(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "resolve_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(hopper, "is_hopper", lambda device: False)
    path = write_family(tmp_path / "sparse", "qwen3_moe")
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": 2**20, "enable_lora": True}
    options |= {"max_loras": 2, "max_lora_rank": 20}
    of_linears = measure_memory(config(path, **options))
    found = measure_memory(config(path, **options, lora_experts=True))
    # Of two layers with six experts of 16 inner features; ranks are padded to powers of two.
    room = Room(2, 20, torch.bfloat16, torch.device("meta"))
    updates = [
        StackedPairUpdates.of(32, (16, 16), room, 6),
        StackedPairUpdates.of(16, (32,), room, 6),
    ]
    assert found.weights - of_linears.weights == 2 * sum(one.nbytes for one in updates)
    adapter = write_stacks(tmp_path / "adapter", path, rank=20)
    modules = {"own": str(adapter), "other": str(adapter)}
    brought = measure_memory(config(path, **options, lora_modules=modules))
    assert brought.weights == found.weights


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_a_quantized_head_s_matrices_are_all_the_drafter_s(tmp_path, method):
    """A copy of what it shares with the target, and of its own no more than the copy."""
    path, spec = cases(tmp_path)[method]
    options = {"kernels": ReferenceKernels(), "dtype": torch.float32, "max_positions": 1}
    options["device"] = torch.device("cpu")
    target = load_model(Path(path), **options, load_format="dummy")
    checkpoint = HEADS[method](Path(spec.get("model", path)), load_format="dummy")
    head = checkpoint.load(target, **options, quantize_fp8=True)
    held = [weight for name, weight in packed_in(head) if name != "embedding"]
    plain = measure_memory(config(path, spec))
    found = measure_memory(config(path, spec | {"quantization": "fp8"}))
    expected = sum(weight.nbytes for weight in held)
    assert found == dataclasses.replace(plain, draft_weights=expected)
    assert expected < plain.draft_weights


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_of_a_head_with_a_token_map_its_rows_are_counted(tmp_path, method, quantization):
    """Beside the target's own head, or in place of its copy in fp8."""
    path, spec = cases(tmp_path)[method]
    spec = spec | ({"quantization": quantization} if quantization else {})
    (tmp_path / "map.json").write_text("[1, 2, 3, 5, 8]")
    whole = measure_memory(config(path, spec))
    found = measure_memory(config(path, spec | {"token_map": str(tmp_path / "map.json")}))
    row = 16 + 4 if quantization else 16 * 4
    copied = 23 if quantization else 0
    assert found.draft_weights == whole.draft_weights + (5 - copied) * row
    assert found.weights == whole.weights


def test_a_gpu_s_step_expands_a_matrix_in_four_bits(tmp_path, monkeypatch):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    packed |= {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    sizes = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 32}
    asked = config(
        write_config(tmp_path, **sizes, quantization_config=packed),
        dtype="bfloat16",
        max_num_seqs=2,
        max_num_batched_tokens=512,
        swap_space=0,
    )
    on_cpu = measure_memory(asked).step
    monkeypatch.setattr(memory, "resolve_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(hopper, "is_hopper", lambda device: False)
    monkeypatch.setattr(resolve, "most_mixing", lambda *given, **options: 0)
    # In graphs, and in steps without.
    assert measure_memory(asked).step == on_cpu + 2 * 2 * (2 * 160 * 64)
    eager = dataclasses.replace(asked, enforce_eager=True)
    assert measure_memory(eager).step == on_cpu + 2 * (2 * 160 * 64)


def test_speculation_is_what_a_request_takes_beyond_plain_decoding(tmp_path):
    path, spec = cases(tmp_path)["mtp"]
    plain, found = measure_memory(config(path)).request, measure_memory(config(path, spec)).request
    assert plain.speculation(40) == plain.pending == plain.state_per_draft == 0
    assert found.plain(40) == plain.total(40)
    assert found.total(40) == found.plain(40) + found.speculation(40)
    assert found.speculation(41) - found.speculation(40) == found.draft_kv_per_token > 0


def test_what_no_engine_takes_is_refused_here_too(tmp_path):
    llama = write_config(tmp_path / "llama")
    with pytest.raises(ConfigError, match="above the model's 64"):
        measure_memory(config(llama, max_model_len=65))
    with pytest.raises(ConfigError, match="neither latent attention"):
        measure_memory(config(llama, fast_prompts_from=8))
    with pytest.raises(CheckpointError, match="neither a path"):
        measure_memory(config(str(tmp_path / "nowhere")))


def test_ranks_are_not_counted():
    with pytest.raises(ConfigError, match="Leave tensor_parallel_size out"):
        measure_memory(EngineConfig(model="m", tensor_parallel_size=2))
