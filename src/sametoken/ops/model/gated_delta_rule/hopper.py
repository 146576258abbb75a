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

#: Runs that have programs of their own: two fill the GPU, and a program costs time without rows too,
#: as of padding.
RUNS_AT_ONCE = 4


def serves(rule: GatedDelta, prepared: Tensor) -> bool:
    """Whether the walk serves a rule's runs; rows are copied by 16 bytes."""
    sizes = rule.key_dim == KEYS.value and rule.value_dim % COLUMNS.value == 0
    return is_hopper(prepared.device) and sizes and prepared.shape[1] % 4 == 0


def walk(runs: Runs, rule: GatedDelta, prepared: Tensor, memory: LayerMemory, out: Tensor) -> None:
    """Walk the runs that are not short into ``out``; as ``triton.advance_prepared``."""
    first, end = runs.rows.num_short, runs.rows.count
    tiles = rule.num_value_heads * rule.value_dim // COLUMNS.value
    walk_kernel[(tiles, min(end - first, RUNS_AT_ONCE))](
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
