"""Steps of static shapes on a CPU: what a GPU captures in graphs, run by the interpreter."""

from __future__ import annotations

from sametoken.engine.build_gpu import chunk_buckets, window_buckets
from sametoken.kernels.reference import ReferenceKernels
from sametoken.kernels.sampling import triton as sampling
from sametoken.kernels.truncation import triton as truncation
from sametoken.runner.between import LogitsProcessing
from sametoken.runner.graphed import GraphedRunner
from sametoken.runner.graphs import CHUNKS_TOGETHER, StepGraphs
from sametoken.runner.padded import PaddedStep
from sametoken.runner.plan_ring import PlanRing
from sametoken.runner.step import StepRunner


class DeviceChoices(ReferenceKernels):
    """The reference, but tokens are cut and chosen by the kernels of captured steps."""

    truncate = staticmethod(truncation.truncate)
    sample = staticmethod(sampling.sample)


class Uncaptured(StepGraphs):
    """Runs the halves of a step where a graph would be replayed; counts the launches."""

    launches = 0

    def _replay(self, bucket, rows, between) -> None:
        Uncaptured.launches += 1
        plan = self.plans.memory(bucket.batch)
        layout = self.step.layout(bucket.batch, bucket.chunk)
        between.look()
        self.plans.write(rows, bucket.batch)
        computed = self._forward(bucket, plan, layout)
        between.process(computed)
        between.score(self._settle(plan, layout, computed))


def static_runner(eager: StepRunner, table, kernels, shape) -> GraphedRunner:
    """The runner of a GPU over the parts of an eager one."""
    sequences, verdicts = eager.sequences, eager.ring.rows
    step = PaddedStep(sequences, eager.model, eager.kv, table, eager.drafter)
    windows = window_buckets(shape.max_num_seqs)
    plans = PlanRing.allocate(
        verdicts.shape[0],
        max(*windows, *CHUNKS_TOGETHER),
        sequences.reserved_slot,
        sequences.device,
    )
    graphs = Uncaptured(step, windows, chunk_buckets(shape.prefill_chunk_size), plans, verdicts)
    processing = LogitsProcessing(sequences, eager.model, kernels, table, eager.verifier.grammars)
    return GraphedRunner(eager, graphs, processing)
