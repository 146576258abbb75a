"""What a step is planned to take, against what it takes, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from helpers.checkpoints import VOCAB, write_llama
from helpers.families import FAMILIES, write_family
from helpers.harness import request
from helpers.hybrids import write_hybrid
from helpers.latents import write_latent
from helpers.launch_forms import META, recorded, run_on_meta, step_on_meta, write_shapes
from helpers.peak_memory import PeakMemory
from helpers.quantized import write_with_lm_head
from helpers.toy import toy_config
from sametoken.config import EngineConfig
from sametoken.engine import step_memory
from sametoken.engine.build import build_engine
from sametoken.engine.build_gpu import captured_shapes, eager_shapes
from sametoken.engine.resolve import GPU_RESERVE_BYTES, resolve_kv_bytes, resolve_steps
from sametoken.engine.step_memory import (
    StepMemory,
    most_adapted,
    most_expanded,
    most_mixing,
    require_addressable,
)
from sametoken.errors import ConfigError
from sametoken.layers import slices
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.models.loader import load_model
from sametoken.models.quantize import W4A16
from sametoken.ops.cache_types import PagedKV, Recurrent
from sametoken.ops.model.attention.kv import FLOAT8
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.gemm.int4 import Int4Weight, packed_int4
from sametoken.ops.model.gemm.int4_panels import Int4Panels
from sametoken.ops.model.gemm.int4_triton import FEW_ROWS
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.model.low_rank import Room, RowAdapters
from sametoken.ops.model.low_rank_experts import ExpertSizes
from sametoken.ops.model.low_rank_experts_triton import AdaptedStackedExperts
from sametoken.ops.model.mamba2.rule import Mamba2
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_triton import StackedExperts
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import TritonKernels
from sametoken.ops.weight import Int4Matrix
from sametoken.types.fast_prompts import ExpandedChunk, FastForm
from sametoken.types.layout import StepShape

GIB = 2**30
ROWS = 1000
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
LINEAR = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Qwen3.5-9B with max_num_batched_tokens 131072 and k = 64, as config.json's sizes give it.
QWEN = StepMemory(107_008, 81_920, 1_986_560, 256, 65)


def write_wide_latents(directory, **changes):
    """DeepSeek-V2 with heads of the same size, and latents twice as wide, as published ones."""
    own = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    wide = changes | own | {"num_key_value_heads": 8, "first_k_dense_replace": 2}
    del wide["head_dim"]
    return write_latent(directory, "deepseek_v2", **wide)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["hybrid", "llama", "latent"])
def test_a_step_takes_no_more_than_planned(kind, dtype, tmp_path, monkeypatch):
    for module in (slices, step_memory):
        monkeypatch.setattr(module, "SLICE_ROWS", 128)
    changes = SIZES | LINEAR if kind == "hybrid" else SIZES
    write = {"hybrid": write_hybrid, "llama": write_llama, "latent": write_wide_latents}[kind]
    target = write(tmp_path, **changes)
    core = build_engine(
        EngineConfig(
            str(target), device="cpu", dtype=dtype, max_num_seqs=2, max_num_batched_tokens=ROWS
        )
    )
    core.add_request(request("a", [i % VOCAB for i in range(ROWS)], 3))
    with PeakMemory() as memory:
        core.step()
    planned = core.resolved.step_bytes
    assert memory.peak <= planned <= 2.5 * memory.peak


def peak_and_planned(
    path,
    max_len: int,
    longest_chunks=range(1, 17),
    *,
    least_rows: int = 1,
    fast: Sequence[StepShape] = (),
    parallel: TensorParallel = SINGLE_RANK,
    stored: torch.dtype = torch.bfloat16,
) -> tuple[int, int]:
    """Bytes that steps of up to 256 rows take on a GPU, of 64 requests, and those planned."""
    sizes = (64, 0, 256)
    with recorded():
        step = step_on_meta(path, None, sizes[0], max_len + 1, parallel, stored)
        step = replace(step, fast_form=FastForm(len(fast)))
        shapes = [*captured_shapes(*sizes), *eager_shapes(*sizes)]
        chunks = [(rows, longest) for rows in (64, 256) for longest in longest_chunks]
        shapes += [StepShape(128, rows, 64, 64, 1, longest) for rows, longest in chunks]
        shapes = [shape for shape in shapes if shape.num_rows >= least_rows]
        with PeakMemory() as memory:
            run_on_meta(step, [*shapes, *fast])
        config = EngineConfig(
            "m", max_num_seqs=64, max_num_batched_tokens=256, block_size=64,
            fast_prompts_from=len(fast), tensor_parallel_size=parallel.size,
        )  # fmt: skip
        model, dtype = step.model, torch.bfloat16
        mixing = most_mixing(model, config, dtype, META, max_len, stored=stored)
        planned = StepMemory.of(config, model.config, model.caches, dtype, 0, 0, mixing)
    return memory.peak, planned.bytes_of(256)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-8b", {}),
        ("qwen3-8b", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}),
        ("qwen35-9b", {}),
        ("glm-4.7-flash", {}),
        ("lightning-30b-a3b", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stored", [torch.bfloat16, FLOAT8])
def test_a_small_step_on_a_gpu_takes_no_more_than_planned(tmp_path, name, changes, stored):
    """Partial results of long requests are what it has most of, in chunks of a few rows."""
    path = write_shapes(tmp_path, name, changes)
    peak, planned = peak_and_planned(path, 33023, stored=stored)
    assert peak <= planned <= 1.1 * peak


@pytest.mark.parametrize("stored", [torch.bfloat16, FLOAT8])
@pytest.mark.parametrize("heads", [20, 2])
def test_an_expanded_prompt_on_a_gpu_takes_no_more_than_planned(tmp_path, heads, stored):
    """Keys and values of as many heads as fit in a bound, or of all."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": heads}
    path = write_shapes(tmp_path, "glm-4.7-flash", changes)
    chunks = [ExpandedChunk(0, 0, 256, stop) for stop in (52_000, 70_000)]
    fast = [StepShape(1, 256, 1, 0, 1, 256, expanded=(chunk,)) for chunk in chunks]
    peak, planned = peak_and_planned(path, 70_000, fast=fast, stored=stored)
    assert peak <= planned <= 1.2 * peak


