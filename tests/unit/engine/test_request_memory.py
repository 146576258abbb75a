"""What a request takes: sums over target and drafter, and its lines in the start-up report."""

from __future__ import annotations

import json

import torch

from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.resolve import RequestMemory
from sametoken.engine.summary import explanation
from sametoken.ops.cache_types import LatentKV, PagedKV, Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta

DRAFT_KV = (PagedKV(3, 5, 5, torch.float32),)
KV = 2 * DRAFT_KV
RECURRENT = 2 * (Recurrent(GatedDelta(1, 2, 4, 4, 4), torch.bfloat16),)
HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "dtype": "float32",
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "max_position_embeddings": 64,
}


def test_bytes_are_those_of_every_cache():
    memory = RequestMemory.of(6, (*RECURRENT, *KV), (*DRAFT_KV, *RECURRENT))
    assert memory.kv_per_token == 2 * 2 * 3 * 5 * 4
    assert memory.draft_kv_per_token == memory.kv_per_token // 2
    assert memory.recurrent_state == 2 * (4 * 2 * 4 * 4 + 2 * 3 * 16)
    assert memory.pending == 6 * 2 * 2 * (16 + 2 * 2)
    assert memory.state_per_draft == 6 * memory.recurrent_state
    assert memory.draft_recurrent == memory.recurrent_state + memory.pending
    assert memory.plain(10) == memory.recurrent_state + 10 * memory.kv_per_token
    own = 16 * memory.draft_kv_per_token + memory.draft_recurrent
    assert memory.speculation(10) == memory.pending + 6 * memory.kv_per_token + own


def test_a_dense_model_without_speculation_has_kv_alone():
    memory = RequestMemory.of(0, KV)
    assert memory.total(7) == memory.plain(7) == 7 * memory.kv_per_token
    assert memory.speculation(7) == memory.pending == 0


def test_a_latent_is_one_vector_a_token_and_values_may_be_wider_than_keys():
    memory = RequestMemory.of(
        0, (LatentKV(512, 64, torch.bfloat16), PagedKV(2, 24, 8, torch.float32))
    )
    assert memory.kv_per_token == 2 * (512 + 64) + 4 * 2 * (24 + 8)


def test_the_start_up_report_shows_what_drafts_cost_and_would_cost(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    spec = {"method": "ngram", "num_speculative_tokens": 8}
    options = {"load_format": "dummy", "num_kv_blocks": 8, "max_num_seqs": 2, "device": "cpu"}
    config = EngineConfig.from_options(model=str(tmp_path), speculative_config=spec, **options)
    resolved = build_engine(config).resolved
    lines = {one.name: one for one in explanation(resolved)}
    memory = resolved.request_memory
    assert int(lines["recurrent_bytes_per_request"].value) == memory.recurrent_state > 0
    assert int(lines["pending_bytes_per_request"].value) == memory.pending > 0
    assert f"would take {8 * memory.recurrent_state}" in lines["pending_bytes_per_request"].reason
    assert int(lines["kv_bytes_per_token"].value) == memory.kv_per_token
