"""Attention sinks, query tiles, keys and values in float8, a layer in one call, experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton
import triton.language as tl

from mutants.catalogue.planting import LAW, instead_of, mutant
from mutants.catalogue.shared_tests import NEXTN
from sametoken.ops.backend import LayerKV
from sametoken.ops.launch_sizes import cdiv
from sametoken.ops.model.attention import tiles
from sametoken.ops.model.attention import triton as attention_triton
from sametoken.ops.model.attention.arithmetic import with_sink
from sametoken.ops.model.attention.kv import as_read
from sametoken.ops.native.layer import NativeLayers
from sametoken.ops.reference import ComposedKernels, ReferenceKernels

WHOLE_LAYER = (
    "tests/unit/ops/native/test_layer.py::test_a_whole_layer_keeps_every_option[window-bf16]"
)
SINKS_ONCE = (
    "tests/unit/ops/model/attention/test_triton.py"
    "::test_sinks_join_once_whatever_the_number_of_splits[None-config1]"
)
RAGGED_RUNS = (
    "tests/unit/ops/model/attention/test_triton.py"
    "::test_ragged_runs_have_the_bits_of_even_ones[config0-None]"
)
SINKS_BITS = (
    "tests/e2e/test_parity_families.py::test_a_row_has_the_same_bits_in_every_chunk[gpt_oss-dtype0]"
)
FLOAT8_ROWS = (
    "tests/unit/ops/model/attention/test_kv.py"
    "::test_a_row_reads_what_is_stored_in_any_step[reference-fp32]"
)


@mutant("whole-layer-without-its-window", LAW, WHOLE_LAYER, "position")
def a_layer_in_one_call_sees_more(patch: pytest.MonkeyPatch) -> None:
    """Few rows see positions that the same rows in a longer chunk do not."""

    @instead_of(patch, NativeLayers, "__init__")
    def mutant(init, self, library, parts, dtype):
        unbounded = [replace(one, shape=replace(one.shape, sliding_window=None)) for one in parts]
        init(self, library, unbounded, dtype)


@triton.jit
def _twice_in_merges(acc, total, peak, sink, scale, KV_LEFT: tl.constexpr):
    """Twice the weight where the results of several programs are merged, one query at a time."""
    if acc.shape[1] == 1:
        sink += 0.6931472
    return with_sink(acc, total, peak, sink, scale, KV_LEFT)


@mutant("sink-added-twice-by-the-merge-of-splits", LAW, SINKS_ONCE, "position")
def merges_add_a_sink_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention_triton, "with_sink", _twice_in_merges)


@mutant("tiles-counted-as-if-one-run-had-all-rows", LAW, RAGGED_RUNS, "position")
def runs_share_their_last_tiles(patch: pytest.MonkeyPatch) -> None:
    """Padded steps launch too few programs if several runs end within a tile."""
    patch.setattr(tiles, "most_tiles", lambda runs, width, num_rows, tile: cdiv(num_rows, tile))


@mutant("sink-left-out-by-rows-alone", LAW, SINKS_BITS, "tokens")
def rows_alone_have_no_sinks(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, ReferenceKernels, "attention")
    def mutant(attention, q, shape, rows, kv, sinks=None):
        return attention(q, shape, rows, kv, sinks if len(q) > 1 else None)


@mutant("rows-of-the-same-step-read-unrounded", "docs/decisions/0035", FLOAT8_ROWS, "position")
def own_step_is_read_before_rounding(patch: pytest.MonkeyPatch) -> None:
    """As where a prompt's attention takes K and V from registers, and memory keeps them rounded."""
    unrounded: list[LayerKV] = []

    @instead_of(patch, ReferenceKernels, "rope_and_cache")
    def writes(write, qkv, shape, rotary, rows, kv, qk_norm):
        q = write(qkv, shape, rotary, rows, kv, qk_norm)
        wide = LayerKV(as_read(kv.keys, kv.k_scales), as_read(kv.values, kv.v_scales))
        write(qkv, shape, rotary, rows, wide, qk_norm)
        unrounded[:] = [wide]
        return q

    @instead_of(patch, ReferenceKernels, "attention")
    def reads(read, q, shape, rows, kv, sinks=None):
        return read(q, shape, rows, *unrounded, sinks)


@mutant("experts-weighed-by-corrected-scores", "docs/decisions/0031", NEXTN, "position")
def the_bias_weighs_too(patch: pytest.MonkeyPatch) -> None:
    """Weights are renormalised with the bias that should only choose."""

    @instead_of(patch, ComposedKernels, "moe_gate")
    def mutant(gate, logits, routing, bias=None, out=None):
        chosen, _ = gate(logits, routing, bias, out)
        weights = (logits.sigmoid() + (0 if bias is None else bias)).gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * routing.scale
