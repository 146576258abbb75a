"""Start-up compiles what steps without a graph launch: else a request waits for a compiler."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from helpers.launch_forms import (
    META,
    layout_of,
    recorded,
    run_on_meta,
    step_on_meta,
    write_shapes,
)
from sametoken.distributed.peer_group import PeerGroup
from sametoken.engine.build_gpu import (
    captured_shapes,
    eager_shapes,
    expanded_shapes,
    many_tile_shapes,
)
from sametoken.models.base import StandIn
from sametoken.models.drafter_config import complete_drafter
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, SampledRows
from sametoken.ops.launch_sizes import ROW_MULTIPLE
from sametoken.ops.model.attention import hopper, triton
from sametoken.ops.model.attention.kv import FLOAT8
from sametoken.ops.model.latent_attention import hopper as latent_hopper
from sametoken.ops.model.recurrent.rule import FAST_ROWS
from sametoken.ops.peers import PeerBuffers
from sametoken.types.fast_prompts import ExpandedChunk, FastForm
from sametoken.types.layout import StepShape, padded
from sametoken.types.speculative_config import SpeculativeConfig

HEADS = [
    AttentionShape(*sizes)
    for sizes in [
        (32, 8, 128), (16, 4, 128), (16, 8, 128), (9, 3, 64), (16, 4, 256), (64, 8, 64),
        (4, 1, 128), (8, 1, 128), (40, 8, 128), (28, 4, 128), (14, 2, 64), (32, 32, 128),
        (8, 4, 256),
    ]
]  # fmt: skip
#: Requests, drafts, rows of a step and the longest sequence.
ENGINES = [
    (256, 0, 8192, 33024),
    (256, 3, 8192, 33024),
    (64, 7, 8192, 131072),
    (8, 0, 2048, 8192),
    (256, 64, 131072, 131072),
]


@cache
def compiled_shapes(engine, *, all_states: bool = False) -> list[StepShape]:
    """Of the steps that start-up runs."""
    sizes = engine[:3]
    captured = captured_shapes(*sizes, all_states=all_states)
    return [*captured, *eager_shapes(*sizes, all_states=all_states)]


@cache
def steps_of(engine, count: int, *, all_states: bool = False) -> set[StepShape]:
    """Shapes of steps with prompts, as an eager launcher pads them, which start-up does not run."""
    max_num_seqs, k, max_rows, _ = engine
    draw, drawn = random.Random(0), []
    while len(drawn) < count:
        prompts = draw.randint(1, min(draw.choice([1, 2, 4, max_num_seqs]), max_num_seqs))
        windows = draw.randint(0, max_num_seqs - prompts)
        longest = draw.choice([1, 4, 7, 10, 12, 16, 20, 30, 64, 100, 200, 512, max_rows])
        lengths = [draw.randint(1, longest) for _ in range(prompts)]
        drafts = [draw.randint(0, k) for _ in range(windows)]
        sampled = prompts + windows + sum(drafts)
        rows = sum(lengths) + windows + sum(drafts)
        if rows <= max_rows:
            requests, widest = windows + prompts, max(drafts, default=0) + 1
            sizes = (requests, rows, sampled, windows, widest, max(lengths))
            drawn.append(padded(StepShape(*sizes, all_states), ROW_MULTIPLE))
    return {*drawn} - {*compiled_shapes(engine, all_states=all_states)}


def attend(shapes, heads: AttentionShape, engine, attention, dtype=torch.bfloat16) -> None:
    """Attention of a layer in these steps: of all rows, and of those whose states are wanted."""
    max_num_seqs, _, _, max_len = engine
    numbers = partial(torch.empty, dtype=torch.int64, device=META)
    memory = torch.empty(1, heads.num_kv_heads, 64, heads.head_dim, dtype=dtype, device=META)
    table = numbers(max_num_seqs + 1, -(-max_len // 64))
    for shape in shapes:
        layout, rows = layout_of(shape), numbers(shape.num_rows)
        sampled = numbers(shape.num_sampled)
        index = None if shape.all_sampled else sampled
        kept = layout.kept(SampledRows(index, *[sampled] * 4), table)
        for asked in (AttentionRows(rows, rows, rows, table, layout.runs), kept):
            if asked is not None:
                size = (len(asked.positions), heads.num_heads, heads.head_dim)
                q = torch.empty(size, dtype=dtype, device=META)
                attention(q, heads, asked, LayerKV(memory, memory))


@pytest.mark.parametrize(
    ("heads", "engine"),
    # Each engine with several heads, and each of these with two engines.
    [(heads, ENGINES[(i + j) % 5]) for i, heads in enumerate(HEADS) for j in (0, 2)],
    ids=str,
)
def test_start_up_compiles_the_attention_of_every_step(heads, engine):
    counters = torch.empty(hopper.MAX_COUNTERS, dtype=torch.int64, device=META)
    attention = partial(hopper.attention, arrived=counters)
    with recorded() as forms:
        attend(compiled_shapes(engine), heads, engine, attention)
        compiled = set(forms)
        attend(steps_of(engine, 100), heads, engine, attention)
    assert len(compiled) >= 3
    assert forms == compiled


@pytest.mark.parametrize(
    ("heads", "dtype", "engine"),
    [
        ((32, 8, 128), torch.bfloat16, ENGINES[0]),
        ((4, 2, 128), torch.bfloat16, (512, 0, 4096, 8192)),
        ((2, 2, 128), torch.bfloat16, (17, 5, 300, 8192)),
        ((8, 1, 128), torch.bfloat16, (128, 0, 4096, 8192)),
        ((4, 1, 256), torch.bfloat16, (64, 15, 2048, 8192)),
        ((2, 1, 512), torch.bfloat16, (128, 0, 4096, 8192)),
        ((16, 8, 128), torch.float32, ENGINES[2]),
        ((3, 1, 64), torch.float32, (128, 0, 4096, 8192)),
    ],
    ids=str,
)
def test_start_up_compiles_the_attention_of_every_chip(heads, dtype, engine):
    """In Triton, also of a rank's share, and of KV in float8 as of bf16."""
    shape = AttentionShape(*heads)
    with recorded() as forms:
        attend(compiled_shapes(engine), shape, engine, triton.attention, dtype)
        compiled = set(forms)
        attend(steps_of(engine, 200), shape, engine, triton.attention, dtype)
    searching = {dict(form)["BLOCK_RUNS"] for _, form in compiled}
    assert len(searching) == 2
    assert "0" in searching
    assert forms == compiled


