"""What a GPU engine has beyond a CPU one: proven kernels and captured steps."""

from __future__ import annotations

from collections.abc import Callable

from sametoken.engine.resolve import ResolvedConfig
from sametoken.ops.triton import TritonKernels
from sametoken.runner.graphs import LayoutRing, StepGraphs
from sametoken.runner.logits_processing import LogitsProcessing
from sametoken.runner.runner import EagerLauncher, Launcher
from sametoken.runner.step import Step
from sametoken.types.layout import StepShape

#: Steps of more rows take longer to compute than to launch: they run without a graph.
MOST_ROWS = 1536

#: Captured steps with prompts: decoding requests at most, prompts at most, and rows. The last line
#: is for as many requests as there may be.
MIXED = (
    (0, 1, (64, 128, 256, 512)),
    (8, 2, (64, 128, 256, 512)),
    (64, 4, (128, 256, 512, 1024)),
)
MIXED_CROWD = (4, (384, 512, 768, 1024, 1536))

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
    config, k = resolved.config, step.sequences.num_speculative_tokens
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
    eager.warm_up(config.max_num_batched_tokens)
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
    most = min(max_rows, MOST_ROWS)
    crowd_chunks, crowd_rows = MIXED_CROWD
    mixed = [
        StepShape(windows + chunks, rows, sampled, windows, k + 1, rows)
        for windows, chunks, sizes in (*MIXED, (max_num_seqs, crowd_chunks, crowd_rows))
        for rows in sizes
        for sampled in _sampled(windows, chunks, rows, k)
        if windows <= max_num_seqs and windows + chunks <= rows <= most
    ]
    return (*_windows(max_num_seqs, k, most), *sorted(set(mixed), key=_by_size))


def _windows(max_num_seqs: int, k: int, most: int) -> list[StepShape]:
    """Powers of two of requests and of rows for each; of the most requests, rows in small steps."""
    sizes = {
        (requests, requests * rows)
        for requests in _doubling(max_num_seqs)
        for rows in _doubling(k + 1)
    }
    crowd = range(max_num_seqs, max_num_seqs * (k + 1), 2 * ROW_MULTIPLE)
    sizes |= {(max_num_seqs, rows) for rows in crowd}
    shapes = [
        StepShape(requests, rows, rows, requests, longest, longest)
        for requests, rows in sizes
        if rows <= most
        for longest in (1 if rows == requests else k + 1,)
    ]
    return sorted(shapes, key=_by_size)


def _sampled(windows: int, chunks: int, num_rows: int, k: int) -> set[int]:
    """How many rows may be sampled: few drafts, or all that there may be."""
    return {min(windows * rows + chunks, num_rows) for rows in (1, 2, k + 1) if rows <= k + 1}


def _by_size(shape: StepShape) -> tuple[int, int, int]:
    return shape.num_rows, shape.num_requests, shape.num_sampled


def row_counts(shapes: tuple[StepShape, ...], max_rows: int, max_num_seqs: int) -> list[int]:
    """Row counts that steps and their drafters run, where the products' bits are proven."""
    # Steps without a graph are padded, and a draft model's catch-up runs their requests beside.
    largest = max_rows + max_num_seqs + 3 * ROW_MULTIPLE
    counts = set(range(ROW_MULTIPLE, largest, ROW_MULTIPLE))
    for shape in shapes:
        counts |= {shape.num_requests, shape.num_rows, shape.num_sampled}
        counts.add(shape.num_rows + shape.num_requests)
    return sorted(counts)


def _doubling(most: int) -> list[int]:
    """Powers of two, and ``most``."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]
