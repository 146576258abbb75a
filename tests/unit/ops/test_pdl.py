"""Kernels that start while the one before still runs: what they do before they wait, and after.

Read off what the compiler made for a GPU that is not there. A kernel that reads too early gives
other bits now and then, on a GPU alone.
"""

from __future__ import annotations

import re

import pytest

from helpers.compiled import compile_launches

RELEASE, WAIT = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
PDL = """
from sametoken.ops.model.attention import triton as attention
from sametoken.ops.model.gated_delta_rule import hopper, prepare
from sametoken.ops.model.gated_delta_rule import triton as gated_delta_rule
from sametoken.ops.model import rope_triton
from sametoken.ops.model.recurrent import runs
from sametoken.ops.step import triton_drafts, triton_inputs
writers = (triton_drafts, triton_inputs)
layers = (attention, gated_delta_rule, hopper, prepare, rope_triton, runs)
for module in (*layers, *writers):
    module.pdl_options = lambda tensor, early=True: dict(PDL=True, launch_pdl=early)
"""
ROWS = (
    PDL
    + """
from sametoken.types.layout import StepShape
from sametoken.ops.step.types import LayoutTable
from sametoken.state.sequences import Sequences
sequences = Sequences.allocate(
    max_num_seqs=2, max_len=64, num_drafts=3, block_size=16, reserved_block=3,
    device=torch.device("cpu"),
)
shape = StepShape(2, 8, 8, 2, 4, 4)
table = torch.zeros(8, shape.table_width, dtype=torch.int64)
x = triton_inputs.prepare_inputs(sequences, LayoutTable(table, shape))
caught_up = triton_drafts.catch_up(sequences, x, x.num_computed, with_newest=False)
triton_drafts.advanced(sequences, caught_up.chains)
"""
)
LAYER = (
    PDL
    + """
from sametoken.ops.backend import (
    AttentionRows, AttentionShape, LayerKV, QKNorm, RotaryTable, RowRuns,
)
kv = LayerKV(*torch.zeros(2, 4, 2, 64, 64, dtype=torch.bfloat16))
rotary = RotaryTable(torch.zeros(64, 32), torch.zeros(64, 32))
ones, table = torch.ones(64, dtype=torch.bfloat16), torch.zeros(64, 32, dtype=torch.int64)
def layer(runs, num_rows, window=None, sinks=None):
    shape = AttentionShape(8, 2, 64, window)
    rows = torch.zeros(num_rows, dtype=torch.int64)
    at = AttentionRows(rows, rows, rows, table, runs, rows == 0)
    qkv = torch.zeros(num_rows, 12 * 64, dtype=torch.bfloat16)
    q = rope_triton.rope_and_cache(qkv, shape, rotary, at, kv, QKNorm(ones, ones, 1e-6))
    for form in ("sequential", "split_kv"):
        config = attention.AttentionConfig(form, 16, 4, 3)
        attention.attention(q, shape, at, kv, sinks, config=config)
"""
)
EVEN = "layer(RowRuns.even(2, 1), 2)"
#: Runs, rows and where their starts lie in memory change from step to step; with sinks.
RAGGED = """
for count, width in ((1, 1), (2, 3), (4, 16), (17, 1), (32, 1)):
    starts = torch.zeros(count + 2, dtype=torch.int64)[count % 2:][: count + 1]
    layer(RowRuns(count, width, starts, count // 2, width), count * width, 128, torch.zeros(8))
"""
#: Chunks of padded steps, among which programs look for theirs.
PADDED = """
for count, width in ((3, 16), (16, 33), (60, 64)):
    starts = torch.zeros(count + 2, dtype=torch.int64)[count % 2:][: count + 1]
    layer(RowRuns(count, width, starts, 0, 0), width, 128, torch.zeros(8))
"""
RECURRENT = (
    PDL
    + """
from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.gated_delta_rule.rule import GatedDelta, GatedDeltaParams
from sametoken.ops.model.recurrent.rule import RawRows
from sametoken.state.caches import ModelCache

def zeros(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)

CASES = ((16, 32), (128, 128), 3, 4), ((1, 1), (3, 5), 1, 1)
for heads, sizes, drafts, taps in CASES:
    rule = GatedDelta(*heads, *sizes, taps)
    cache = ModelCache.allocate(
        [Recurrent(rule, torch.bfloat16)], num_blocks=0, block_size=1, max_num_seqs=2,
        num_drafts=drafts, device=torch.device("cpu"),
    )
    rows = torch.zeros(2 * (drafts + 1), dtype=torch.int64)
    even = RowRuns.even(2, drafts + 1)
    starts = (torch.arange(10) * (drafts + 1)).clamp(max=len(rows))
    ragged = RowRuns(9, drafts + 1, starts, 1, drafts + 1)
    for cut in (even, ragged):
        at = AttentionRows(rows, rows, rows, rows[None], cut, rows == 0)
        plan = runs.plan_runs(at, cache.folded)
    (memory,) = cache.layers
    gates = zeros(len(rows), heads[1])
    raw = RawRows(zeros(len(rows), rule.conv_channels), (gates, gates))
    params = GatedDeltaParams(rule, gates[0], gates[0], zeros(taps, rule.conv_channels), None)
    gated_delta_rule.advance(plan, params, raw, memory)
    if sizes == (128, 128):
        prepared = torch.zeros(99, rule.conv_channels + 2 * heads[1] + heads[0])
        hopper.walk(plan, rule, prepared, memory, zeros(len(rows), rule.out_features))
"""
)
PRODUCT = """
from sametoken.ops.model.gemm import triton
from sametoken.ops.model.gemm.product import product
from sametoken.ops.model.gemm.tuning import TritonConfig
x, matrix = (torch.zeros(rows, 2048, dtype=torch.bfloat16) for rows in (4, 512))
triton.supports_pdl = lambda tensor: True
product(TritonConfig(16, 64, 128, 4, 3, pdl=True, release="{release}"), x, matrix)
"""


