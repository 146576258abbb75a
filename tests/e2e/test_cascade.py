"""Suffix decoding and cascades: the same tokens, and no fewer accepted than of each part."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from helpers.harness import CPU, Ran, Shape, build, draft_model, request, run
from helpers.lookups import ngram_drafter, suffix_drafter
from helpers.suffixes import Options
from helpers.toy import ToyModel
from sametoken.drafters.base import Drafts
from sametoken.drafters.combined import CascadeDrafter
from sametoken.layers.residual import kept_of
from sametoken.models.base import HiddenStates
from sametoken.runner.stream import LaggingStream
from sametoken.state.sequences import NO_HISTORY, TokenHistory

K = 4
PROMPT = (50, 51, 52)
FRESH = tuple(range(1, 31))
TEXT = (*PROMPT, *FRESH, 60, *FRESH[:20])


class ReciteModel(ToyModel):
    """Recites ``TEXT`` whatever was said, except at positions that it does not know."""

    def __init__(self, unknown=range(0)) -> None:
        super().__init__(64)
        self.unknown = unknown

    def forward(self, token_ids, rows, kv, kept=None):
        super().forward(token_ids, rows, kv)
        positions = torch.stack((rows.positions, rows.positions), dim=1).double()
        return HiddenStates(kept_of(positions, kept), positions)

    def compute_logits(self, hidden):
        logits = torch.zeros(hidden.shape[0], 64)
        for row, position in zip(logits, hidden[:, 0].long().tolist(), strict=True):
            following = position + 1
            known = 0 <= following < len(TEXT) and following not in self.unknown
            row[TEXT[following] if known else 63] = 1
        return logits


#: Knows the fresh text by heart, and nothing of its repetition.
DRAFT = ReciteModel(unknown=range(len(PROMPT) + len(FRESH), len(TEXT)))


def lookup(kind: str, k: int, min_match: int = 1, history: TokenHistory = NO_HISTORY):
    if kind == "ngram":
        return ngram_drafter(k, min_match, max(4, min_match))
    return suffix_drafter(Options(k, min_match=min_match, factor=2.0), history)


def make_drafter(kind: str, model, min_match: int = 2, history: TokenHistory = NO_HISTORY):
    """``kind`` is "model", a lookup, or a lookup and "model"."""
    first, _, second = kind.partition("+")

    def made(parts):
        k = parts.shape.num_drafts
        if first == "model":
            return draft_model(parts, model)
        if not second:
            return lookup(first, k, history=history)
        return CascadeDrafter(lookup(first, k, min_match, history), draft_model(parts, model))

    return made


def recite(kind: str) -> Ran:
    shape = Shape(num_drafts=K, num_blocks=80, max_model_len=80)
    core = build(ReciteModel(), shape, make_drafter=make_drafter(kind, DRAFT))
    ran = run(core, [request("r", PROMPT, max_tokens=len(TEXT) - len(PROMPT))])
    assert ran.tokens["r"] == list(TEXT[len(PROMPT) :])
    return ran


@pytest.mark.parametrize("first", ["ngram", "suffix"])
def test_a_cascade_accepts_more_than_each_of_its_parts(first):
    alone = {kind: recite(kind).accepted for kind in ("model", first)}
    cascade = recite(f"{first}+model")
    assert min(alone.values()) > 10
    assert cascade.accepted > max(alone.values())
    assert cascade.accepted >= 0.8 * sum(alone.values())


MODEL = ToyModel(5)
PROMPTS = ((1, 2, 3), (4,), (1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1), (2, 2, 2, 2))
PARAMS = (
    {"seed": 0},
    {"seed": 1, "temperature": 0.8},
    {"seed": 2, "temperature": 0.6, "frequency_penalty": 0.5},
)


def asked(prefix: str = ""):
    return [
        request(f"{prefix}{i}-{j}", prompt, max_tokens=16, **params)
        for i, prompt in enumerate(PROMPTS)
        for j, params in enumerate(PARAMS)
    ]


@lru_cache
def truth() -> dict[str, list[int]]:
    shape = Shape(max_num_seqs=1, prefix_caching=False)
    return run(build(MODEL, shape, steps="compact"), asked()).tokens


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize(
    ("kind", "steps_in_flight"),
    [("suffix", 1), ("suffix", 3), ("ngram+model", 2), ("suffix+model", 1)],
)
def test_every_token_stays_the_same(kind, steps_in_flight):
    """Twice over: the second time with the texts of the first."""
    history = TokenHistory.allocate(4, 60, CPU)
    core = build(
        MODEL,
        Shape(steps_in_flight=steps_in_flight, num_blocks=40),
        make_drafter=make_drafter(kind, MODEL, history=history),
        stream=LaggingStream(),
        history=history,
    )
    ran = run(core, [*asked(), *asked("again-")])
    for name, tokens in truth().items():
        assert ran.tokens[name] == ran.tokens[f"again-{name}"] == tokens
    assert ran.accepted > 0
    assert history.lengths.min() > 0


def test_earlier_requests_are_drafted_from_when_that_is_allowed():
    """A text that repeats nothing of its own, asked for twice."""

    def accepted(num_texts: int) -> int:
        history = TokenHistory.allocate(num_texts, 90, CPU)
        core = build(
            ReciteModel(),
            Shape(max_num_seqs=1, num_blocks=80, max_model_len=80, prefix_caching=False),
            make_drafter=make_drafter("suffix", DRAFT, history=history),
            history=history,
        )
        ran = run(core, [request(name, PROMPT, max_tokens=len(FRESH)) for name in ("a", "b")])
        assert ran.tokens["a"] == ran.tokens["b"] == list(FRESH)
        return ran.accepted

    assert accepted(0) == 0
    assert accepted(1) > 15


@pytest.mark.parametrize("kind", ["ngram+model", "suffix+model"])
def test_a_model_that_is_the_target_is_right_whenever_its_turn_comes(kind):
    """With a match that never is long enough, exactly the model's drafts are accepted."""
    core = build(MODEL, Shape(), make_drafter=make_drafter(kind, MODEL, min_match=20))
    items = [item for item in asked() if item.params.temperature == 0]
    ran = run(core, items)
    assert ran.offered > 0
    assert ran.accepted == ran.offered


