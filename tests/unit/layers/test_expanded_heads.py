"""Prompts in the expanded form against its definition, by chunks, and by some heads at a time."""

from __future__ import annotations

import pytest
import torch

from helpers.latent_scene import LatentScene
from sametoken.layers.expanded_heads import ExpandedHeads
from sametoken.ops.backend import KeptRows, RowRuns
from sametoken.ops.expanded_rows import ChunkRows
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.model.latent_attention import shape as shapes
from sametoken.ops.model.latent_attention.shape import ExpandedShape, LatentShape
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.triton import TritonKernels

KERNELS = [ReferenceKernels(), NativeKernels(), TritonKernels(GemmTable())]
HEADS, NOPE, ROPE, RANK, SCALE, LENGTH = 3, 12, 8, 24, 0.3, 41


@pytest.mark.parametrize(("v_dim", "scale"), [(10, None), (24, None), (10, 0.3)])
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda one: one.name)
def test_a_row_has_its_bits_in_every_chunk_and_beside_any_heads(kernels, v_dim, scale, monkeypatch):
    """Keys of 20 elements, in memory of 24; what lies behind the last position is poisoned."""
    scene = LatentScene([7, LENGTH], heads=HEADS, scale=scale)
    up_k, up_v = torch.randn(HEADS, NOPE, RANK), torch.randn(HEADS, v_dim, RANK)
    heads = ExpandedHeads(
        kernels,
        ExpandedShape(LatentShape(HEADS, RANK, ROPE, SCALE), NOPE, v_dim),
        kernels.pack_heads(up_k.mT.contiguous()),
        kernels.pack_heads(up_v.clone()),
    )
    q, rotated = torch.randn(LENGTH, HEADS, NOPE), torch.randn(LENGTH, HEADS, ROPE)

    def attend(*ends):
        out, first = torch.empty(LENGTH, HEADS, v_dim), 0
        for stop in ends:
            blocks = scene.table[1, : -(-stop // 16)]
            positions, table = torch.arange(first, stop), torch.arange(len(blocks))[None]
            runs = RowRuns.even(1, stop - first)
            queries = KeptRows(positions, positions, positions * 0, table, runs)
            chunk = ChunkRows(slice(first, stop), blocks, stop, queries)
            raw = torch.cat((q, torch.full_like(rotated, torch.nan)), -1)
            heads.attend(raw[chunk.rows], rotated[chunk.rows], chunk, scene.memory, out[chunk.rows])
            first = stop
        return out

    whole = attend(LENGTH)
    seen = scene.vectors[1].double()
    keys = torch.einsum("jr,hnr->jhn", seen[:, :RANK], up_k.double())
    scores = torch.einsum("ihn,jhn->hij", q.double(), keys)
    scores += torch.einsum("ihr,jr->hij", rotated.double(), seen[:, RANK:])
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    weights = (scores * SCALE).masked_fill(hidden, -torch.inf).softmax(-1)
    values = torch.einsum("jr,hvr->jhv", seen[:, :RANK], up_v.double())
    expected = torch.einsum("hij,jhv->ihv", weights, values)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-4, atol=1e-4)
    chunks = attend(1, 16, 30, 40, LENGTH)
    monkeypatch.setattr(shapes, "MOST_BYTES", 2 * 48 * 24 * 4 * 2)
    # The interpreter's products add in an order that depends on the number of rows.
    exact = 0 if kernels.name != "triton" else 1e-5
    torch.testing.assert_close(chunks, whole, rtol=exact, atol=exact)
    torch.testing.assert_close(attend(LENGTH), whole, rtol=exact, atol=exact)
