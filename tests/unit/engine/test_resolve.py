"""What "auto" becomes, how KV memory is laid out, and the reasons that are given."""

from __future__ import annotations

import dataclasses
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import write_config
from helpers.hybrids import hybrid_config
from helpers.toy import toy_config
from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.engine.build import build_engine
from sametoken.engine.memory_plan import plan_memory, require_memory
from sametoken.engine.request_memory import RequestMemory
from sametoken.engine.resolve import (
    ResolvedConfig,
    reachable_positions,
    require_quantization,
    resolve_device,
    resolve_dtype,
    resolve_kv_bytes,
    resolve_kv_dtype,
    resolve_max_model_len,
    resolve_sizes,
)
from sametoken.engine.summary import explanation
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.ops.cache_types import (
    LatentKV,
    LayerCache,
    PagedKV,
    Recurrent,
    bytes_per_block,
    bytes_per_slot,
)
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.types.units import in_units

MODEL = toy_config(11)
BLOCK = 16
CPU = torch.device("cpu")
# 2 (keys, values) * 2 layers * 4 heads * 16 tokens * 8 elements * 2 bytes
KV = (PagedKV(4, 8, 8, torch.bfloat16),) * 2
BLOCK_BYTES = 4096


def plan(extra_tokens: int = 0, caches: tuple[LayerCache, ...] = KV, model=MODEL, **options):
    config = EngineConfig(**{"block_size": BLOCK, "max_num_seqs": 4} | options)
    return plan_memory(config, model, caches, extra_tokens, resolve_kv_bytes(config, CPU))


