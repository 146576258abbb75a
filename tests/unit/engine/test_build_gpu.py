"""Shapes that are captured, row counts that are proven, and which step goes where."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sametoken.engine.build_gpu import (
    LIMIT_ROWS,
    MOST_ROWS,
    captured_rows,
    captured_shapes,
    gpu_launchers,
    row_counts,
)
from sametoken.layers.slices import in_slices
from sametoken.ops.launch_sizes import ROW_MULTIPLE
from sametoken.ops.model.gemm import product as gemm
from sametoken.ops.model.gemm import streamed_hopper
from sametoken.ops.model.gemm import triton as tiled
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.triton import TritonKernels
from sametoken.runner.graphs import StepGraphs
from sametoken.runner.runner import EagerLauncher
from sametoken.scheduler.plan_draft import max_sampled_rows
from sametoken.types.layout import StepLayout, StepShape, padded
from sametoken.types.plan import ScheduledRequest, StepPlan

sizes = st.tuples(st.integers(1, 600), st.sampled_from([0, 1, 3, 7, 64]), st.integers(64, 9000))
most_rows = st.integers(MOST_ROWS, LIMIT_ROWS)


@given(sizes, most_rows, st.booleans())
def test_shapes_are_of_sizes_that_a_step_may_have(asked, most, sparse):
    max_num_seqs, k, max_rows = asked
    shapes = captured_shapes(*asked, most, sparse=sparse)
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        assert shape.num_requests <= shape.num_rows <= min(max_rows, most)
        assert max(shape.num_windows, shape.num_chunks) <= max_num_seqs
        # Logits are most of a graph's memory.
        assert shape.num_sampled <= min(shape.num_rows, MOST_ROWS)
        assert shape.max_window <= k + 1
        if shape.all_sampled:
            assert shape.num_sampled == shape.num_rows
            # Even runs of one row each are launched otherwise.
            assert (shape.max_window == 1) == (shape.num_rows == shape.num_requests)
    windows = [shape for shape in shapes if shape.all_sampled]
    mixed = [shape for shape in shapes if not shape.all_sampled]
    # The first that holds a step is the smallest.
    assert [*shapes] == [*windows, *mixed]
    for kind in (windows, mixed):
        assert [shape.num_rows for shape in kind] == sorted(shape.num_rows for shape in kind)


@given(sizes, most_rows, st.booleans())
def test_no_shape_is_captured_for_nothing(asked, most, sparse):
    shapes = captured_shapes(*asked, most, sparse=sparse)
    for shape in shapes:
        assert next(one for one in shapes if one.holds(shape)) == shape


@given(st.integers(1, 300), st.sampled_from([0, 3, 64]), most_rows, st.data())
def test_crowds_of_prompts_run_in_a_shape_hardly_padded(max_num_seqs, k, most, data):
    """Up to the most rows, of which an eighth at most is padding: computing it takes time."""
    rows = data.draw(st.integers(1025, most * 7 // 8))
    prompts = data.draw(st.integers(1, min(max_num_seqs, rows // 64)))
    step = StepShape(prompts, rows, prompts, 0, k + 1, rows - prompts + 1)
    shapes = captured_shapes(max_num_seqs, k, LIMIT_ROWS, most)
    found = next(shape for shape in shapes if shape.holds(step))
    assert found.num_rows - rows < max(128, rows // 8)


def test_larger_steps_of_small_rows_and_many_launches_are_captured():
    """Sizes as of Qwen3-0.6B, Qwen3-8B, Qwen3-30B-A3B in float8, and of a dense 32B."""
    asked = ((5e6, 257), (61e6, 330), (38e6, 830), (256e6, 582))
    assert [captured_rows(*one) for one in asked] == [LIMIT_ROWS, 2434, LIMIT_ROWS, MOST_ROWS]


@given(sizes, st.data())
def test_small_steps_of_windows_run_in_a_shape_of_at_most_four_times_their_rows(asked, data):
    max_num_seqs, k, max_rows = asked
    most = min(max_rows, MOST_ROWS) // 4
    count = data.draw(st.integers(1, min(max_num_seqs, most)))
    rows, left = [], most - count
    for slot in range(count):
        rows.append(ScheduledRequest(slot, 1, data.draw(st.integers(0, min(k, left))), True))
        left -= rows[-1].draft_limit
    step = StepLayout.of(StepPlan(0, requests=tuple(rows))).shape
    found = next(shape for shape in captured_shapes(*asked) if shape.holds(step))
    assert found.num_rows <= 4 * step.num_rows


@given(sizes, st.data())
def test_few_requests_of_sparse_models_run_hardly_padded(asked, data):
    """Rows of padding would choose experts that may be read for them alone."""
    max_num_seqs, _, max_rows = asked
    count = data.draw(st.integers(1, min(max_num_seqs, max_rows, 64)))
    step = StepShape(count, count, count, count, 1, 1)
    shapes = captured_shapes(*asked, sparse=True)
    found = next(shape for shape in shapes if shape.holds(step))
    assert found.num_rows - count < (1 if count <= 8 else 4 if count <= 32 else 8)


def products_of(num_rows):
    """Row counts of the products of these rows: those of their slices."""
    counts = set()
    in_slices(lambda rows: counts.add(len(rows)) or rows, torch.empty(num_rows, 1))
    return counts - {0}


@given(sizes, most_rows, st.data())
def test_every_row_count_is_proven(asked, most_captured, data):
    """Of the pass, of the logits, of a drafter's chains, and of a draft model's catch-up."""
    max_num_seqs, k, max_rows = asked
    shapes = captured_shapes(*asked, most_captured)
    counts = set(row_counts(shapes, max_rows, max_num_seqs))
    windows = data.draw(st.integers(0, min(max_num_seqs, max_rows)))
    chunks = data.draw(st.integers(0 if windows else 1, min(4, max_num_seqs)))
    chunks = min(chunks, max_num_seqs - windows, max_rows - windows)
    rows = data.draw(st.integers(windows + chunks, max_rows))
    most = max_sampled_rows(max_rows, max_num_seqs)
    rows = min(rows, most) if not chunks else rows
    sampled = rows if not chunks else data.draw(st.integers(windows, min(rows, most)))
    eager = padded(StepShape(windows + chunks, rows, sampled, windows, k + 1, rows), ROW_MULTIPLE)
    for shape in (eager, data.draw(st.sampled_from(shapes))):
        assert {shape.num_requests, shape.num_sampled} - {0} <= counts
        assert products_of(shape.num_rows) <= counts
        assert products_of(shape.num_rows + shape.num_requests) <= counts


@pytest.fixture
def launched(monkeypatch):
    """What each streamed kernel is compiled for, of launches that do not happen."""
    forms = set()

    def form(x, weight, scales, row_scales, scale_groups, bias, out, *_, **options):
        boxes = tuple(x.block_shape), tuple(weight.block_shape)
        return (*boxes, x.base.dtype, out.dtype, bias is None, tuple(options.items()))

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: forms.add(form(*arguments, **options))

    def product(*given):
        x, matrix, epilogue, _ = given[-4:]
        return tiled.output_of(x, len(matrix), epilogue, x.dtype)

    monkeypatch.setattr(streamed_hopper, "streamed_kernel", Kernel())
    monkeypatch.setattr(tiled, "tiled_product", product)
    monkeypatch.setattr(gemm, "_cublas_product", product)
    return forms


def test_start_up_compiles_and_compares_every_streamed_kernel_of_a_step(launched):
    kernels, (max_num_seqs, k, max_rows) = TritonKernels(GemmTable(hopper=True)), (64, 3, 640)
    shapes = captured_shapes(max_num_seqs, k, max_rows)
    counts = row_counts(shapes, max_rows, max_num_seqs)
    weights = [
        kernels.pack(torch.zeros(features, depth, dtype=torch.bfloat16))
        for features, depth in ((48, 64), (128, 4096), (200, 64), (64, 24))
    ]
    # Wide enough for the kernel of many rows, which gated products alone have.
    wide = kernels.pack(torch.zeros(12288, 24, dtype=torch.bfloat16))
    x = torch.zeros(MOST_ROWS + max_num_seqs, 4096, dtype=torch.bfloat16)

    def multiply(rows: int) -> None:
        for weight in weights:
            part = x[:rows, : weight.in_features].contiguous()
            weight.matmul(part, torch.zeros(weight.out_features, dtype=torch.bfloat16))
            weight.matmul(part, out_dtype=torch.float32)
            weight.gated_matmul(part)
        wide.gated_matmul(x[:rows, :24].contiguous())

    for rows in {
        rows + more
        for shape in shapes
        for rows in (shape.num_rows, shape.num_sampled, shape.num_requests)
        for more in (0, shape.num_requests)
    }:
        multiply(rows)
    used = set(launched)
    assert len(used) > 20
    launched.clear()
    kernels.run_candidates(counts, torch.bfloat16)
    assert launched == used
    launched.clear()
    kernels.prove(counts, torch.bfloat16)
    assert launched == used


def test_an_eager_engine_captures_nothing():
    step = SimpleNamespace(sequences=SimpleNamespace(num_speculative_tokens=3, device="cuda"))
    resolved = SimpleNamespace(config=SimpleNamespace(enforce_eager=True))
    launchers = gpu_launchers([step], None, resolved, print, int, row_bytes=1.0, sparse=False)
    assert launchers == [EagerLauncher(step, ROW_MULTIPLE)]


@pytest.mark.parametrize("multiple", [1, ROW_MULTIPLE])
def test_a_warm_up_has_the_sizes_of_a_step_with_a_window_and_a_chunk(multiple):
    """Kernels are compiled for sizes of requests and of sampled rows too."""
    shapes = []
    step = SimpleNamespace(
        sequences=SimpleNamespace(
            num_speculative_tokens=3, reserved_slot=8, device=torch.device("cpu")
        ),
        all_states=False,
        forward=lambda table: shapes.append(table.shape),
        verify_and_propose=lambda output, num_wanted=None: SimpleNamespace(tokens=None),
    )
    launcher = EagerLauncher(step, multiple)
    launcher.warm_up(1024)
    processor = SimpleNamespace(
        start_masks=lambda: None, process=lambda output: None, gather_logprobs=lambda tokens: None
    )
    requests = ScheduledRequest(0, 1, 3, True), ScheduledRequest(1, 1020, 0, False)
    launcher.run(StepLayout.of(StepPlan(0, requests=requests)), 0, processor)
    warm, real = (replace(shape, num_sampled=0, max_rows=0) for shape in shapes)
    assert warm == real
    assert shapes[0].num_sampled % multiple == 0


class Replays(StepGraphs):
    """Notes the shape that is replayed."""

    def _replay(self, shape, layout, first_place, processor):
        self.layouts.append(shape)


@pytest.mark.parametrize(
    ("windows", "chunks", "expected"),
    [
        # Slots of windows with two drafts each, and the lengths of chunks.
        (1, [], StepShape(1, 4, 4, 1, 4, 4)),
        (3, [], StepShape(4, 16, 16, 4, 4, 4)),
        (2, [40], StepShape(10, 64, 10, 8, 4, 64)),
        (0, [500], StepShape(1, 512, 1, 0, 4, 512)),
        (2, [4000], None),
    ],
)
def test_a_step_runs_in_the_smallest_shape_that_holds_it(windows, chunks, expected):
    rows = [ScheduledRequest(slot, 1, 2, True) for slot in range(windows)]
    rows += [ScheduledRequest(9 + i, length, 0, True) for i, length in enumerate(chunks)]
    layout = StepLayout.of(StepPlan(0, requests=tuple(rows)))
    replayed, eager = [], []
    others = SimpleNamespace(run=lambda *given: eager.append(given))
    graphs = Replays(None, captured_shapes(64, 3, 8192), replayed, others)
    graphs.run(layout, 5, None)
    assert replayed == ([] if expected is None else [expected])
    assert eager == ([(layout, 5, None)] if expected is None else [])


class Captures(StepGraphs):
    """Notes which capture a step replays."""

    number: ClassVar[int] = 0

    def _warm_up(self, shape):
        pass

    def _capture(self, shape, pool):
        return self.number, pool

    def _replay(self, shape, layout, first_place, processor):
        self.layouts.append(self._captured[shape])


@pytest.fixture
def no_gpu(monkeypatch):
    """What captures ask of a GPU, without one."""
    pools = iter("ab")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_an_earlier_engine_is_freed_before_graphs_are_captured(no_gpu, error):
    """Its graphs, freed by a search for garbage, would end the capture of others."""
    freed, seen = [], []

    class Earlier:
        def __init__(self):
            self.itself = self

    class Searching(Captures):
        def _capture(self, shape, pool):
            seen.append((len(freed), gc.isenabled()))
            if error:
                raise error

    weakref.finalize(Earlier(), freed.append, None)
    graphs = Searching(None, captured_shapes(4, 3, 64), None, None)
    with pytest.raises(error) if error else contextlib.nullcontext():
        graphs.capture_all()
    assert {*seen} == {(1, False)}
    assert gc.isenabled()


def test_graphs_that_were_released_are_never_replayed(monkeypatch, no_gpu):
    layout = StepLayout.of(StepPlan(0, requests=(ScheduledRequest(0, 1, 2, True),)))
    graphs = Captures(None, captured_shapes(4, 3, 64), replayed := [], None)
    graphs.capture_all()
    graphs.run(layout, 0, None)
    graphs.release()
    with pytest.raises(KeyError):
        graphs.run(layout, 0, None)
    monkeypatch.setattr(Captures, "number", 1)
    graphs.capture_all()
    graphs.run(layout, 0, None)
    assert replayed == [(0, "a"), (1, "b")]
