"""The step's small kernels together: speculation on a toy target emits what plain sampling would.

The target knows the last token alone: its logits are a row of a table. What a loop of
single rows emits is the truth; windows, drafts, padding and slots must not change it.
"""

from __future__ import annotations

import pytest
import torch

from sametoken.kernels.commit.triton import judge_and_commit, publish
from sametoken.kernels.ngram.triton import lookup
from sametoken.kernels.sampling import triton as sampling
from sametoken.kernels.stage.triton import stage_windows
from sametoken.state.sequences import Sequences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, MAX_LEN, VOCABULARY = 3, 64, 3
TEMPERATURE = torch.tensor([0.0, 0.3, 1.0, 0.0], device=DEVICE)
SEEDS = torch.tensor([0, 11, 12, 0], device=DEVICE)


def emitted_plainly(table: torch.Tensor, slot: int, prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    one = slice(slot, slot + 1)
    while len(tokens) < length:
        position = torch.tensor([len(tokens)], device=DEVICE)
        logits = table[tokens[-1]][None].clone()
        tokens.append(sampling.sample(logits, TEMPERATURE[one], SEEDS[one], position).item())
    return tokens


def decoding(prompts: list[list[int]], k: int) -> Sequences:
    sequences = Sequences.allocate(
        max_num_seqs=SLOTS,
        max_len=MAX_LEN,
        num_drafts=k,
        block_size=4,
        reserved_block=64,
        device=torch.device(DEVICE),
    )
    for slot, prompt in enumerate(prompts):
        sequences.token_ids[slot, : len(prompt)] = torch.tensor(prompt, device=DEVICE)
        sequences.num_tokens[slot] = len(prompt)
        sequences.num_computed[slot] = len(prompt) - 1
    return sequences


@pytest.mark.parametrize("k", [0, 3])
def test_windows_emit_what_single_rows_would(k):
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(VOCABULARY, VOCABULARY, generator=generator).to(DEVICE)
    prompts = [[0], [1, 2, 1, 2], [2, 0, 1]]
    sequences = decoding(prompts, k)
    accepted = 0
    for step in range(8):
        # The batch turns and one plan row is padding; a slot skips some steps.
        order = [(step + i) % SLOTS for i in range(SLOTS - 1)]
        slots = torch.tensor([order[0], sequences.reserved_slot, *order[1:]], device=DEVICE)
        limit = torch.tensor([k, k, step % (k + 1)], device=DEVICE)
        x = stage_windows(sequences, slots, limit, slots != sequences.reserved_slot, k + 1)
        logits = table[x.token_ids]
        logits[x.rows.slots == sequences.reserved_slot] = torch.nan
        keys = sampling.window_keys(logits, TEMPERATURE, SEEDS, x.rows.slots, x.rows.positions)
        judgement, lengths = judge_and_commit(sequences, keys, x, k + 1)
        assert not judgement.faults.any()
        accepted += int(judgement.num_accepted.sum())
        if k:
            drafts = lookup(
                sequences.token_ids, x.slots, lengths.num_tokens, min_length=1, max_length=2, k=k
            )
            publish(sequences, x, *drafts)
    assert accepted > 0 or k == 0
    for slot, prompt in enumerate(prompts):
        length = int(sequences.num_tokens[slot])
        assert length > len(prompt)
        assert sequences.num_computed[slot] == length - 1
        tokens = sequences.token_ids[slot, :length].tolist()
        assert tokens == emitted_plainly(table, slot, prompt, length)
    for fact in (sequences.num_tokens, sequences.num_computed, sequences.num_drafts):
        assert fact[sequences.reserved_slot] == 0
    assert not sequences.token_ids[sequences.reserved_slot].any()
