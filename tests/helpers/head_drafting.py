"""Draft heads of every kind under their drafter, against a run from scratch."""

from __future__ import annotations

import torch

from helpers.drafting import BLOCK_SIZE, CPU, MAX_LEN, Bench, requests_of
from sametoken.drafters.eagle import EagleDrafter
from sametoken.ops.backend import AttentionRows
from sametoken.state.caches import ModelCache

ONE_SLOT = torch.tensor([list(range(MAX_LEN // BLOCK_SIZE))])


def head_bench(target, head, k: int, **options) -> Bench:
    bench = Bench(target, k, **options)
    bench.drafter = EagleDrafter(head, bench.allocate(head.caches), k, bench.coupling)
    return bench


def check_from_scratch(bench: Bench, head, steps: int, vocab: int) -> None:
    """KV and drafts of random steps, to the bit: a rejected row or a stale state would show."""

    def check(context, drafts):
        (cache,) = bench.drafter.kv_caches
        for b, slot in requests_of(context):
            end, samples = int(context.end[b]), bool(context.samples[b])
            kv, expected = from_scratch(bench, head, slot, end, samples, vocab)
            assert torch.equal(bench.cached(cache, slot, end), kv)
            assert drafts.draft_ids[b, : int(drafts.num_drafts[b])].tolist() == expected

    bench.run(steps, vocab, check)
    assert bench.counts.cached


def check_lookahead_slots(bench: Bench, steps: int, vocab: int) -> None:
    """KV is written up to ``lookahead_slots`` above the committed tokens, and no further."""
    k = bench.k
    assert bench.drafter.lookahead_slots == max(k - 2, 0)

    def check(context, drafts):
        (cache,) = bench.drafter.kv_caches
        for b, slot in requests_of(context):
            written = int(context.end[b])
            if context.samples[b]:
                written = int(context.num_tokens[b]) + k - 2
            keys = bench.cached(cache, slot, MAX_LEN)[0, 0, :, 0, 0]
            assert not keys[:written].isnan().any()
            assert keys[written:].isnan().all()

    bench.run(steps, vocab, check)


def check_everything_is_accepted(bench: Bench, steps: int, vocab: int) -> None:
    bench.run(steps, vocab, lambda context, drafts: None)
    assert bench.counts.offered > 30
    assert bench.counts.accepted == bench.counts.offered


def alone(first: int, count: int) -> AttentionRows:
    positions = torch.arange(first, first + count)
    return AttentionRows(positions, torch.zeros_like(positions), positions, ONE_SLOT)


def fresh(caches) -> ModelCache:
    return ModelCache.allocate(
        caches,
        num_blocks=ONE_SLOT.shape[1],
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        num_drafts=0,
        device=CPU,
    )


def from_scratch(bench: Bench, head, slot: int, end: int, samples: bool, vocab: int):
    """KV below ``end`` and k drafts, by one pass over the committed tokens of one slot."""
    committed = torch.tensor(bench.tokens(slot))
    target_kv, kv = fresh(bench.target.caches), fresh(head.caches)
    hidden = bench.target.forward(committed[:end], alone(0, end), target_kv)
    given = head.target_states(hidden, torch.arange(end))
    states = head.forward(committed[1 : end + 1], given, alone(0, end), kv)
    found = torch.stack(kv.blocks, dim=1)[:, :, :-1].permute(0, 1, 2, 4, 3, 5)
    found = found.flatten(2, 3)[:, :, :end].clone()
    drafts: list[int] = []
    while samples and len(drafts) < bench.k:
        position = end + len(drafts)
        slots, positions = torch.tensor([slot]), torch.tensor([position + 1])
        logits = head.compute_logits(states.last[-1:])
        if head.token_ids is not None:
            full = logits.new_full((1, vocab), -torch.inf)
            full[:, head.token_ids] = logits
            logits = full
        token = bench.coupling.choose(logits, slots, positions)
        drafts.append(int(token))
        states = head.forward(token, states.feedback[-1:].clone(), alone(position, 1), kv)
    return found, drafts