def compiled(cache, kernel: str) -> str:
    """The instructions of a kernel, of which one was compiled."""
    (file,) = cache.rglob(f"{kernel}.ptx")
    return file.read_text()


def test_nothing_overtakes_the_kernels_that_write_where_rows_stand(tmp_path):
    compile_launches(ROWS, tmp_path)
    for kernel in ("_prepare_inputs_kernel", "_catch_up_kernel", "_advance_kernel"):
        code = compiled(tmp_path, kernel)
        assert WAIT in code
        assert RELEASE not in code


@pytest.mark.parametrize(("launches", "waits"), [(EVEN, 1), (RAGGED, 2), (PADDED, 2)])
def test_a_layer_waits_before_it_reads_what_the_layer_wrote(launches, waits, tmp_path):
    """Where rows stand, tables and weights come early; q, k, v and parts of the sums do not.

    Of the programs without rows one waits too. Launches of other counts compile nothing new.
    """
    compile_launches(LAYER + launches, tmp_path)
    kernels = ("_rope_and_cache_kernel", "_split_kv_kernel", "_sequential_kernel", "_merge_kernel")
    for kernel in kernels:
        code = compiled(tmp_path, kernel)
        before, after = code.split(WAIT, 1)
        assert RELEASE in before
        assert "ld.global" in before, kernel
        assert not re.search(r"st\.global|cp\.async\.cg", before), kernel
        assert "ld.global" in after
    assert [compiled(tmp_path, kernel).count(WAIT) for kernel in kernels[1:]] == [waits] * 3
    assert compiled(tmp_path, "_split_kv_kernel").count("prefetch.L2") == 2


def test_a_recurrent_layer_reads_early_only_what_the_pass_before_wrote(tmp_path):
    """States and held rows may come before the wait; nothing is written or copied ahead of it.

    Sizes of real heads; one head, of sizes that are no powers of two, and one tap.
    """
    compile_launches(RECURRENT, tmp_path)
    plans = [file.read_text() for file in tmp_path.rglob("_plan_runs_kernel.ptx")]
    assert len(plans) == 2
    assert not any(RELEASE in plan for plan in plans)
    for kernel, count in (("_prepare_kernel", 4), ("_advance_kernel", 2)):
        files = list(tmp_path.rglob(f"{kernel}.ptx"))
        assert len(files) == count
        for code in (file.read_text() for file in files):
            first, last = code.index(WAIT), code.rindex(WAIT)
            assert code.index(RELEASE) < first
            assert "ld.global" in code[:first]
            assert not re.search(r"st\.global|cp\.async", code[:first]), kernel
            assert re.search(r"st\.global", code[last:]), kernel


@pytest.mark.parametrize("release", ["early", "late", "never"])
def test_a_product_lets_the_next_kernel_start_when_it_is_told(release, tmp_path):
    compile_launches(PRODUCT.format(release=release), tmp_path)
    code = compiled(tmp_path, "_product_kernel")
    assert code.count(RELEASE) == (release != "never")
    if release != "never":
        assert (code.index(RELEASE) < code.index(WAIT)) == (release == "early")
    if release == "late":
        assert code.rindex("wgmma.mma_async") < code.index(RELEASE) < code.index("st.global")