@pytest.mark.parametrize("name", ["qwen35-9b", "lightning-30b-a3b"])
def test_chunks_of_few_rows_on_a_gpu_take_no_more_than_planned(tmp_path, name):
    """Each has room for a whole one. A large vocabulary's logits would take more."""
    path = write_shapes(tmp_path, name, {}) / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config)["vocab_size"] = 1000
    path.write_text(json.dumps(config))
    fast = [StepShape(64, 256, 64, 0, 1, 4)]
    peak, planned = peak_and_planned(path.parent, 500, (), least_rows=256, fast=fast)
    assert peak <= planned <= 1.2 * peak


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_of_every_family_is_planned(tmp_path, name):
    """Of small models it has most of what grows with nothing, less than a MiB."""
    sizes = {"head_dim": 64} if name not in ("phi3", "olmo2", "granite", "qwen2") else {}
    path = write_family(tmp_path, name, **sizes)
    # Of all lengths to 64 one of these takes the most, in as many rows as there may be.
    peak, planned = peak_and_planned(path, 500, (8, 16, 32, 64), least_rows=256)
    assert peak <= planned + 2**20


class Twins(TensorParallel):
    """Of a rank whose only other one says the same."""

    rank, size = 0, 2

    def gather(self, x):
        return torch.stack((x, x))

    def broadcast(self, x):
        return x


def test_a_norm_over_the_heads_of_all_ranks_is_planned(tmp_path):
    wide = {"mamba_n_groups": 1, "mamba_n_heads": 64, "mamba_expand": 128}
    path = write_family(tmp_path, "bamba", **wide)
    peak, planned = peak_and_planned(path, 500, (8, 64), least_rows=256, parallel=Twins())
    assert peak <= planned <= 1.3 * peak


def test_rows_beyond_a_slice_add_only_what_must_be_whole():
    per_row = QWEN.bytes_of(131_072) - QWEN.bytes_of(131_071)
    assert per_row == 107_008
    assert 20 * GIB < QWEN.bytes_of(131_072) < 24 * GIB
    assert QWEN.bytes_of(QWEN.rows_within(10 * GIB)) <= 10 * GIB
    assert QWEN.bytes_of(2 * QWEN.rows_within(10 * GIB)) > 10 * GIB
    assert QWEN.rows_within(1000) == 0


@pytest.mark.parametrize("top_k", [None, 6])
def test_returned_experts_take_ids_of_all_layers(top_k):
    """As many as the recorder's buffer has, and their copy on the way to the host."""
    extra = {} if top_k is None else {"num_experts_per_tok": top_k}
    model = replace(toy_config(11), num_layers=7, extra=extra)
    plain, returning = (
        StepMemory.of(
            EngineConfig("toy", enable_return_routed_experts=on), model, (), torch.bfloat16, 0, 0
        )
        for on in (False, True)
    )
    assert returning.per_row - plain.per_row == 7 * (top_k or 0) * 10
    assert replace(returning, per_row=plain.per_row) == plain


def kv_bytes(monkeypatch, free: int, rows: int, steps: StepMemory = QWEN) -> int:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 141 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    config = EngineConfig(max_num_batched_tokens=rows, gpu_memory_utilization=1.0)
    return resolve_kv_bytes(config, cuda, 2 * GIB, steps)


