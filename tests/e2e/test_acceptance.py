"""Oracle 2 of the design: what a drafter should get accepted, it gets, window by window.

Equal tokens say nothing about a drafter: one that reads a rejected row, a stale length or
another request's KV only guesses worse. Here each drafter would be always right, and a
known draft of each window is spoilt: exactly the drafts before it must be accepted.
"""

from __future__ import annotations

import pytest
import torch

from helpers.harness import (
    Shape,
    allocate,
    build,
    draft_model,
    request,
    requests_of,
    state_head,
    swapped_by,
)
from helpers.lookups import ngram_drafter
from helpers.spoilt import Spoilt, make_stream, measure, spoilt_at
from helpers.toy import MODULUS, ToyModel
from sametoken.drafters.base import drafts_of
from sametoken.drafters.context import Coupling
from sametoken.types.outputs import SpeculationMetrics

pytestmark = pytest.mark.usefixtures("layouts")

VOCAB = 11
K = 3
MODEL = ToyModel(VOCAB)
PROMPTS = ((1, 2, 3), (5,) * 11, tuple(range(10)), (1, 2, 3, 4, 5), (7, 0, 7), (2,) * 17)
MAX_TOKENS = 16


def self_drafter(parts):
    return draft_model(parts, MODEL)


def extended(state: int, token: int) -> int:
    """The toy target's hash of one token more."""
    return (state * 31_337 + token + 17) % MODULUS