@pytest.mark.parametrize(
    ("heads", "engine"),
    [
        (128, (64, 0, 8192, 33024)),
        (2, (64, 0, 8192, 33024)),
        (20, (64, 0, 8192, 131072)),
        (20, (8, 0, 64, 4096)),  # Fewer rows than tiles of many rows have.
    ],
)
def test_start_up_compiles_expanded_prompts_of_any_length(tmp_path, heads, engine):
    """Chunks of any rows that see any context, alone or after windows and other chunks."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": heads}
    path = write_shapes(tmp_path, "glm-4.7-flash", changes)
    max_num_seqs, _, max_rows, max_len = engine
    draw = random.Random(0)
    with recorded() as forms:
        step = step_on_meta(path, None, max_num_seqs, max_len)
        shapes = expanded_shapes(max_rows, step, torch.bfloat16)
        # Also of an engine that returns the experts of its tokens.
        recording = replace(step, model=StandIn(step.model))
        assert expanded_shapes(max_rows, recording, torch.bfloat16) == shapes
        run_on_meta(step, [*compiled_shapes(engine), *shapes])
        compiled = set(forms)
        for _ in range(40):
            windows, before = draw.randint(0, max_num_seqs - 1), draw.choice([0, 0, 1, 30, 300])
            first = min(windows + before, max_rows - 1)
            windows, before = min(windows, first), first - min(windows, first)
            rows = min(draw.choice([1, 5, 60, 100, 330, 700, 1600, 8192]), max_rows - first)
            stop = min(rows + draw.choice([0, 3, 500, 9000, 28000, 110000]), max_len)
            chunk = ExpandedChunk(0, first, rows, stop)
            sizes = (windows + (before > 0) + 1, first + rows, windows + 1, windows, 1)
            shape = StepShape(*sizes, max(before, rows), expanded=(chunk,))
            run_on_meta(step, [padded(shape, ROW_MULTIPLE)])
    assert {"splits_kernel", "_head_products_kernel"} <= {one for one, _ in compiled}
    assert not {form for form in forms - compiled if form[0] not in PRODUCTS}


@pytest.mark.parametrize(
    ("name", "own"), [("qwen35-9b", "_solve_kernel"), ("lightning-30b-a3b", "_mix_kernel")]
)
def test_start_up_compiles_what_steps_with_chunks_launch(tmp_path, name, own):
    engine, draw = (4, 0, 1024, 2000), random.Random(0)
    path = write_shapes(tmp_path, name, {})
    with recorded() as forms:
        step = replace(step_on_meta(path, None, 4, 2000), fast_form=FastForm(66, FAST_ROWS))
        run_on_meta(step, compiled_shapes(engine))
        compiled = set(forms)
        for _ in range(20):
            windows, chunks = draw.randint(0, 2), draw.randint(1, 2)
            rows = draw.choice([2, 60, 64, 100, 300])
            sizes = (windows + chunks, windows + chunks * rows, windows + 1, windows, 1, rows)
            run_on_meta(step, [padded(StepShape(*sizes), ROW_MULTIPLE)])
    assert {own, "_scan_kernel"} <= {one for one, _ in compiled}
    assert not {form for form in forms - compiled if form[0] not in PRODUCTS}


#: Of products each row count has been compiled (tests/unit/engine/test_build_gpu.py).
PRODUCTS = ("_product_kernel", "streamed_kernel")


#: A rank's share of them.
EIGHT_HEADS, TEN_HEADS = (
    {"num_attention_heads": heads, "num_key_value_heads": heads} for heads in (8, 10)
)
#: Of four layers.
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("name", "method", "engine", "changes"),
    [
        ("qwen3-8b", "eagle3", (256, 3, 8192, 33024), {}),
        ("qwen3-8b", "eagle3", (17, 5, 300, 8192), {}),  # Fewer requests than steps are padded to.
        ("qwen35-9b", "mtp", (64, 3, 8192, 33024), {}),
        ("qwen35-9b", None, (512, 0, 4096, 8192), {}),
        ("glm-4.7-flash", "mtp", (64, 3, 8192, 33024), {}),
        ("glm-4.7-flash", None, (100, 0, 512, 8192), {}),
        ("glm-4.7-flash", None, (1024, 0, 4096, 4096), EIGHT_HEADS),
        ("glm-4.7-flash", None, (17, 0, 2048, 8192), TEN_HEADS),
        ("lightning-30b-a3b", "mtp", (64, 5, 8192, 33024), {}),
        ("lightning-30b-a3b", None, (2, 0, 2048, 8192), {}),
        ("qwen3-30b-a3b", None, (256, 0, 8192, 33024), {}),
        ("qwen3-8b-fp8", None, (256, 0, 8192, 33024), {}),
        ("gpt-oss-20b", None, (256, 0, 8192, 33024), WINDOWS),
        ("gemma-3-12b", None, (256, 0, 8192, 33024), WINDOWS),
    ],
    ids=str,
)
def test_start_up_compiles_every_kernel_of_a_step(tmp_path, name, method, engine, changes):
    start_and_run(tmp_path, name, method, engine, changes)


@pytest.mark.parametrize(
    ("method", "engine", "changes"),
    [("mtp", (64, 3, 8192, 33024), {}), (None, (1024, 0, 4096, 4096), EIGHT_HEADS)],
    ids=str,
)
def test_start_up_compiles_every_kernel_of_latents_in_float8(
    tmp_path, method, engine, changes, monkeypatch
):
    """By Triton's kernels, as on other chips, which have a form for many prompts of few tokens."""
    monkeypatch.setattr(latent_hopper, "serves", lambda *_: False)
    options = {"stored": FLOAT8, "num_steps": 200}
    compiled = start_and_run(tmp_path, "glm-4.7-flash", method, engine, changes, **options)
    assert {"_sequential_kernel", "_split_kv_kernel"} <= {kernel for kernel, _ in compiled}


