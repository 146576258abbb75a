"""GPU engines: kernels proven batch-invariant at start-up, and captured CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch

from sametoken.engine.resolve import ResolvedConfig
from sametoken.engine.step_memory import mixers_of
from sametoken.layers.slices import SLICE_ROWS
from sametoken.ops.compile_ahead import compiled_ahead
from sametoken.ops.launch_sizes import ROW_MULTIPLE, next_power_of_2
from sametoken.ops.model.latent_attention.heads_triton import MANY_ROWS
from sametoken.ops.model.latent_attention.hopper import FEW_TILES, PAIR_QUERIES, choose
from sametoken.ops.model.latent_attention.shape import ExpandedShape, LatentShape
from sametoken.ops.triton import TritonKernels
from sametoken.runner.graphs import LayoutRing, StepGraphs
from sametoken.runner.logits_processing import LogitsProcessing
from sametoken.runner.runner import EagerLauncher, Launcher
from sametoken.runner.step import Step
from sametoken.types.fast_prompts import ExpandedChunk
from sametoken.types.layout import StepShape, padded
from sametoken.types.units import in_units

#: Rows up to which steps of every model are captured, and beyond which those of none are.
MOST_ROWS, LIMIT_ROWS = 1536, 8192

#: Bytes that the device could read while the host launches a kernel, 40 to 130 us.
LAUNCH_BYTES = 450_000_000

#: Captured steps with prompts: maximum decoding requests (None: ``max_num_seqs``); maximum prompts,
#: the first number or one for each of the other's rows; first and last row count.
MIXED = (
    (0, (1, 512), 64, 512),
    (8, (2, 256), 64, 512),
    (64, (4, 64), 128, 1024),
    (None, (4, 64), 384, LIMIT_ROWS),
)

#: Prompts, rows and the longest prompt's rows of steps without a graph that run, beside that of the
#: longest chunk, every form of attention; None: as many prompts as there are requests.
EAGER = (
    *((None, 512, longest) for longest in (1, 2, 4, 8, 16, 32, 64, 128)),
    *((1, 64, longest) for longest in (1, 2, 3, 4, 6, 9, 10, 14, 18, 24, 36, 48)),
    *((1, 512, longest) for longest in (8, 12)),
    # More query tiles than the smaller block of them, of every number of columns and of rows, yet
    # so few queries that results of splits have memory.
    *((129, 576, longest) for longest in (3, 5, 9)),
    (1, 1024, 48),
)

#: Rows of those with many decoding requests, as the memory of a pass is zeroed.
EAGER_ROWS = 4096

#: Decoding requests of captured steps: powers of two up to the first, then multiples of the other.
REQUEST_STEPS = (64, 32)
#: Of sparse models further ones, from the first to below the second by the third: rows of padding
#: choose experts too, which few other rows may need.
SPARSE_STEPS = ((1, 8, 1), (8, 32, 4), (32, 64, 8))


def gpu_launchers(
    steps: Sequence[Step],
    processing: LogitsProcessing,
    resolved: ResolvedConfig,
    announce: Callable[[str], None],
    agreed: Callable[[int], int],
    *,
    row_bytes: float,
    sparse: bool,
) -> Sequence[Launcher]:
    """Capture steps in CUDA graphs, unless ``enforce_eager``.

    Args:
        steps: the functions of a step, of models with the same weights.
        processing: logits processing, which is warmed up too.
        resolved: the engine's settings.
        announce: called with the number of proofs and graphs, and their cost.
        agreed: gives every rank the first one's number: ranks that padded a step to different rows
            would wait for each other for ever.
        row_bytes: as in ``StepReads``.
        sparse: the model has experts.
    """
    config, (step, *_) = resolved.config, steps
    k, device = step.sequences.num_speculative_tokens, step.sequences.device
    eager = [EagerLauncher(one, ROW_MULTIPLE) for one in steps]
    if config.enforce_eager:
        return eager
    sizes = (config.max_num_seqs, k, config.max_num_batched_tokens)
    begun = time.monotonic()
    with compiled_ahead(device) as recorded:
        eager[0].warm_up(min(LIMIT_ROWS, config.max_num_batched_tokens))
        most_rows = agreed(captured_rows(row_bytes, recorded.num_launches))
        shapes = [
            captured_shapes(*sizes, most_rows, all_states=one.all_states, sparse=sparse)
            for one in steps
        ]
        counts = row_counts(shapes[0], config.max_num_batched_tokens, config.max_num_seqs)
        _launch_all(eager, shapes, counts, resolved)
        processing.warm_up(step.ops)
    announce(f"compiled kernels in {time.monotonic() - begun:.1f} s")
    # A step asks for the kernels of its products; proofs are of those.
    for launcher in eager:
        launcher.warm_up(ROW_MULTIPLE)
    announce(_proven(_kernels(step), counts, resolved.dtype, device))
    largest = max(shapes[0], key=lambda shape: shape.num_requests)
    # A ring buffer: each step in flight has its own layout.
    layouts = LayoutRing.allocate(resolved.steps_in_flight + 1, largest, step.ops, device)
    first, *others = (
        StepGraphs(launcher.step, captured, layouts, launcher)
        for launcher, captured in zip(eager, shapes, strict=True)
    )
    first.beside = tuple(others)
    report = first.capture_all()
    for launcher in eager:
        launcher.warm_up(config.max_num_batched_tokens)
    processing.warm_up(step.ops)
    announce(
        f"captured {report.num_graphs} graphs in {report.seconds:.1f} s, "
        f"{in_units(report.num_bytes)}"
    )
    return [first, *others]


def _launch_all(
    eager: Sequence[EagerLauncher],
    shapes: Sequence[Sequence[StepShape]],
    counts: list[int],
    resolved: ResolvedConfig,
) -> None:
    """Launch every kernel of steps in these shapes, of those without a graph, and of proofs."""
    config, (first, *_) = resolved.config, eager
    max_num_seqs, max_rows = config.max_num_seqs, config.max_num_batched_tokens
    k, device = first.step.sequences.num_speculative_tokens, first.step.sequences.device
    for launcher in eager:
        launcher.warm_up(ROW_MULTIPLE)
    kernels = _kernels(first.step)
    kernels.run_candidates(counts, resolved.dtype)
    kernels.prove_quantized(counts, resolved.dtype, device)
    for launcher, captured in zip(eager, shapes, strict=True):
        without = eager_shapes(max_num_seqs, k, max_rows, all_states=launcher.step.all_states)
        for shape in (*captured, *without, *many_tile_shapes(max_num_seqs, launcher.step)):
            launcher.run_padding(shape)
    if first.step.fast_form.expands:
        for shape in expanded_shapes(max_rows, first.step, resolved.dtype):
            first.run_padding(shape)


def _kernels(step: Step) -> TritonKernels:
    kernels = step.kernels
    assert isinstance(kernels, TritonKernels)
    return kernels


def _proven(
    kernels: TritonKernels, counts: list[int], dtype: torch.dtype, device: torch.device
) -> str:
    """Prove the products of all weights at these row counts; returns what came of it."""
    reports = kernels.prove(counts, dtype)
    num_shapes = len(reports) + kernels.prove_quantized(counts, dtype, device)
    refused = sum(len(one.row_counts) for report in reports for one in report.refused)
    return (
        f"batch invariance proven for {num_shapes} weight shapes; kernels refused at {refused} "
        "row counts"
    )


def captured_rows(row_bytes: float, num_launches: int) -> int:
    """The most rows of a captured step: computing more takes longer than launching the kernels.

    Args:
        row_bytes: as in ``StepReads``.
        num_launches: of a step of many rows.
    """
    return max(MOST_ROWS, min(LIMIT_ROWS, int(num_launches * LAUNCH_BYTES / row_bytes)))


def captured_shapes(
    max_num_seqs: int,
    k: int,
    max_rows: int,
    most_rows: int = MOST_ROWS,
    *,
    all_states: bool = False,
    sparse: bool = False,
) -> tuple[StepShape, ...]:
    """Shapes of steps with windows only, then of steps with prompts; each ascending.

    Args:
        max_num_seqs: maximum concurrent requests.
        k: maximum drafts per request.
        max_rows: maximum rows per step.
        most_rows: of ``captured_rows``; only steps with prompts have more than ``MOST_ROWS``.
        all_states: as in ``StepShape``.
        sparse: the model has experts.
    """
    mixed = {
        StepShape(windows + chunks, rows, sampled, windows, k + 1, rows, all_states)
        for windows, chunks, rows in _mixed(max_num_seqs, min(max_rows, most_rows))
        for sampled in _sampled(windows, chunks, rows, k)
        if windows + chunks <= rows
    }
    windows_only = _windows(max_num_seqs, k, min(max_rows, MOST_ROWS), sparse)
    return (*windows_only, *sorted(mixed, key=_by_size))


def eager_shapes(
    max_num_seqs: int, k: int, max_rows: int, *, all_states: bool = False
) -> list[StepShape]:
    """Steps without a graph, which together launch every kernel that such steps do.

    Arguments as for ``captured_shapes``.
    """
    most, rows = min(max_num_seqs, max_rows), min(max_rows, EAGER_ROWS)
    counts = {*_doubling(most), max(1, most - ROW_MULTIPLE)}
    widths = {part for size in _doubling(k + 1) for part in (size, size * 3 // 4) if part}
    mixes = [(n, 1, rows, width, rows) for n in counts for width in widths]
    mixes += [(0, 1, max_rows, 1, max_rows), (1, 1, max_rows, k + 1, max_rows)]
    for prompts, rows, longest in EAGER:
        count = min(prompts or most, most)
        mixes.append((1, count, max(min(rows, max_rows), count), k + 1, longest))
    shapes = (
        StepShape(windows + chunks, rows, 1, windows, width, longest, all_states)
        for windows, chunks, rows, width, longest in mixes
    )
    return list(dict.fromkeys(padded(shape, ROW_MULTIPLE) for shape in shapes))


def many_tile_shapes(max_num_seqs: int, step: Step) -> list[StepShape]:
    """Steps with prompts of a few tokens that latent attention has a kernel of its own for.

    Splits of more than ``FEW_TILES`` query tiles have it, if few programs would compute whole rows.
    """
    longest_len = step.sequences.token_ids.shape[1]
    latents = (one for one in mixers_of(step.model) if isinstance(one, LatentShape))
    most_prompts = min(max_num_seqs + ROW_MULTIPLE, FEW_TILES)
    shapes = []
    for heads, prompts in product(
        {one.num_heads for one in latents}, range(ROW_MULTIPLE, most_prompts, ROW_MULTIPLE)
    ):
        longest = FEW_TILES // prompts * PAIR_QUERIES // heads + 1
        takes_splits = (
            rows
            for rows in range(prompts, MOST_ROWS, ROW_MULTIPLE)
            if choose(prompts, longest, rows, heads, longest_len, are_chunks=True).programs
        )
        if rows := next(takes_splits, 0):
            shape = StepShape(1 + prompts, rows, 1, 1, 1, longest, step.all_states)
            shapes.append(padded(shape, ROW_MULTIPLE))
    return shapes


def expanded_shapes(max_rows: int, step: Step, dtype: torch.dtype) -> list[StepShape]:
    """Steps with one chunk of an expanded prompt, which launch every kernel that such steps do.

    Args:
        max_rows: maximum rows per step.
        step: its model has latent attention.
        dtype: of the activations.
    """
    slot, longest = step.sequences.reserved_slot, step.sequences.token_ids.shape[1]
    sizes = next(one for one in mixers_of(step.model) if isinstance(one, ExpandedShape))
    contexts = {sizes.num_at_once(stop, dtype): stop for stop in reversed(_doubling(longest))}
    doubled = _doubling(max_rows)
    # Attention of some head counts has a form from one and a half times a power of two alone.
    rows_of_chunks = {*doubled, *(size * 3 // 4 for size in doubled if size >= 512)}
    chunks = [(0, *one) for one in product(sorted(rows_of_chunks), contexts.values())]
    # Products of few rows before a chunk, and of more positions than a step has rows.
    chunks += [(min(n, max_rows - 1), 1, n) for n in _doubling(min(longest, MANY_ROWS))]
    shapes = []
    for first, rows, stop in chunks:
        expanded = (ExpandedChunk(slot, first, rows, max(rows, stop)),)
        count, most = 1 + (first > 0), max(first, rows)
        shapes.append(StepShape(count, first + rows, 1, 0, 1, most, step.all_states, expanded))
    return [padded(shape, ROW_MULTIPLE) for shape in shapes]


def _windows(max_num_seqs: int, k: int, most: int, sparse: bool) -> list[StepShape]:
    """Counts of requests and powers of two of rows for each; finer rows at ``max_num_seqs``."""
    doubled, multiple = REQUEST_STEPS
    further = ((doubled, max_num_seqs, multiple), *(SPARSE_STEPS if sparse else ()))
    counts = {*_doubling(min(max_num_seqs, doubled)), max_num_seqs}
    counts |= {n for first, end, by in further for n in range(first, min(end, max_num_seqs), by)}
    sizes = {(requests, requests * rows) for requests in counts for rows in _doubling(k + 1)}
    full_batch = range(max_num_seqs, max_num_seqs * (k + 1), 2 * ROW_MULTIPLE)
    sizes |= {(max_num_seqs, rows) for rows in full_batch}
    shapes = [
        StepShape(requests, rows, rows, requests, longest, longest)
        for requests, rows in sizes
        if rows <= most
        for longest in (1 if rows == requests else k + 1,)
    ]
    return sorted(shapes, key=_by_size)


def _mixed(max_num_seqs: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Decoding requests, prompts and rows of captured steps with prompts."""
    for given, (least, rows_each), first, last in MIXED:
        windows = max_num_seqs if given is None else given
        for rows in _row_counts(first, min(last, most)) if windows <= max_num_seqs else ():
            yield windows, min(max(least, rows // rows_each), max_num_seqs), rows


def _row_counts(first: int, last: int) -> Iterator[int]:
    """Multiples of 128, from 2,048 on of an eighth of a power of two: few rows are padding."""
    rows = first
    while rows <= last:
        yield rows
        step = max(128, next_power_of_2(rows + 1) // 16)
        rows += step - rows % step


def _sampled(windows: int, chunks: int, num_rows: int, k: int) -> set[int]:
    """Sampled row counts to capture: no draft, one draft or k drafts per window."""
    most = min(num_rows, MOST_ROWS)
    return {min(windows * rows + chunks, most) for rows in (1, 2, k + 1) if rows <= k + 1}


def _by_size(shape: StepShape) -> tuple[int, int, int]:
    return shape.num_rows, shape.num_requests, shape.num_sampled


def row_counts(shapes: tuple[StepShape, ...], max_rows: int, max_num_seqs: int) -> list[int]:
    """Row counts that steps and drafters run, at which the GEMM kernels are proven."""
    # Eager steps are padded, and a draft model's catch-up adds one row per request. More rows run
    # in slices.
    largest = min(max_rows + max_num_seqs + 3 * ROW_MULTIPLE, SLICE_ROWS + 1)
    counts = set(range(ROW_MULTIPLE, largest, ROW_MULTIPLE))
    for shape in shapes:
        counts |= {shape.num_requests, shape.num_rows, shape.num_sampled}
        counts.add(shape.num_rows + shape.num_requests)
    return sorted(counts)


def _doubling(most: int) -> list[int]:
    """Powers of two, and ``most``."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]
