"""What a GPU engine has beyond a CPU one: proven kernels and captured steps."""

from __future__ import annotations

from collections.abc import Callable

from sametoken.engine.resolve import ResolvedConfig
from sametoken.kernels.triton import TritonKernels
from sametoken.layers.parallel import TensorParallel
from sametoken.runner.between import LogitsProcessing
from sametoken.runner.graphed import GraphedRunner
from sametoken.runner.graphs import CHUNKS_TOGETHER, StepGraphs
from sametoken.runner.padded import PaddedJudge, PaddedStep
from sametoken.runner.plan_ring import PlanRing
from sametoken.runner.shared_judge import SharedJudge
from sametoken.runner.step import Runner, StepRunner
from sametoken.runner.synthetic import SyntheticJudge
from sametoken.state.padded import judge, judge_and_commit
from sametoken.state.sampling import SamplingTable
from sametoken.verification.synthetic import conditional_rates

SMALLEST_CHUNK = 64


def graphed(
    eager: StepRunner,
    processing: LogitsProcessing,
    resolved: ResolvedConfig,
    parallel: TensorParallel,
    announce: Callable[[str], None],
) -> Runner:
    """The runner of a GPU: graphs over the eager verbs, unless ``enforce_eager``.

    Args:
        eager: the verbs without graphs.
        processing: what requests ask of their logits. The choices of its kernels are proven
            first.
        resolved: the engine's settings.
        parallel: the ranks that share the model; all of them capture the same graphs.
        announce: told what was proven and captured, and at what cost.
    """
    kernels, table = processing.kernels, processing.table
    assert isinstance(kernels, TritonKernels)
    width = eager.sequences.max_num_drafts + 1
    windows = window_buckets(resolved.config.max_num_seqs)
    chunks = chunk_buckets(resolved.config.prefill_chunk_size)
    if resolved.config.enforce_eager:
        return eager
    # A draft model's catch-up runs one row more than the window or chunk.
    row_counts = {batch * rows for batch in windows for rows in (1, width, width + 1)}
    row_counts |= {1, *chunks, *(chunk + 1 for chunk in chunks)}
    largest = chunks[-1]
    row_counts |= {n * rows for n in CHUNKS_TOGETHER for rows in (1, largest, largest + 1)}
    reports = kernels.prove(sorted(row_counts))
    refused = sum(len(report.refused) for report in reports)
    announce(f"row law proven for {len(reports)} weight shapes; {refused} kernels refused")
    step = PaddedStep(
        eager.sequences,
        eager.model,
        eager.kv,
        table,
        eager.drafter,
        _judge(resolved, table, parallel),
        parallel,
    )
    # Every launch has a row of a step at least, and every step in flight a buffer.
    verdicts, sequences = eager.ring.rows, eager.sequences
    largest_batch = max(*windows, *CHUNKS_TOGETHER)
    plans = PlanRing.allocate(
        verdicts.shape[0], largest_batch, sequences.reserved_slot, sequences.device
    )
    graphs = StepGraphs(step, windows, chunks, plans, verdicts)
    report = graphs.capture_all()
    processing.warm_up()
    announce(
        f"captured {report.num_graphs} graphs in {report.seconds:.1f} s, "
        f"{report.num_bytes / 2**20:.0f} MiB"
    )
    return GraphedRunner(eager, graphs, processing)


def _judge(resolved: ResolvedConfig, table: SamplingTable, parallel: TensorParallel) -> PaddedJudge:
    speculative = resolved.config.speculative_config
    if speculative is None or speculative.synthetic_rates is None:
        return judge_and_commit if parallel.size == 1 else SharedJudge(judge, parallel)
    rates = conditional_rates(speculative.synthetic_rates, resolved.device)
    synthetic = SyntheticJudge(rates, table)
    return synthetic if parallel.size == 1 else SharedJudge(synthetic.verdict, parallel)


def window_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of plan rows that are captured: powers of two, and the largest batch."""
    sizes = {max_num_seqs}
    size = 1
    while size < max_num_seqs:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


def chunk_buckets(prefill_chunk_size: int) -> tuple[int, ...]:
    """Chunk lengths that are captured: powers of two from 64, and the grid itself."""
    sizes = {prefill_chunk_size}
    size = SMALLEST_CHUNK
    while size < prefill_chunk_size:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))
