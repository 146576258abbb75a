"""Long runs of Gated DeltaNet on Hopper GPUs: which the Gluon walk serves, and its launch."""

from __future__ import annotations

from torch import Tensor

from sametoken.ops.hopper import is_hopper
from sametoken.ops.model.gated_delta_rule.hopper_kernels import (
    COLUMNS,
    KEYS,
    WARPS,
    walk_kernel,
)
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta
from sametoken.ops.model.recurrent.rule import LayerMemory
from sametoken.ops.model.recurrent.runs import Runs
from sametoken.ops.pdl import pdl_options

#: Runs as long as the longest that a pass's rows are at most. In more runs ``triton`` is faster:
#: there a thread sums more columns for the keys that it loads.
MAX_RUNS = 6


def serves(runs: Runs, rule: GatedDelta, prepared: Tensor, num_rows: int) -> bool:
    """Whether the walk serves the long runs of a pass of ``num_rows`` rows."""
    few = runs.rows.num_short < runs.rows.count and num_rows <= MAX_RUNS * runs.rows.max_rows
    sizes = rule.key_dim == KEYS.value and rule.value_dim % COLUMNS.value == 0
    # Rows are copied by 16 bytes.
    return few and sizes and prepared.shape[1] % 4 == 0 and is_hopper(prepared.device)


def walk(runs: Runs, rule: GatedDelta, prepared: Tensor, memory: LayerMemory, out: Tensor) -> None:
    """Walk the runs that are not short into ``out``; as ``triton.advance_prepared``.

    Runs share programs beyond about as many as fill the GPU: padding has runs without rows.
    """
    first, end = runs.rows.num_short, runs.rows.count
    tiles = rule.num_value_heads * rule.value_dim // COLUMNS.value
    at_once = max(2, out.shape[0] // runs.rows.max_rows)
    walk_kernel[(tiles, min(end - first, at_once))](
        prepared,
        runs.table,
        memory.states,
        out,
        memory.max_pending,
        first,
        end,
        HK=rule.num_key_heads,
        HV=rule.num_value_heads,
        DV=rule.value_dim,
        num_warps=WARPS.value,
        **pdl_options(out, early=False),
    )