class LookaheadDrafter:
    """An EAGLE in small: the row at p knows the token at p + 1, and only the KV says the rest.

    A row's state is the hash of all tokens up to p + 1, read back from the drafter's KV, so
    its drafts are right if every entry, every length and every row it picks is.
    """

    lookahead_slots = 0
    lookahead_tokens = 1

    def __init__(self, parts) -> None:
        self.kv_caches = (allocate(MODEL.caches, parts.shape, parts.shape.num_drafts),)
        self.coupling = Coupling(parts.kernels.sample, parts.table)

    def propose(self, context):
        live = context.catch_up()
        own = context.kernels.take_rows(context.x.token_ids, live.source)
        states = self._forward(own, live.token_ids, live.rows)

        chains, k = live.chains, context.num_speculative_tokens
        tokens = torch.zeros(k, len(chains.last.index), dtype=torch.int64)
        for at, row in enumerate(chains.last.index.tolist()):
            state, position = states[row], int(chains.following[at])
            for i in range(k):
                token = self._choose(state, chains.rows.slots[at : at + 1], position + i)
                tokens[i, at] = token
                state = extended(state, token)
        return drafts_of(context, chains, list(tokens))

    def _forward(self, token_ids, following, rows) -> list[int]:
        """Keys hold a row's own token, values the one after it."""
        layer = self.kv_caches[0].kv(0)
        block_size = layer.keys.shape[2]
        at = rows.kv_slots // block_size, 0, rows.kv_slots % block_size, 0
        layer.keys[at], layer.values[at] = token_ids.double(), following.double()
        states = []
        for slot, position in zip(rows.slots.tolist(), rows.positions.tolist(), strict=True):
            where = torch.arange(position + 1)
            at = rows.block_table[slot, where // block_size], 0, where % block_size, 0
            assert not layer.values[at].isnan().any(), "a row reads KV that nobody wrote"
            tokens = [layer.keys[at][0].item(), *layer.values[at].tolist()]
            states.append(MODEL._hash(map(int, tokens)))
        return states

    def _choose(self, state: int, slot, position: int) -> int:
        logits = MODEL.compute_logits(torch.tensor([[state, 1]], dtype=torch.float64))
        return int(self.coupling.choose(logits, slot, torch.tensor([position])))


DRAFTERS = {
    "self": self_drafter,
    "lookahead": LookaheadDrafter,
    "state": lambda parts: state_head(parts, MODEL),
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("steps_in_flight", "device"), [(1, "late"), (3, "late"), (3, "ahead")])
@pytest.mark.parametrize("kind", list(DRAFTERS))
def test_exactly_the_drafts_before_the_spoilt_one_are_accepted(
    kind, steps_in_flight, device, temperature
):
    shape = Shape(num_drafts=K, steps_in_flight=steps_in_flight)
    core = build(
        MODEL,
        shape,
        make_drafter=lambda parts: Spoilt(DRAFTERS[kind](parts), K, VOCAB),
        stream=make_stream(device),
    )

    def check(item, num_tokens, update):
        assert update.num_accepted == min(update.num_drafts, spoilt_at(num_tokens, K))
        first = num_tokens == len(item.prompt_token_ids)
        room = 0 if first else min(K, item.max_total_tokens - num_tokens - 1)
        assert update.num_drafts <= room
        if steps_in_flight == 1:
            assert update.num_drafts == room

    total = measure(core, requests_of(PROMPTS, MAX_TOKENS, temperature), check)
    assert all(total.offered_per_position)
    assert 0 < total.num_accepted_tokens < total.num_draft_tokens


@pytest.mark.parametrize("chunk", [4, 8])
@pytest.mark.parametrize("kind", list(DRAFTERS))
def test_shared_prefixes_and_chunk_edges_cost_no_acceptance(kind, chunk):
    shared = (1, 2, 3, 4, 5, 6, 7, 8)
    prompts = [
        (*shared, 9, 9, 9, 9, 9),
        (*shared, 9, 9, 3),
        (*shared, 2, 9, 9),
        (*shared[:4], 0, 6, 7, 8, 9),
        (*shared[:5], 6, 7),
    ]
    core = build(MODEL, Shape(num_drafts=K, prefill_chunk_size=chunk), make_drafter=DRAFTERS[kind])
    total, cached = SpeculationMetrics(), 0
    for i, prompt in enumerate(prompts):
        total += measure(core, [request(f"r{i}", prompt, MAX_TOKENS)])
        cached = core.scheduler.prefix_cache_hits
    assert cached > 0
    assert total.num_draft_tokens > 50
    assert total.accepted_per_position == total.offered_per_position


@pytest.mark.parametrize("kind", list(DRAFTERS))
def test_preemption_costs_no_acceptance(kind, monkeypatch):
    shape = Shape(num_drafts=K, num_blocks=14, max_model_len=36, prefix_caching=False)
    core = build(MODEL, shape, make_drafter=DRAFTERS[kind])
    swapped = swapped_by(core, monkeypatch)
    items = [request(f"r{i}", PROMPTS[i], MAX_TOKENS) for i in range(4)]
    total = measure(core, items)
    assert swapped
    assert total.accepted_per_position == total.offered_per_position


def test_a_slot_s_next_request_has_no_drafts_at_first(monkeypatch):
    """What a drafter had ready for the slot's former request is not the next one's."""
    core = build(MODEL, Shape(num_drafts=K, max_num_seqs=1), make_drafter=self_drafter)
    proposed, admitting = {True: set(), False: set()}, {}
    plan, process_output = core.scheduler.plan, core.scheduler.process_output

    def planned():
        made = plan()
        if made is not None:
            admitting[made.step_id] = bool(made.admissions)
        return made

    def processed(result):
        proposed[admitting[result.step_id]] |= {one.num_proposed for one in result.requests}
        return process_output(result)

    monkeypatch.setattr(core.scheduler, "plan", planned)
    monkeypatch.setattr(core.scheduler, "process_output", processed)
    measure(core, [request(f"r{i}", (1, 2, i), max_tokens=6) for i in range(4)])
    assert proposed == {True: {0}, False: {K}}


class Counting(ToyModel):
    """Counts up and begins again: 0, 1, .., 4, 0, .."""

    def _hash(self, tokens) -> int:
        return tokens[-1]

    def compute_logits(self, hidden):
        following = (hidden[:, 0].long() + 1) % 5
        return torch.nn.functional.one_hot(following, VOCAB).float()


def test_prompt_lookup_on_a_periodic_text_accepts_every_draft():
    core = build(Counting(VOCAB), Shape(num_drafts=K), make_drafter=lambda parts: ngram_drafter(K))
    windows = 6
    item = request("r", (0, 1, 2, 3, 4) * 2, max_tokens=1 + windows * (K + 1))
    total = measure(core, [item])
    assert total == SpeculationMetrics(
        num_steps=1 + windows,
        num_draft_tokens=windows * K,
        num_accepted_tokens=windows * K,
        offered_per_position=(windows,) * K,
        accepted_per_position=(windows,) * K,
    )
