"""The bytes of a step, counted from shapes, against weights that are really loaded."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.checkpoints import LLAMA, write_llama
from sametoken.bench.roofline import draft_elements, read_bandwidth, step_traffic
from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.engine.build import build_engine
from sametoken.kernels.reference import ReferenceKernels
from sametoken.models.eagle1_checkpoint import Eagle1Checkpoint
from sametoken.models.eagle3_checkpoint import Eagle3Checkpoint
from sametoken.models.loader import load_model

CPU = torch.device("cpu")
OPTIONS = {
    "kernels": ReferenceKernels(),
    "dtype": torch.float32,
    "device": CPU,
    "max_positions": 16,
}


def write_config(directory, **changes):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    return directory


def head_bytes(head, layers):
    linears = [layer for one in layers for layer in (one.attention.qkv, one.attention.output)]
    linears += [layer for one in layers for layer in (one.mlp.gate_up, one.mlp.down)]
    return sum(linear.nbytes for linear in linears) + head.lm_head.nbytes


@pytest.mark.parametrize("k", [1, 4])
def test_a_drafter_s_weights_are_read_once_per_pass(tmp_path, k):
    target = load_model(write_config(tmp_path / "t"), **OPTIONS, load_format="dummy")
    model = write_config(tmp_path / "d", num_hidden_layers=2)
    draft = load_model(model, **OPTIONS, load_format="dummy")
    one_pass = draft.weights_bytes - draft.embedding.nbytes
    assert 4 * draft_elements(SpeculativeConfig("draft_model", k, str(model))) == k * one_pass

    path = write_config(tmp_path / "e1", num_hidden_layers=1)
    eagle = Eagle1Checkpoint(path, load_format="dummy").load(target, **OPTIONS)
    one_pass = head_bytes(eagle, eagle.layers) + eagle.fc.nbytes
    assert 4 * draft_elements(SpeculativeConfig("eagle", k, str(path))) == k * one_pass

    path = write_config(tmp_path / "e3", num_hidden_layers=1, draft_vocab_size=9)
    eagle3 = Eagle3Checkpoint(path, load_format="dummy").load(target, **OPTIONS)
    step = k * head_bytes(eagle3, [eagle3]) + eagle3.fc.nbytes
    assert 4 * draft_elements(SpeculativeConfig("eagle3", k, str(path))) == step


def test_prompt_lookup_reads_no_weights():
    assert draft_elements(SpeculativeConfig("ngram", 5)) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_all_matrices_but_a_table_that_is_only_looked_up(tmp_path, tied):
    directory = write_config(tmp_path, tie_word_embeddings=tied)
    config = EngineConfig(str(directory), load_format="dummy", max_num_seqs=1, num_kv_blocks=4)
    resolved = build_engine(config).resolved
    traffic = step_traffic(resolved)
    table = 0 if tied else LLAMA["vocab_size"] * LLAMA["hidden_size"] * 4
    assert traffic.weights == resolved.weights_bytes - table
    assert traffic.kv_per_token * resolved.config.block_size == resolved.kv_bytes // 5
    assert traffic.step_bytes(10) - traffic.step_bytes(0) == 10 * traffic.kv_per_token
    assert traffic.draft_weights == 0


def test_a_drafter_s_kv_is_read_once_per_pass(tmp_path):
    directory = write_llama(tmp_path)
    spec = SpeculativeConfig("draft_model", 3, str(directory))
    config = EngineConfig(
        str(directory), num_kv_blocks=8, max_model_len=32, speculative_config=spec
    )
    resolved = build_engine(config).resolved
    one = resolved.kv_bytes // (9 * resolved.config.block_size) // 2
    assert step_traffic(resolved).kv_per_token == (1 + 3) * one


def test_bandwidth_is_that_of_the_fastest_way_to_read():
    bandwidth = read_bandwidth(CPU, 1 << 22)
    assert bandwidth.bytes_per_second > 1e7
    assert bandwidth.method
