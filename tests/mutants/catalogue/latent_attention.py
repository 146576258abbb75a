"""The two forms of latent attention, absorbed and expanded, and vectors in float8."""

from __future__ import annotations

import pytest
import torch

from mutants.catalogue.planting import instead_of, mutant
from sametoken.layers.latent_attention import LatentAttention
from sametoken.ops.model.latent_attention.shape import LayerLatent
from sametoken.ops.reference import ReferenceKernels

LATENT_BITS = (
    "tests/e2e/test_parity_families.py"
    "::test_a_row_has_the_same_bits_in_every_chunk[deepseek_v3-dtype0]"
)
FLOAT8_ROWS = (
    "tests/unit/ops/model/latent_attention/test_fp8.py"
    "::test_a_row_reads_what_is_stored_in_any_step[reference-fp32]"
)


@mutant("prompts-expanded-beside-absorbed-decode", "sglang#12000", LATENT_BITS, "tokens")
def prompts_expand_their_keys(patch: pytest.MonkeyPatch) -> None:
    """Several rows at once meet keys and values of every head, a row alone meets latents."""

    @instead_of(patch, LatentAttention, "__call__")
    def mutant(absorbed, self, x, rows, memory, kept=None):
        whole = absorbed(self, x, rows, memory, kept)
        if len(x) == 1:
            return whole
        shape, fused = self.shape, self.projection(x)
        q, latent = fused.split((fused.shape[1] - shape.width, shape.width), dim=-1)
        q = self.queries(q).unflatten(-1, (shape.num_heads, -1)).contiguous()
        turned = q[..., -shape.rope_dim :]
        self.kernels.latent_rope_and_cache(
            turned.clone(), latent, self.rotary, rows, memory, turned
        )
        values = [expanded(self, q[i], rows, memory, i) for i in range(len(x))]
        return self.output(torch.stack(values).flatten(1))

    def expanded(layer, q, rows, memory, i):
        shape = layer.shape
        blocks = memory.vectors[rows.block_table[rows.slots[i]]]
        seen = blocks.flatten(0, 1)[: int(rows.positions[i]) + 1]
        latents, turned = seen[:, : shape.rank], seen[:, shape.rank :]
        keys = torch.einsum("jr,hrn->jhn", latents, layer.absorb.matrices)
        keys = torch.cat((keys, turned[:, None].expand(-1, shape.num_heads, -1)), -1)
        weights = (torch.einsum("hn,jhn->hj", q, keys) * shape.scale).softmax(-1)
        values = torch.einsum("jr,hvr->jhv", latents, layer.expand.matrices)
        return torch.einsum("hj,jhv->hv", weights, values)


@mutant("latents-of-the-same-step-read-unrounded", "docs/decisions/0035", FLOAT8_ROWS, "position")
def own_step_is_read_before_rounding(patch: pytest.MonkeyPatch) -> None:
    """As where a prompt takes its latents from registers, and memory keeps them rounded."""
    unrounded: list[LayerLatent] = []

    @instead_of(patch, ReferenceKernels, "latent_rope_and_cache")
    def writes(write, q, latent, rotary, rows, memory, out):
        write(q, latent, rotary, rows, memory, out)
        wide = LayerLatent(memory.read(torch.arange(len(memory.vectors)), q.dtype), memory.rank)
        write(q, latent, rotary, rows, wide, out)
        unrounded[:] = [wide]

    @instead_of(patch, ReferenceKernels, "latent_attention")
    def reads(read, q, scale, rows, memory):
        return read(q, scale, rows, *unrounded)