def test_a_block_costs_what_the_tests_count_with():
    assert bytes_per_block(KV, BLOCK) == BLOCK_BYTES


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_without_a_gpu_the_device_is_the_cpu(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(EngineConfig(device=asked)) == CPU


@pytest.mark.parametrize(
    ("hip", "capability", "why"),
    [
        (None, (7, 5), ""),
        (None, (6, 1), r"need compute capability 7\.5, this one has 6\.1"),
        # Of an MI300X, whose capability torch numbers as a Hopper's.
        ("6.3", (9, 4), "no kernels for AMD's GPUs"),
    ],
)
def test_a_gpu_with_kernels_is_used_unless_the_cpu_is_asked_for(
    monkeypatch, caplog, hip, capability, why
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert resolve_device(EngineConfig()).type == ("cpu" if why else "cuda")
    assert re.search(f"not used: .*{why}" if why else "^$", caplog.text)
    caplog.clear()
    assert resolve_device(EngineConfig(device="cpu")) == CPU
    assert not caplog.text
    with pytest.raises(UnsupportedError, match=why) if why else nullcontext():
        assert resolve_device(EngineConfig(device="cuda")).type == "cuda"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="'cuda'"):
        resolve_device(EngineConfig(device="cuda"))


@pytest.mark.parametrize(("device", "slots", "rows"), [("cpu", 64, 2048), ("cuda", 256, 8192)])
def test_sizes_left_open_follow_the_device(device, slots, rows):
    sizes = resolve_sizes(EngineConfig(), torch.device(device))
    assert (sizes.max_num_seqs, sizes.max_num_batched_tokens) == (slots, rows)
    assert resolve_sizes(EngineConfig(max_num_seqs=7), torch.device(device)).max_num_seqs == 7


@pytest.mark.parametrize(("asked", "longest"), [(0, 2**20), (30, 30), (2**20, 2**20)])
def test_a_chunk_is_as_long_as_a_step_unless_it_is_to_be_shorter(asked, longest):
    config = EngineConfig(prefill_chunk_size=asked, max_num_batched_tokens=2**20)
    assert resolve_sizes(config, CPU).prefill_chunk_size == longest


@pytest.mark.parametrize(
    ("asked", "stored", "expected", "why"),
    [
        ("auto", torch.float32, torch.float32, "the checkpoint is fp32"),
        ("auto", torch.bfloat16, torch.bfloat16, "the checkpoint is bfloat16"),
        ("auto", torch.float16, torch.bfloat16, "the checkpoint is float16"),
        ("float32", torch.bfloat16, torch.float32, "requested"),
        ("bfloat16", torch.float32, torch.bfloat16, "requested"),
    ],
)
def test_the_dtype_and_its_reason(asked, stored, expected, why):
    assert resolve_dtype(EngineConfig(dtype=asked), stored) == (expected, why)


@pytest.mark.parametrize(("asked", "length"), [(None, 512), (512, 512), (17, 17)])
def test_the_longest_request_is_the_model_s_or_what_was_asked(asked, length):
    assert resolve_max_model_len(EngineConfig(max_model_len=asked), MODEL) == length


def test_more_positions_than_the_model_has_are_refused():
    with pytest.raises(ConfigError, match="max_model_len=513 is above the model's 512"):
        resolve_max_model_len(EngineConfig(max_model_len=513), MODEL)
    with pytest.raises(ConfigError, match="above the model's 512"):
        plan(max_model_len=513)


def test_no_more_blocks_than_all_requests_can_fill():
    memory = plan()
    assert memory.num_kv_blocks == 4 * 512 // BLOCK
    assert memory.max_model_len == 512
    assert memory.reasons == {
        "max_model_len": "the model's longest position",
        "num_kv_blocks": f"{in_units(128 * BLOCK_BYTES)} of 1.0 GiB",
    }


def test_drafts_beyond_a_request_s_end_need_room_too():
    assert plan(extra_tokens=1).num_kv_blocks == 4 * (512 // BLOCK + 1)


def test_the_budget_limits_the_blocks():
    memory = plan(kv_cache_memory_bytes=51 * BLOCK_BYTES + 1)
    assert memory.num_kv_blocks == 50, "one more is reserved"
    assert memory.max_model_len == 512


def test_a_drafter_s_kv_comes_out_of_the_same_budget():
    memory = plan(caches=(*KV, KV[0]), kv_cache_memory_bytes=60 * BLOCK_BYTES)
    assert memory.num_kv_blocks == 39


def test_a_number_of_blocks_overrides_the_budget():
    memory = plan(num_kv_blocks=40, kv_cache_memory_bytes=BLOCK_BYTES)
    assert memory.num_kv_blocks == 40
    assert "num_kv_blocks" not in memory.reasons


@pytest.mark.parametrize(("extra_tokens", "length"), [(0, 320), (5, 315)])
def test_scarce_memory_shortens_the_longest_request(extra_tokens, length):
    memory = plan(extra_tokens, kv_cache_memory_bytes=21 * BLOCK_BYTES)
    assert memory.num_kv_blocks == 20
    assert memory.max_model_len == length
    assert memory.reasons["max_model_len"] == "what the KV memory holds for one request"


def test_an_explicit_length_is_never_shortened():
    assert plan(num_kv_blocks=20, max_model_len=320).max_model_len == 320
    for extra_tokens, length in ((0, 321), (1, 320)):
        with pytest.raises(ConfigError, match=f"max_model_len={length} takes 84.0 KiB") as caught:
            plan(extra_tokens, num_kv_blocks=20, max_model_len=length)
        fits = 320 - extra_tokens
        assert (
            caught.value.remedy == f"use max_model_len={fits} or less, or num_kv_blocks=21 or more"
        )
        assert plan(extra_tokens, num_kv_blocks=20, max_model_len=fits).num_kv_blocks == 20
        assert plan(extra_tokens, num_kv_blocks=21, max_model_len=length).num_kv_blocks == 21


@pytest.mark.parametrize("extra_tokens", [0, 64])
def test_memory_for_less_than_a_block_is_refused(extra_tokens):
    least = BLOCK_BYTES * (2 + extra_tokens // BLOCK)
    with pytest.raises(ConfigError, match="the KV memory holds 0 tokens") as caught:
        plan(extra_tokens, kv_cache_memory_bytes=least - 1)
    assert caught.value.remedy == f"use kv_cache_memory_bytes={least} or more"
    assert plan(extra_tokens, kv_cache_memory_bytes=least).max_model_len == BLOCK


@pytest.mark.parametrize("extra_tokens", [3, BLOCK, BLOCK + 1])
def test_the_least_number_of_blocks_is_named(extra_tokens):
    least = 1 + -(-extra_tokens // BLOCK)
    for too_few in range(1, least):
        with pytest.raises(ConfigError, match=f"even max_model_len={BLOCK} takes") as caught:
            plan(extra_tokens, num_kv_blocks=too_few)
        assert caught.value.remedy == f"use num_kv_blocks={least} or more"
    assert plan(extra_tokens, num_kv_blocks=least).max_model_len >= BLOCK


@pytest.mark.parametrize(
    ("asked", "even"), [(None, "even max_model_len=2 "), (9, "max_model_len=9 ")]
)
def test_a_request_of_one_token_is_not_proposed(asked, even):
    """It has a prompt and an output."""
    with pytest.raises(ConfigError, match=f"^{even}takes") as caught:
        plan(block_size=1, num_kv_blocks=1, max_model_len=asked)
    assert caught.value.remedy == f"use num_kv_blocks={asked or 2} or more"
    assert plan(block_size=1, num_kv_blocks=2).max_model_len == 2


def test_a_short_model_needs_no_more_than_it_has():
    short = dataclasses.replace(MODEL, max_position_embeddings=24)
    assert plan(model=short).num_kv_blocks == 4 * 2


RECURRENT = (*KV, Recurrent(GatedDelta(1, 2, 4, 4, 4), torch.float32))


def test_kept_states_come_out_of_the_kv_memory():
    dense, hybrid = (plan(caches=c, kv_cache_memory_bytes=2**18) for c in (KV, RECURRENT))
    state_bytes = bytes_per_slot(RECURRENT, 0)
    assert (dense.num_kept_states, hybrid.num_kept_states) == (0, 8 * 4)
    left = 2**18 - (hybrid.num_kept_states + 1) * state_bytes
    assert hybrid.num_kv_blocks == left // BLOCK_BYTES - 1 < dense.num_kv_blocks
    assert hybrid.reasons["kept_states_memory_bytes"] == "1/8 of 256.0 KiB KV memory"
    assert plan(caches=RECURRENT, enable_prefix_caching=False).num_kept_states == 0


def test_recurrent_state_comes_out_of_what_a_gpu_leaves_for_kv(monkeypatch):
    free, total = 60 * 2**30, 80 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    config, cuda = EngineConfig(gpu_memory_utilization=0.9), torch.device("cuda")
    plain = resolve_kv_bytes(config, cuda)
    assert resolve_kv_bytes(config, cuda, 10**9) == plain - 10**9
    with pytest.raises(ConfigError, match="for recurrent state") as caught:
        resolve_kv_bytes(config, cuda, plain)
    assert "lower max_num_seqs" in caught.value.remedy
    asked = dataclasses.replace(config, kv_cache_memory_bytes=7)
    assert resolve_kv_bytes(asked, cuda, 10**9) == 7


QUANTIZED = EngineConfig(speculative_config=SpeculativeConfig("mtp", 2, quantization="fp8"))
CUDA = torch.device("cuda")


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_a_gpu_that_knows_float8_runs_quantized_heads(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    require_quantization(QUANTIZED, CUDA)


def test_quantized_heads_are_refused_elsewhere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    for device, cause in ((CPU, "does not run on a CPU"), (CUDA, r"8\.9, this one has 8\.6")):
        with pytest.raises(UnsupportedError, match=cause) as caught:
            require_quantization(QUANTIZED, device)
        assert caught.value.remedy == 'leave "quantization" out'
        require_quantization(EngineConfig(), device)
        unquantized = dataclasses.replace(QUANTIZED.speculative_config, quantization=None)
        require_quantization(EngineConfig(speculative_config=unquantized), device)


def test_float8_kv_needs_a_gpu_that_converts_it_or_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    asked = EngineConfig(kv_cache_dtype="fp8_e4m3")
    with pytest.raises(UnsupportedError, match=r"KV in fp8 needs .* 8\.9, this one has 8\.0"):
        resolve_kv_dtype(asked, MODEL, "here", CUDA)
    assert resolve_kv_dtype(EngineConfig(), MODEL, "here", CUDA) == (EngineConfig(), {})
    found, reasons = resolve_kv_dtype(asked, MODEL, "here", CPU)
    assert found.kv_cache_dtype == "fp8"
    assert reasons == {"kv_cache_dtype": "fp8: requested; scales are 1"}


def sized(num_kv_blocks: int, **options) -> ResolvedConfig:
    return ResolvedConfig(
        config=EngineConfig(**{"max_num_seqs": 3, "block_size": BLOCK} | options),
        model_path=Path("nowhere"),
        model=MODEL,
        dtype=torch.float32,
        device=CPU,
        max_model_len=255,
        num_kv_blocks=num_kv_blocks,
        usual_rows=2048,
        kernels="none",
        attention_kernels="none",
        reasons={},
        weights_bytes=0,
        kv_bytes=BLOCK_BYTES * (num_kv_blocks + 1),
    )


def test_caches_fit_the_memory_or_are_refused_with_what_fits(monkeypatch):
    # Tables of 4 slots, 256 positions and 8 bytes, the reserved block, and 10 more.
    memory = {"SC_PHYS_PAGES": 4 * 256 * 8 + BLOCK_BYTES * 11, "SC_PAGE_SIZE": 1}
    monkeypatch.setattr("os.sysconf", memory.__getitem__)
    require_memory(sized(10), 0)
    with pytest.raises(ConfigError, match="11 KV blocks") as caught:
        require_memory(sized(11), 0)
    assert "num_kv_blocks=10 or fewer" in caught.value.remedy
    # What is proposed holds a request of the length that is asked for.
    for extra_tokens, fits in ((5, True), (6, False)):
        with pytest.raises(ConfigError, match="11 KV blocks") as caught:
            require_memory(sized(11, max_model_len=155), extra_tokens)
        assert ("num_kv_blocks=10 or fewer" in caught.value.remedy) == fits
    for name in ("recurrent_bytes", "kept_states_bytes", "step_bytes"):
        with pytest.raises(ConfigError, match="max_num_seqs=3 with max_model_len=255") as caught:
            require_memory(dataclasses.replace(sized(10), **{name: 10**6}), 0)
        assert caught.value.remedy == "lower max_num_batched_tokens, max_num_seqs or max_model_len"


def test_on_a_gpu_what_is_free_is_what_fits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**5, 10**9))
    resolved = dataclasses.replace(sized(10), device=torch.device("cuda"))
    require_memory(resolved, 0)
    with pytest.raises(ConfigError, match=r"cuda memory has 97\.7 KiB"):
        require_memory(dataclasses.replace(resolved, kv_bytes=10**5), 0)


def test_blocks_that_hold_nothing_are_as_many_as_requests_can_use():
    for asked in (None, 2**31):
        assert plan(caches=(), num_kv_blocks=asked).num_kv_blocks == 4 * 512 // BLOCK


@pytest.mark.parametrize(
    ("claim", "asked", "found"),
    [(512, None, 512), (2**21, None, 2**20), (2**21, 2**21, 2**21), (10**15, 2**24, 2**24)],
)
def test_a_claim_makes_no_request_longer_than_is_usual(claim, asked, found):
    model = dataclasses.replace(MODEL, max_position_embeddings=claim)
    assert resolve_max_model_len(EngineConfig(max_model_len=asked), model) == found


def test_no_claim_leads_beyond_what_angles_are_exact_for():
    model = dataclasses.replace(MODEL, max_position_embeddings=10**15)
    with pytest.raises(ConfigError, match="above the model's 16777216"):
        resolve_max_model_len(EngineConfig(max_model_len=2**24 + 1), model)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"kv_cache_memory_bytes": 3 * BLOCK_BYTES}, 32),
        ({"kv_cache_memory_bytes": 1}, 16),
        ({"num_kv_blocks": 4}, 64),
        ({"kv_cache_memory_bytes": 2**40}, 512),
    ],
)
def test_tables_end_where_memory_does(options, found):
    config = EngineConfig(block_size=16, **options)
    assert reachable_positions(config, KV, torch.device("cpu"), 512) == found


