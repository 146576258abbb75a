"""vllm#39273: recurrent state after a step without drafts that follows accepted drafts.

There a request whose last window had accepted several drafts, and which then ran a step with
none, read the state of its first window position instead of the last accepted one. Here there
is no position to choose: a step folds what stands below its first row. On a toy of the smallest
shapes, and on the trained hybrid with the request that was reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from helpers import calculator
from helpers.forward import load
from helpers.harness import Ran, Shape, build, request, run
from helpers.hybrid_toy import HybridToy
from helpers.lookups import ngram_drafter
from helpers.nemotron import write_nemotron
from helpers.trained import encoded, trained
from sametoken.drafters import ngram
from sametoken.drafters.base import Drafts
from sametoken.drafters.lookup import LookupDrafter
from sametoken.models.names import HYBRID_NAME, NEMOTRON_NAME
from sametoken.ops.reference import ReferenceKernels

K = 64
SHAPE = Shape(
    num_drafts=K,
    max_num_seqs=2,
    max_num_batched_tokens=256,
    num_blocks=400,
    max_model_len=256,
    prefix_caching=False,
    cache_emitted=False,
    # Drafts cost little, and many are rejected.
    rows_per_weight_read=256,
)
PROMPTS = {"a": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], "b": [2, 7, 1, 8, 2, 8, 1, 8], "c": [0, 10] * 6}


class ThreeStepsThenNone(LookupDrafter):
    """Drafts for three steps, then for one step none, and so on."""

    turn = 0

    def propose(self, context) -> Drafts:
        drafts = super().propose(context)
        self.turn += 1
        return drafts if self.turn % 4 else Drafts(drafts.draft_ids, drafts.num_drafts * 0)


@dataclass
class Watched(Ran):
    """Counts steps without drafts that follow one with at least two accepted."""

    zero_after_many: int = 0
    rejected: int = 0


def run_watched(core, requests, limit: int) -> Watched:
    """Drive requests to ``limit`` tokens each."""
    watched, before = Watched(), {}
    for item in requests:
        core.add_request(item)
        watched.tokens[item.request_id] = []
    while core.has_unfinished:
        for update in core.step():
            name = update.request_id
            many = before.get(name, 0) >= 2
            watched.zero_after_many += many and update.num_drafts == 0
            watched.rejected += update.num_drafts - update.num_accepted
            before[name] = update.num_accepted
            watched.tokens[name].extend(update.token_ids)
            if len(watched.tokens[name]) >= limit:
                del watched.tokens[name][limit:]
                core.release(name)
    return watched


def require_same_tokens(model, limit: int, shortest: int, least: int, **options) -> None:
    """With drafts of matches of ``shortest`` tokens, and ``least`` steps or more without any."""
    requests = [request(name, prompt, max_tokens=limit) for name, prompt in PROMPTS.items()]
    plain = run(build(model, SHAPE, **options), requests)
    drafter = ngram_drafter(K, shortest, 10, kind=ThreeStepsThenNone)
    core = build(model, SHAPE, make_drafter=lambda parts: drafter)
    drafted = run_watched(core, requests, limit)
    assert drafted.tokens == plain.tokens
    assert drafted.zero_after_many >= least
    assert drafted.rejected >= K
    assert all(len(set(tokens)) > 2 for tokens in plain.tokens.values()), "nothing to get wrong"


@pytest.mark.usefixtures("layouts")
def test_a_step_without_drafts_after_accepted_drafts():
    require_same_tokens(HybridToy(pull=9.0), 80, 2, 3)


def test_so_it_is_with_mamba_2_on_which_it_was_confirmed(tmp_path):
    """64 drafts a window, on a small random Nemotron-H."""
    kernels = ReferenceKernels()
    path = write_nemotron(tmp_path, seed=5, pattern="M*M-E")
    model = load(path, kernels, max_positions=SHAPE.max_model_len + K)
    require_same_tokens(model, 90, 1, 1, kernels=kernels)


@pytest.mark.parametrize(
    ("name", "temperature"), [(HYBRID_NAME, 0.0), (HYBRID_NAME, 0.8), (NEMOTRON_NAME, 0.8)]
)
def test_the_reported_request_on_a_trained_hybrid(name, temperature, monkeypatch):
    """Beside two others: its beginning, and the code alone."""
    limit = 48
    token_ids = encoded(name, calculator.PROMPT)
    prompts = {"whole": token_ids, "beginning": token_ids[:33], "code": token_ids[3:28]}
    requests = [
        request(request_id, prompt, max_tokens=limit, temperature=temperature)
        for request_id, prompt in prompts.items()
    ]
    plain = run(trained(name), requests)
    monkeypatch.setattr(ngram, "LookupDrafter", ThreeStepsThenNone)
    # As in vLLM every window may have all 64.
    drafts = calculator.NGRAM | {"draft_limits": "fixed"}
    drafted = run_watched(trained(name, drafts), requests, limit)
    assert drafted.tokens == plain.tokens
    # How often depends on the text, and sampled text on the CPU's instructions: 1 to 3 times seen.
    assert drafted.zero_after_many >= 1
    assert drafted.rejected >= K
