"""Joins of latent attention's splits to time beside the one that ships, and its former form."""

# mypy: disallow-untyped-decorators=false, disallow-untyped-defs=false
# mypy: disallow-incomplete-defs=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from sametoken.ops.model.attention.hopper_kernels import jit_over_runs
from sametoken.ops.model.attention.hopper_tiles import LOWEST, joined, rows_of_run
from sametoken.ops.model.attention.schedule import splits_before
from sametoken.ops.model.latent_attention import hopper
from sametoken.ops.model.latent_attention.hopper_kernels import join_kernel
from sametoken.ops.model.latent_attention.hopper_tiles import RANK, dim_of


@jit_over_runs
def former_join_kernel(  # noqa: PLR0913
    sums, stats, positions, slots, starts, out, first_run, width, most, scale,
    HEADS: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``join_kernel`` with one maximum, total and factor an element."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    if PDL:
        cuda.gdc_launch_dependents()
    place, head = gl.program_id(0), gl.program_id(1)
    begin, stop = rows_of_run(first_run + place // width, starts, width)
    row = begin + place % width
    if row >= stop:
        if PDL:
            cuda.gdc_wait()
        return
    num_splits = splits_before(gl.load(positions + row).to(gl.int32) + 1)
    live = gl.load(slots + row) == gl.load(slots + begin)
    if PDL:
        cuda.gdc_wait()
    dim = gl.arange(0, RANK, layout=LAYOUT)
    line = (place.to(gl.int64) * HEADS + head) * most
    top = gl.full([RANK], LOWEST, gl.float32, LAYOUT)
    total = gl.zeros([RANK], gl.float32, LAYOUT)
    acc = gl.zeros([RANK], gl.float32, LAYOUT)
    nothing = 0 * dim
    for split in range(0, num_splits, AHEAD):
        parts, tops, totals = (), (), ()
        for ahead in gl.static_range(AHEAD):
            at = line + split + ahead
            exists = (nothing + split + ahead) < num_splits
            parts += (gl.load(sums + at * RANK + dim, mask=exists, other=0.0),)
            tops += (gl.load(stats + at * 2 + 1 + nothing, mask=exists, other=LOWEST),)
            totals += (gl.load(stats + at * 2 + nothing, mask=exists, other=0.0),)
        for ahead in gl.static_range(AHEAD):
            top, total, old, new = joined(top, total, tops[ahead], totals[ahead], scale)
            acc = gl.fma(acc, old, parts[ahead] * new)
    acc = acc / gl.where(total == 0.0, 1.0, total)
    acc = gl.where(live, acc, 0.0)
    at = (row.to(gl.int64) * HEADS + head) * RANK
    gl.store(out + at + dim_of(dim), acc.to(out.dtype.element_ty))


class Join:
    """A join kernel to launch with other options than ``JOIN_SIZES``."""

    def __init__(self, kernel: Any, **options: object) -> None:
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*arguments: object, **options: object) -> None:
            if self.kernel:
                self.kernel[grid](*arguments, **(options | self.options))

        return launch


#: By splits loaded at once and registers; "late": started when the splits' launch has ended;
#: "none" leaves outputs unwritten, so the rest of a launch is timed alone.
JOINS = {
    "former": Join(former_join_kernel, maxnreg=None),
    "none": Join(None),
    "ahead8r80": Join(join_kernel),
    "ahead8r80_late": Join(join_kernel, launch_pdl=False),
    "ahead8r56": Join(join_kernel, maxnreg=56),
    "ahead16r128": Join(join_kernel, AHEAD=16, maxnreg=128),
    "ahead16r128_late": Join(join_kernel, AHEAD=16, maxnreg=128, launch_pdl=False),
}


@contextlib.contextmanager
def joined_by(name: str) -> Iterator[None]:
    """Launches of splits are followed by this join."""
    shipped = hopper.join_kernel
    hopper.join_kernel = JOINS[name]
    try:
        yield
    finally:
        hopper.join_kernel = shipped
