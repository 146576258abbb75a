"""What a GPU engine has beyond a CPU one: proven kernels and captured steps."""

from __future__ import annotations

from collections.abc import Callable

from sametoken.core.layout import StepShape
from sametoken.engine.resolve import ResolvedConfig
from sametoken.kernels.triton import TritonKernels
from sametoken.runner.graphs import StepGraphs
from sametoken.runner.layout_ring import LayoutRing
from sametoken.runner.processing import LogitsProcessing
from sametoken.runner.runner import EagerLauncher, Launcher
from sametoken.runner.step import Step

#: Rows of larger steps take longer to compute than their launches: they run without a graph.
MOST_CAPTURED_ROWS = 1024

#: Rows, and requests, of the captured shapes for steps with prompts.
MIXED_ROWS = (64, 128, 256, 512)
MIXED_REQUESTS = (1, 16, 64)

#: What eager steps are padded to, so that few row counts are proven and few kernels compiled.
ROW_MULTIPLE = 64


def gpu_launcher(
    step: Step,
    processing: LogitsProcessing,
    resolved: ResolvedConfig,
    announce: Callable[[str], None],
) -> Launcher:
    """Graphs over the functions of a step, unless ``enforce_eager``.

    Args:
        step: the functions.
        processing: what requests ask of their logits. The choices of its kernels are proven
            first.
        resolved: the engine's settings.
        announce: told what was proven and captured, and at what cost.
    """
    config, k = resolved.config, step.sequences.max_num_drafts
    eager = EagerLauncher(step, ROW_MULTIPLE)
    if config.enforce_eager:
        return eager
    shapes = captured_shapes(config.max_num_seqs, k, config.max_num_batched_tokens)
    kernels = step.kernels
    assert isinstance(kernels, TritonKernels)
    reports = kernels.prove(row_counts(shapes, config.max_num_batched_tokens, config.max_num_seqs))
    refused = sum(len(report.refused) for report in reports)
    announce(f"row law proven for {len(reports)} weight shapes; {refused} kernels refused")
    largest = max(shapes, key=lambda shape: shape.num_requests)
    # Every step in flight has a layout of its own.
    layouts = LayoutRing.allocate(
        resolved.steps_in_flight + 1, largest, step.ops, step.sequences.device
    )
    graphs = StepGraphs(step, shapes, layouts, eager)
    report = graphs.capture_all()
    processing.warm_up()
    announce(
        f"captured {report.num_graphs} graphs in {report.seconds:.1f} s, "
        f"{report.num_bytes / 2**20:.0f} MiB"
    )
    return graphs


def captured_shapes(max_num_seqs: int, k: int, max_rows: int) -> tuple[StepShape, ...]:
    """Shapes of steps of windows alone, then of small steps with prompts; each ascending.

    Args:
        max_num_seqs: requests at once.
        k: drafts of a request at most.
        max_rows: of a step.
    """
    most = min(max_rows, MOST_CAPTURED_ROWS)
    sizes = [
        (requests, requests * rows)
        for requests in _doubling(max_num_seqs)
        for rows in _doubling(k + 1)
        if requests * rows <= most
    ]
    windows = [_windows(*size, k) for size in sizes]
    mixed = [
        StepShape(requests, rows, min(rows, requests * (k + 1)), 0, 0, rows)
        for rows in MIXED_ROWS
        for requests in MIXED_REQUESTS
        if requests <= min(max_num_seqs, rows) and rows <= max_rows
    ]
    by_size = sorted(windows, key=lambda shape: (shape.num_rows, shape.num_requests))
    return (*by_size, *mixed)


def _windows(requests: int, rows: int, k: int) -> StepShape:
    longest = 1 if rows == requests else k + 1
    return StepShape(requests, rows, rows, requests, longest, longest)


def row_counts(shapes: tuple[StepShape, ...], max_rows: int, max_num_seqs: int) -> list[int]:
    """Row counts that steps and their drafters run, where the products' bits are proven."""
    # Steps without a graph are padded, and a draft model's catch-up runs their requests beside.
    largest = max_rows + max_num_seqs + 2 * ROW_MULTIPLE
    counts = set(range(ROW_MULTIPLE, largest, ROW_MULTIPLE))
    for shape in shapes:
        counts |= {shape.num_requests, shape.num_rows, shape.num_sampled}
        counts.add(shape.num_rows + shape.num_requests)
    return sorted(counts)


def _doubling(most: int) -> list[int]:
    """Powers of two, and ``most``."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]