DRAFT_KV = (PagedKV(3, 5, 5, torch.float32),)
TARGET_KV = 2 * DRAFT_KV
TARGET_RECURRENT = 2 * (Recurrent(GatedDelta(1, 2, 4, 4, 4), torch.bfloat16),)


def test_bytes_are_those_of_every_cache():
    memory = RequestMemory.of(6, (*TARGET_RECURRENT, *TARGET_KV), (*DRAFT_KV, *TARGET_RECURRENT))
    assert memory.kv_per_token == 2 * 2 * 3 * 5 * 4
    assert memory.draft_kv_per_token == memory.kv_per_token // 2
    assert memory.recurrent_state == 2 * (4 * 2 * 4 * 4 + 2 * 3 * 16)
    pending = memory.all_pending
    assert memory.least_pending == 3 * 2 * 2 * (16 + 2 * 2) == pending / 2
    assert memory.state_per_draft == 6 * memory.recurrent_state
    assert memory.draft_recurrent == memory.recurrent_state + pending
    plain = memory.recurrent_state + memory.least_pending
    assert memory.plain(10) == plain + 10 * memory.kv_per_token
    own = 16 * memory.draft_kv_per_token + memory.draft_recurrent
    assert memory.speculation(10) == memory.pending + 6 * memory.kv_per_token + own


