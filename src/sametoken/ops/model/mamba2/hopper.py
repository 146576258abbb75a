"""Long runs of Mamba-2 on Hopper GPUs: which the Gluon walk serves, and its launch."""

from __future__ import annotations

from torch import Tensor

from sametoken.ops.model.mamba2.hopper_kernels import COLUMNS, ROWS, walk_kernel
from sametoken.ops.model.mamba2.rule import Mamba2, Mamba2Params
from sametoken.ops.model.recurrent import hopper
from sametoken.ops.model.recurrent.hopper_kernels import WARPS
from sametoken.ops.model.recurrent.rule import LayerMemory
from sametoken.ops.model.recurrent.runs import Runs
from sametoken.ops.pdl import pdl_options


def serves(runs: Runs, rule: Mamba2, prepared: Tensor) -> bool:
    """Whether the walk serves a pass's long runs."""
    sizes = rule.state_dim == COLUMNS.value and rule.head_dim % ROWS.value == 0
    return sizes and hopper.serves(runs, prepared)


def walk(
    runs: Runs, params: Mamba2Params, prepared: Tensor, memory: LayerMemory, out: Tensor
) -> None:
    """Walk the runs that are not short into ``out``; as ``triton.advance``."""
    rule = params.rule
    tiles = rule.num_heads * rule.head_dim // ROWS.value
    walk_kernel[hopper.grid(runs, out.shape[0], tiles)](
        prepared,
        runs.table,
        params.D,
        memory.states,
        out,
        memory.max_pending,
        runs.rows.num_short,
        runs.rows.count,
        H=rule.num_heads,
        P=rule.head_dim,
        G=rule.num_groups,
        num_warps=WARPS.value,
        **pdl_options(out, early=False),
    )
