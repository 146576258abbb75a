"""Dummy weights say one token over and over, so that drafts of prompt lookup are accepted."""

from __future__ import annotations

import json

import pytest

from helpers.checkpoints import LLAMA
from sametoken.bench.measure import measure
from sametoken.bench.workload import RequestSource, Workload
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine

# Proportions of Qwen3-8B: grouped queries, a wide MLP, an untied head; narrow and deep.
SIZES = LLAMA | {
    "vocab_size": 3000,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 36,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(("architecture", "k"), [("LlamaForCausalLM", 3), ("Qwen3ForCausalLM", 5)])
def test_nearly_all_drafts_of_prompt_lookup_are_accepted(tmp_path, architecture, k):
    sizes = SIZES | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    config = EngineConfig.from_options(
        model=str(tmp_path),
        load_format="dummy",
        device="cpu",
        max_num_seqs=2,
        speculative_config={"method": "ngram", "num_speculative_tokens": k},
    )
    workload = Workload(input_len=512, output_len=256)
    requests = RequestSource(workload, sizes["vocab_size"]).take(2)
    run = measure(build_engine(config), requests, 2)
    assert run.speculation.num_accepted_tokens > 0.9 * run.speculation.num_draft_tokens
    assert run.speculation.metrics().acceptance_length > 0.9 * (k + 1)
