"""The two forms of latent attention, absorbed and expanded."""

from __future__ import annotations

import pytest
import torch

from mutants.catalogue.planting import instead_of, mutant
from sametoken.layers.latent_attention import LatentAttention
from sametoken.scheduler.kv_memory import KVMemory
from sametoken.scheduler.request_state import RequestState

LATENT_BITS = (
    "tests/e2e/test_parity_families.py"
    "::test_a_row_has_the_same_bits_in_every_chunk[deepseek_v3-dtype0]"
)
EXPANDED = "tests/e2e/test_expanded_prompts.py::test"
REPLAYED = f"{EXPANDED}_what_is_computed_again_has_the_form_that_it_had"
CONVERSATION = f"{EXPANDED}_a_conversation_reads_no_block_of_another_form"


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


@mutant("a-prompt-s-last-token-expanded-in-a-replay", "docs/decisions/0044", REPLAYED, "tokens")
def the_last_token_is_expanded(patch: pytest.MonkeyPatch) -> None:
    def mutant(self, num_query):
        expanded = self.expands and self.position < self.prompt_len
        return self.position + num_query if expanded else 0

    patch.setattr(RequestState, "expands_to", mutant)


@mutant("absorbed-answers-serve-expanded-prompts", "docs/decisions/0044", CONVERSATION, "tokens")
def blocks_of_answers_are_cached(patch: pytest.MonkeyPatch) -> None:
    @instead_of(patch, KVMemory, "index_kept")
    def mutant(index, self, request, num_kept_tokens):
        expands, request.expands = request.expands, False
        index(self, request, num_kept_tokens)
        request.expands = expands