def test_start_up_compiles_hopper_s_kernels_of_latents_in_float8(tmp_path):
    engine = (64, 3, 8192, 33024)
    compiled = start_and_run(tmp_path, "glm-4.7-flash", "mtp", engine, stored=FLOAT8)
    assert {"pair_rows_kernel", "splits_kernel"} <= {kernel for kernel, _ in compiled}


@pytest.mark.parametrize(
    ("name", "method", "engine", "rank"),
    [
        ("qwen3-8b", "eagle3", (64, 3, 8192, 8192), 0),
        ("qwen35-9b", "mtp", (64, 3, 8192, 8192), 1),
        ("glm-4.7-flash", "mtp", (17, 3, 2048, 8192), 0),
        ("lightning-30b-a3b", "mtp", (64, 5, 8192, 8192), 1),
    ],
)
def test_start_up_compiles_every_kernel_of_a_rank(tmp_path, name, method, engine, rank):
    """It divides the drafter too, and exchanges by kernels."""
    counts = torch.empty(512, dtype=torch.int32, device=META)
    group = PeerGroup(PeerBuffers(rank, (1 << 40, 1 << 41), counts, counts[:1]), [])
    compiled = start_and_run(tmp_path, name, method, engine, parallel=group)
    assert "_exchange_kernel" in {kernel for kernel, _ in compiled}


def start_and_run(
    tmp_path, name, method, engine, changes=None, *, num_steps: int = 24, **options
) -> set:
    """What start-up compiles, which has to be all that steps launch."""
    path, spec = write_shapes(tmp_path, name, changes or {}), None
    if method:
        head = tmp_path / f"eagle3-{name}" if method == "eagle3" else None
        model = None if head is None else str(head)
        spec = SpeculativeConfig(method=method, model=model, num_speculative_tokens=engine[1])
    with recorded() as forms:
        sizes = engine[0], engine[3]
        spec = complete_drafter(spec)[0]
        step = step_on_meta(path, spec, *sizes, **options)
        run_on_meta(step, compiled_shapes(engine, all_states=step.all_states))
        run_on_meta(step, many_tile_shapes(engine[0], step))
        compiled = set(forms)
        run_on_meta(step, steps_of(engine, num_steps, all_states=step.all_states))
    assert len({kernel for kernel, _ in compiled}) > 12
    assert not {form for form in forms - compiled if form[0] not in PRODUCTS}
    return compiled
