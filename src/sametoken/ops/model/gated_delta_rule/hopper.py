"""Long runs of Gated DeltaNet on Hopper GPUs: which the Gluon walk serves, and its launch."""

from __future__ import annotations

from torch import Tensor

from sametoken.ops.model.gated_delta_rule.hopper_kernels import COLUMNS, KEYS, walk_kernel
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.recurrent import hopper
from sametoken.ops.model.recurrent.hopper_kernels import WARPS
from sametoken.ops.model.recurrent.rule import LayerMemory
from sametoken.ops.model.recurrent.runs import Runs
from sametoken.ops.pdl import pdl_options

#: Runs as long as the longest that a pass's rows are at most. In more runs ``triton`` is faster:
#: there a thread sums more columns for the keys that it loads.
MAX_RUNS = 6


def serves(runs: Runs, rule: GatedDelta, prepared: Tensor, num_rows: int) -> bool:
    """Whether the walk serves the long runs of a pass of ``num_rows`` rows."""
    sizes = rule.key_dim == KEYS.value and rule.value_dim % COLUMNS.value == 0
    few = num_rows <= MAX_RUNS * runs.rows.max_rows
    return sizes and few and hopper.serves(runs, prepared)


def walk(runs: Runs, rule: GatedDelta, prepared: Tensor, memory: LayerMemory, out: Tensor) -> None:
    """Walk the runs that are not short into ``out``; as ``triton.advance_prepared``."""
    tiles = rule.num_value_heads * rule.value_dim // COLUMNS.value
    walk_kernel[hopper.grid(runs, out.shape[0], tiles)](
        prepared,
        runs.table,
        memory.states,
        out,
        memory.max_pending,
        runs.rows.num_short,
        runs.rows.count,
        HK=rule.num_key_heads,
        HV=rule.num_value_heads,
        DV=rule.value_dim,
        num_warps=WARPS.value,
        # Without a limit the compiler takes half of them, and 8 % more time.
        maxnreg=255,
        **pdl_options(out, early=False),
    )
