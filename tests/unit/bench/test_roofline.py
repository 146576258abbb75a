"""The bytes of a step, counted from shapes, against weights that are really loaded."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.checkpoints import HIDDEN, LLAMA, VOCAB, write_config, write_llama
from helpers.hybrids import EXPERTS, hybrid_config
from helpers.nemotron import nemotron_config
from helpers.state_heads import WIDTH, write_mlp
from sametoken.bench.roofline import draft_elements, read_bandwidth, step_traffic
from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.engine.build import build_engine
from sametoken.errors import ConfigError
from sametoken.models.heads.eagle import Eagle1Checkpoint
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.loader import load_model, read_config
from sametoken.ops.model.recurrent.rule import STATE_STRIDE
from sametoken.ops.reference import ReferenceKernels

CPU = torch.device("cpu")
OPTIONS = {
    "kernels": ReferenceKernels(),
    "dtype": torch.float32,
    "device": CPU,
    "max_positions": 16,
}


def elements(method: str, k: int, path, target_path) -> int:
    """Of a drafter whose checkpoint is its own."""
    spec = SpeculativeConfig(method, k, str(path))
    return sum(draft_elements(spec, read_config(target_path), target_path))


def head_bytes(head, layers):
    linears = [layer for one in layers for layer in (one.attention.qkv, one.attention.output)]
    linears += [layer for one in layers for layer in (one.mlp.gate_up, one.mlp.down)]
    return sum(linear.nbytes for linear in linears) + head.lm_head.nbytes


@pytest.mark.parametrize("k", [1, 4])
def test_a_drafter_s_weights_are_read_once_per_pass(tmp_path, k):
    whole = write_config(tmp_path / "t")
    target = load_model(whole, **OPTIONS, load_format="dummy")
    model = write_config(tmp_path / "d", num_hidden_layers=2)
    draft = load_model(model, **OPTIONS, load_format="dummy")
    one_pass = draft.weights_bytes - draft.embedding.nbytes
    assert 4 * elements("draft_model", k, model, whole) == k * one_pass

    path = write_config(tmp_path / "e1", num_hidden_layers=1)
    eagle = Eagle1Checkpoint(path, load_format="dummy").load(target, **OPTIONS)
    one_pass = head_bytes(eagle, eagle.layers) + eagle.fc.nbytes
    assert 4 * elements("eagle", k, path, whole) == k * one_pass

    path = write_config(tmp_path / "e3", num_hidden_layers=1, draft_vocab_size=9)
    eagle3 = Eagle3Checkpoint(path, load_format="dummy").load(target, **OPTIONS)
    step = k * head_bytes(eagle3, [eagle3.layer]) + eagle3.fc.nbytes
    assert 4 * elements("eagle3", k, path, whole) == step

    # Each draft has its own projection, and the first one reads the target's state.
    path = write_mlp(tmp_path / "mlp", n_predict=5)
    read = HIDDEN * WIDTH + (k - 1) * WIDTH**2 + k * VOCAB * WIDTH
    assert elements("mlp_speculator", k, path, whole) == read


def test_a_hybrid_draft_model_s_layers_are_those_that_it_has(tmp_path):
    write_config(tmp_path, hybrid_config("qwen3_5"))
    draft = load_model(tmp_path, **OPTIONS, load_format="dummy")
    one_pass = draft.weights_bytes
    if draft.head is not draft.embedding:
        one_pass -= draft.embedding.nbytes
    assert 4 * elements("draft_model", 3, tmp_path, tmp_path) == 3 * one_pass


@pytest.mark.parametrize(
    ("kind", "experts_left", "matrices"),
    [("qwen3_5", 0, 0), ("qwen3_next", 2, 3), ("nemotron_h", 2, 2)],
)
def test_a_module_of_the_target_s_is_read_once_per_pass(tmp_path, kind, experts_left, matrices):
    write_config(tmp_path, nemotron_config() if kind == "nemotron_h" else hybrid_config(kind))
    target = load_model(tmp_path, **OPTIONS, load_format="dummy")
    head = MTPCheckpoint(tmp_path, load_format="dummy").load(target, **OPTIONS)
    # Of four experts a row reads two.
    unread = 4 * experts_left * matrices * HIDDEN * EXPERTS["moe_intermediate_size"]
    module = head.module
    one_pass = module.fc.nbytes + module.layer.nbytes + head.lm_head.nbytes - unread
    mtp = SpeculativeConfig("mtp", 3)
    found = draft_elements(mtp, target.config, tmp_path)
    assert 4 * sum(found) == 3 * one_pass
    mixture = module.layer.mlp.nbytes - unread if experts_left else 0
    assert 4 * found.experts == 3 * mixture


def test_prompt_lookup_reads_no_weights(tmp_path):
    target = read_config(write_config(tmp_path))
    assert draft_elements(SpeculativeConfig("ngram", 5), target, tmp_path) == (0, 0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_all_matrices_but_a_table_that_is_only_looked_up(tmp_path, tied):
    directory = write_config(tmp_path, tie_word_embeddings=tied)
    config = EngineConfig(str(directory), load_format="dummy", max_num_seqs=1, num_kv_blocks=4)
    resolved = build_engine(config).resolved
    traffic = step_traffic(resolved)
    table = 0 if tied else LLAMA["vocab_size"] * LLAMA["hidden_size"] * 4
    assert traffic.weights == resolved.weights_bytes - table
    assert traffic.kv_per_token * resolved.config.block_size == resolved.kv_bytes // 5
    assert traffic.step_bytes(10, 2) - traffic.step_bytes(0, 2) == 10 * traffic.kv_per_token
    assert traffic.recurrent_per_request == 0
    assert traffic.draft_weights == 0


@pytest.mark.parametrize("drafts_itself", [False, True])
def test_recurrent_state_is_read_and_written_and_attention_layers_alone_have_kv(
    tmp_path, drafts_itself
):
    write_config(tmp_path, hybrid_config("qwen3_5"))
    spec = SpeculativeConfig("draft_model", 2, str(tmp_path)) if drafts_itself else None
    config = EngineConfig(
        str(tmp_path),
        load_format="dummy",
        max_num_seqs=1,
        num_kv_blocks=4,
        max_model_len=32,
        speculative_config=spec,
    )
    core = build_engine(config)
    traffic, kv = step_traffic(core.resolved), core._runner.step.kv
    state, history, *raw_rows = [memory[:, 0].nbytes for memory in kv.slots]
    states, pending = state + history, sum(raw_rows)
    models = 2 if drafts_itself else 1
    further = 3 * (states + pending) if drafts_itself else 0
    assert traffic.recurrent_per_request == 2 * states + further
    assert traffic.step_bytes(0, 3) - traffic.step_bytes(0, 1) == 2 * (2 * states + further)
    on_gpu = step_traffic(dataclasses.replace(core.resolved, device=torch.device("cuda")))
    writes = states if drafts_itself else states // STATE_STRIDE
    assert on_gpu.recurrent_per_request == states + writes + further
    per_token = sum(memory.nbytes for memory in kv.blocks) // (5 * core.resolved.config.block_size)
    assert traffic.kv_per_token == per_token * (1 + 2 * (models - 1))


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_a_quantized_module_is_read_at_a_byte_an_element_but_for_its_experts(tmp_path, kind):
    write_config(tmp_path, hybrid_config(kind))
    spec = SpeculativeConfig("mtp", 3)
    config = EngineConfig(
        str(tmp_path), load_format="dummy", max_model_len=32, speculative_config=spec
    )
    resolved = build_engine(config).resolved
    spec = dataclasses.replace(spec, quantization="fp8")
    quantized = dataclasses.replace(
        resolved, config=dataclasses.replace(config, speculative_config=spec)
    )
    plain, found = step_traffic(resolved), step_traffic(quantized)
    read = draft_elements(spec, resolved.model, tmp_path)
    assert plain.draft_weights == 4 * sum(read)
    expected = read.projections + 4 * read.experts
    assert found == dataclasses.replace(plain, draft_weights=expected)
    assert bool(read.experts) == (kind == "qwen3_next")


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_of_a_head_with_a_token_map_its_rows_are_read(tmp_path, method):
    (tmp_path / "map.json").write_text("[1, 2, 3, 5, 8]")
    model = None
    if method == "mtp":
        write_config(tmp_path, hybrid_config("qwen3_5"))
    else:
        write_config(tmp_path)
        model = str(write_config(tmp_path / "head", num_hidden_layers=1))
    target = read_config(tmp_path)
    whole = SpeculativeConfig(method, 3, model)
    mapped = dataclasses.replace(whole, token_map=str(tmp_path / "map.json"))
    fewer = 3 * (target.vocab_size - 5) * target.hidden_size
    before, after = (draft_elements(spec, target, tmp_path) for spec in (whole, mapped))
    assert after == before._replace(projections=before.projections - fewer)


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


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda:0", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")),
        ("cpu", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    ],
)
def test_a_device_without_room_to_measure_is_one_error(monkeypatch, device, said):
    def refuse(*shape, **options):
        raise said

    monkeypatch.setattr(torch, "ones", refuse)
    with pytest.raises(ConfigError, match=rf"{device} has no 4\.0 GiB free"):
        read_bandwidth(torch.device(device), 2**32)