def test_a_dense_model_without_speculation_has_kv_alone():
    memory = RequestMemory.of(0, TARGET_KV)
    assert memory.total(7) == memory.plain(7) == 7 * memory.kv_per_token
    assert memory.speculation(7) == memory.pending == 0


def test_a_latent_is_one_vector_a_token_and_values_may_be_wider_than_keys():
    memory = RequestMemory.of(
        0, (LatentKV(512, 64, torch.bfloat16), PagedKV(2, 24, 8, torch.float32))
    )
    assert memory.kv_per_token == 2 * (512 + 64) + 4 * 2 * (24 + 8)


def test_the_start_up_report_shows_what_drafts_cost_and_would_cost(tmp_path):
    write_config(tmp_path, hybrid_config("qwen3_5"))
    spec = {"method": "ngram", "num_speculative_tokens": 8}
    options = {"load_format": "dummy", "num_kv_blocks": 8, "max_num_seqs": 2, "device": "cpu"}
    config = EngineConfig.from_options(model=str(tmp_path), speculative_config=spec, **options)
    resolved = build_engine(config).resolved
    lines = {one.name: one for one in explanation(resolved)}
    memory = resolved.request_memory
    assert memory.recurrent_state > 0
    assert memory.pending > 0
    assert lines["recurrent_bytes_per_request"].value == in_units(memory.recurrent_state)
    assert lines["pending_bytes_per_request"].value == in_units(memory.all_pending)
    would_take = f"would take {in_units(8 * memory.recurrent_state)}"
    assert would_take in lines["pending_bytes_per_request"].reason
    assert lines["kv_bytes_per_token"].value == in_units(memory.kv_per_token)