def test_kv_memory_is_what_a_step_leaves(monkeypatch):
    large = kv_bytes(monkeypatch, 100 * GIB, 131_072)
    assert 70 * GIB < large < 100 * GIB - 2 * GIB - QWEN.bytes_of(131_072)
    without_drafts = replace(QWEN, max_window=1)
    small = kv_bytes(monkeypatch, 100 * GIB, 4096, without_drafts)
    assert small == 98 * GIB - GPU_RESERVE_BYTES


def test_a_step_that_does_not_fit_is_refused_with_one_that_does(monkeypatch):
    with pytest.raises(
        ConfigError, match=r"for a step of 131072 rows, leave no KV memory"
    ) as caught:
        kv_bytes(monkeypatch, 24 * GIB, 131_072)
    rows = int(caught.value.remedy.split("max_num_batched_tokens to ")[1].split(",")[0])
    assert rows >= 1024
    assert kv_bytes(monkeypatch, 24 * GIB, rows) > 0


def test_the_largest_matrix_in_four_bits_that_products_expand_is_counted(tmp_path, monkeypatch):
    sizes = SIZES | {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 128}
    _, copy = write_with_lm_head(tmp_path, 0, W4A16, **sizes)
    cpu, kernels = torch.device("cpu"), TritonKernels(GemmTable())
    model = load_model(copy, kernels=kernels, dtype=torch.bfloat16, device=cpu, max_positions=1)
    seen, expanded = [], Int4Panels.expanded

    def counted(panels, dtype):
        seen.append(panels.out_features * panels.in_features)
        return expanded(panels, dtype)

    monkeypatch.setattr(Int4Panels, "expanded", counted)
    x = torch.zeros(FEW_ROWS + 1, 128, dtype=torch.bfloat16)
    model.layers[0].mlp(x)
    model.compute_logits(x)
    assert max(seen) == most_expanded((model, None)) == 2 * 128 * 128
    on_cpu = resolve_steps(EngineConfig("m"), model, None, torch.bfloat16, cpu, 0)
    assert on_cpu.expanded == on_cpu.mixing == 0


def test_experts_in_four_bits_are_not_expanded():
    values, scale = packed_int4(torch.ones(8, 32, dtype=torch.uint8), 32), torch.ones(8, 1)
    weight = Int4Weight(Int4Matrix(values, scale, None))
    experts = ReferenceKernels().pack_experts([weight], [weight])
    assert most_expanded((weight, experts)) == 8 * 32
    assert most_expanded(experts) == 0


def test_an_expanded_matrix_leaves_less_kv_memory(monkeypatch):
    largest = replace(QWEN, expanded=GIB)
    assert largest.bytes_of(4096) == QWEN.bytes_of(4096) + GIB
    assert kv_bytes(monkeypatch, 100 * GIB, 131_072, largest) == (
        kv_bytes(monkeypatch, 100 * GIB, 131_072) - GIB
    )


@pytest.mark.parametrize(
    ("rule", "width"),
    [
        (GatedDelta(16, 64, 128, 128, 4), 2 * 16 * 128 + 64 * 128 + 2 * 64 + 16),
        (Mamba2(128, 64, 8, 128, 4), 128 * 64 + 2 * 8 * 128 + 2 * 128),
    ],
)
def test_a_step_has_no_more_rows_than_recurrent_layers_address(rule, width):
    """``width``: of a prepared row (``prepare`` of each rule)."""
    caches, cuda = [Recurrent(rule, torch.bfloat16)], torch.device("cuda")

    def asked(rows: int) -> EngineConfig:
        return EngineConfig(model="m", max_num_batched_tokens=rows, max_num_seqs=64)

    require_addressable(asked(131_072), caches, cuda)
    with pytest.raises(ConfigError, match="Lower it") as refused:
        require_addressable(asked(2**20), caches, cuda)
    most = int(re.search(r"more than the (\d+) rows", str(refused.value)).group(1))
    assert 0.95 * 2**31 < most * width <= 2**31
    require_addressable(asked(most), caches, cuda)
    require_addressable(asked(2**20), caches, torch.device("cpu"))
    require_addressable(asked(2**20), [PagedKV(2, 64, 64, torch.bfloat16)], cuda)


def test_adapted_experts_need_memory_for_each_that_a_row_chooses():
    shapes = (4, 96, 64), (4, 64, 48)
    stacks = (ExpertStack(torch.empty(shape, device="meta")) for shape in shapes)
    room, sizes = Room(1, 20, torch.bfloat16, torch.device("meta")), ExpertSizes(4, 64, (48, 48))
    experts = AdaptedStackedExperts.of(StackedExperts(*stacks), sizes, room, RowAdapters())
    # What is between the factors, of two parts, whose ranks are padded to powers of two.
    assert most_adapted([experts], 6) == 6 * 2 * 32 * 2