class WrongTwoTimesOfThree:
    """A lookup that is always wrong, and finds nothing at every third length."""

    kv_caches = ()
    lookahead_slots = lookahead_tokens = 0

    def propose(self, context) -> Drafts:
        ids = torch.zeros((len(context.slots), context.num_speculative_tokens), dtype=torch.int64)
        for b, slot in enumerate(context.slots.tolist()):
            n = int(context.num_tokens[b])
            tokens = context.tokens_at(torch.full((n,), slot), torch.arange(n)).tolist()
            ids[b] = (MODEL.next_token(tokens) + 1) % 5
        turn = context.samples & (context.num_tokens % 3 > 0)
        return Drafts(ids, torch.where(turn, context.num_speculative_tokens, 0))


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_the_model_s_kv_is_whole_after_turns_of_the_lookup(steps_in_flight):
    """Every window is the lookup's or the model's, and all of the model's are accepted."""
    core = build(
        MODEL,
        Shape(num_blocks=90, steps_in_flight=steps_in_flight),
        make_drafter=lambda parts: CascadeDrafter(
            WrongTwoTimesOfThree(), draft_model(parts, MODEL)
        ),
    )
    lengths, turns = {}, {"lookup": 0, "model": 0}
    for i, prompt in enumerate(PROMPTS * 2):
        lengths[f"r{i}"] = len(prompt)
        core.add_request(request(f"r{i}", prompt, max_tokens=30))
    while core.has_unfinished:
        for update in core.step():
            turn = "lookup" if lengths[update.request_id] % 3 else "model"
            turns[turn] += update.num_drafts
            assert update.num_accepted == (update.num_drafts if turn == "model" else 0)
            lengths[update.request_id] += len(update.token_ids)
            if lengths[update.request_id] >= 30:
                core.release(update.request_id)
    assert min(turns.values()) > 20
