"""The unrolled head drafts what the engine's head drafts one token after the other."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import HIDDEN, VOCAB, write_llama
from helpers.heads import OPTIONS, SharedTarget, empty_kv, rows_of_one_slot
from sametoken.layers.rotary import rotary_table
from sametoken.models.eagle3_checkpoint import Eagle3Checkpoint
from sametoken.models.loader import read_config
from sametoken.train.eagle3_network import Eagle3Network
from sametoken.train.speculators import HeadLayout, write_head
from sametoken.train.vocabulary import membership, offsets_of

DRAFT_IDS = torch.tensor([0, 2, 3, 7, 11, 12, 20])
STEPS = 4


def random_network(config, *, norm_before_residual: bool) -> Eagle3Network:
    rotary = rotary_table(
        config.rope, head_dim=config.head_dim, max_positions=32, device=torch.device("cpu")
    )
    network = Eagle3Network(
        config,
        draft_vocab_size=len(DRAFT_IDS),
        num_aux=3,
        norm_before_residual=norm_before_residual,
        rotary=rotary,
    )
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scaled = noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.1 * noise
            parameter.copy_(scaled)
        network.state_scale.copy_(torch.rand(3 * HIDDEN, generator=generator) + 0.5)
    return network


def write(directory, network: Eagle3Network, config, *, norm_before_residual: bool):
    tensors = network.export_tensors(torch.float32)
    tensors |= {"d2t": offsets_of(DRAFT_IDS), "t2d": membership(DRAFT_IDS, VOCAB)}
    layout = HeadLayout(
        layer=config,
        draft_vocab_size=len(DRAFT_IDS),
        aux_layers=(1, 2, 4),
        norm_before_residual=norm_before_residual,
        num_speculative_tokens=3,
        verifier="target",
    )
    write_head(directory, layout, tensors)
    return Eagle3Checkpoint(directory)


@pytest.fixture(params=[True, False], ids=["residual-normed", "residual-raw"])
def both(request, tmp_path):
    """A network, and the engine's head loaded from what it wrote."""
    config = read_config(write_llama(tmp_path / "target"))
    network = random_network(config, norm_before_residual=request.param)
    checkpoint = write(tmp_path / "head", network, config, norm_before_residual=request.param)
    target = SharedTarget()
    return network, checkpoint.load(target, **OPTIONS), target


def test_every_step_is_that_of_an_engine_s_chain(both):
    """To the text's own tokens; at every row, over the KV that drafting would find there."""
    network, head, target = both
    generator = torch.Generator().manual_seed(7)
    token_ids = torch.randint(VOCAB, (1, 11), generator=generator)
    auxiliary = torch.randn(1, 11, 3 * HIDDEN, generator=generator)
    with torch.no_grad():
        unrolled = network.unroll(target.embedding_matrix, token_ids, auxiliary, STEPS)
        logits = [network.lm_head(last)[0] for last in unrolled]
    combined = head.combine(auxiliary[0])
    for row in range(11 - STEPS):
        kv = empty_kv(head)
        rows, last = rows_of_one_slot(0, row + 1), torch.tensor([row])
        known = head.forward(token_ids[0, 1 : row + 2], combined[: row + 1], rows, kv, last)
        for step in range(STEPS):
            wanted = head.compute_logits(known.last)[0]
            torch.testing.assert_close(logits[step][row], wanted, rtol=1e-4, atol=1e-4)
            following = token_ids[0, row + step + 2 : row + step + 3]
            if step + 1 < STEPS:
                known = head.forward(
                    following, known.feedback, rows_of_one_slot(row + step + 1, 1), kv
                )


def test_later_rows_and_padding_change_nothing(both):
    network, _, target = both
    generator = torch.Generator().manual_seed(8)
    token_ids = torch.randint(VOCAB, (1, 9), generator=generator)
    auxiliary = torch.randn(1, 9, 3 * HIDDEN, generator=generator)
    changed_ids, changed = token_ids.clone(), auxiliary.clone()
    changed_ids[0, 7:], changed[0, 4:] = 1, 5.0
    with torch.no_grad():
        runs = [
            list(network.unroll(target.embedding_matrix, ids, states, 3))
            for ids, states in ((token_ids, auxiliary), (changed_ids, changed))
        ]
    for step in range(3):
        # Row 3 sees states up to its own and tokens up to 4 + step.
        torch.testing.assert_close(runs[0][step][0, :4], runs[1][step][0, :4])


def test_more_steps_than_tokens(both):
    network, _, target = both
    outputs = network.unroll(
        target.embedding_matrix, torch.tensor([[1, 2]]), torch.zeros(1, 2, 3 * HIDDEN), 5
    )
    assert [output.shape for output in outputs] == [(1, 2, HIDDEN)] * 5


def test_what_was_written_is_taken_back(both):
    network, _, target = both
    token_ids = torch.tensor([[1, 2, 3, 4]])
    auxiliary = torch.randn(1, 4, 3 * HIDDEN)
    with torch.no_grad():
        (before,) = network.unroll(target.embedding_matrix, token_ids, auxiliary, 1)
        network.take(network.export_tensors(torch.float32))
        (after,) = network.unroll(target.embedding_matrix, token_ids, auxiliary, 1)
    torch.testing.assert_close(after, before)
    assert network.state_scale.eq(1).all()
