"""Steps at fixed shapes over recurrent state: what captured steps run, under the interpreter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.harness import Shape, build, request, run
from helpers.hybrid_toy import HybridToy
from helpers.static_steps import DeviceChoices
from sametoken.core.plan import Admission
from sametoken.core.sampling_params import SamplingParams
from sametoken.drafters.base import Drafts, NoDrafter
from sametoken.drafters.ngram import NgramDrafter
from sametoken.kernels.ngram.triton import lookup
from sametoken.models.base import HiddenStates
from sametoken.runner.padded import PaddedStep
from sametoken.runner.synthetic import SyntheticJudge
from sametoken.state.kv_cache import KVCache
from sametoken.state.padded import judge_and_commit
from sametoken.state.recurrent import RecurrentCache
from sametoken.state.recurrent_device import DevicePass
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = {0: [3, 1, 4, 1, 5, 9, 2], 2: [7, 8, 7]}
SLOTS, CHUNK, LENGTH = 3, 5, 12
GREEDY = dict.fromkeys(PROMPTS, SamplingParams(temperature=0.0))
CUT = {
    0: SamplingParams(temperature=9.0, top_k=3, top_p=0.8, seed=1),
    2: SamplingParams(temperature=4.0, top_p=0.7, min_p=0.1, seed=1),
}


def padded_step(model: HybridToy, k: int, params: dict[int, SamplingParams]) -> PaddedStep:
    cache = RecurrentCache.allocate(
        model.recurrent_spec, max_num_seqs=SLOTS, num_drafts=k, device=DEVICE
    )
    for held in (cache.states, cache.history, cache.pending_qkv, cache.pending_gates):
        held.fill_(float("nan"))
    kv = KVCache.allocate(
        model.kv_spec,
        num_blocks=20,
        block_size=4,
        device=DEVICE,
        recurrent=replace(cache, open_pass=DevicePass.begin),
    )
    sequences = Sequences.allocate(
        max_num_seqs=SLOTS,
        max_len=2 * LENGTH,
        num_drafts=k,
        block_size=4,
        reserved_block=20,
        device=DEVICE,
    )
    table = SamplingTable.allocate(SLOTS, DEVICE)
    for slot, prompt in PROMPTS.items():
        sequences.token_ids[slot, : len(prompt)] = torch.tensor(prompt)
        sequences.num_tokens[slot] = len(prompt)
        table.admit(Admission(slot, tuple(prompt), 0, params[slot]))
    drafter = NgramDrafter(k, 1, 2, lookup) if k else NoDrafter()
    return PaddedStep(sequences, model, kv, table, drafter)


def plan_of(rows: list[tuple[int, ...]]) -> torch.Tensor:
    return torch.tensor(rows, device=DEVICE).t().contiguous()


def prefill(step: PaddedStep) -> None:
    """Chunks side by side; a prompt that has ended leaves its plan row to padding."""
    layout = step.layout(len(PROMPTS), CHUNK)
    done = dict.fromkeys(PROMPTS, 0)
    while any(done[slot] < len(prompt) for slot, prompt in PROMPTS.items()):
        rows = []
        for slot, prompt in PROMPTS.items():
            count = min(CHUNK, len(prompt) - done[slot])
            done[slot] += count
            samples = count > 0 and done[slot] == len(prompt)
            rows.append((slot if count else SLOTS, count, int(samples), 0))
        plan = plan_of(rows)
        step.settle(plan, layout, step.chunks(plan, layout, CHUNK))


def generate(k: int, params: dict[int, SamplingParams]) -> tuple[dict[int, list[int]], int]:
    """Tokens by slot, and accepted drafts. One plan row is padding; a slot skips some steps."""
    step = padded_step(HybridToy(pull=9.0), k, params)
    prefill(step)
    layout, accepted, turn = step.layout(3, 0), 0, 0
    first, second = PROMPTS
    while min(step.sequences.num_tokens[slot] for slot in PROMPTS) < LENGTH:
        turn += 1
        limit = 0 if turn % 4 == 0 else k
        rows = [(second, limit, 1, turn), (SLOTS, k, 0, turn), (first, k, 1, turn)]
        if turn % 3 == 0:
            rows[0] = (SLOTS, 0, 0, turn)
        plan = plan_of(rows)
        accepted += int(step.settle(plan, layout, step.windows(plan)).outcome[:, 2].sum())
    recurrent = step.kv.recurrent
    for held in (recurrent.states, recurrent.pending_qkv):
        assert held[:, SLOTS].isnan().all(), "the reserved slot has been written"
    num_computed = step.sequences.num_computed
    # What is folded is at most what is computed: of a window, its accepted drafts are pending.
    assert (recurrent.position <= num_computed).all()
    assert (recurrent.position + recurrent.num_pending >= num_computed).all()
    tokens = step.sequences.token_ids
    return {slot: tokens[slot, :LENGTH].tolist() for slot in PROMPTS}, accepted


def plain_tokens(params: dict[int, SamplingParams], kernels=None) -> dict[int, list[int]]:
    """By the eager verbs, one request at a time, row by row in PyTorch."""
    shape, tokens = Shape(prefix_caching=False, cache_emitted=False), {}
    for slot, prompt in PROMPTS.items():
        core = build(HybridToy(pull=9.0), shape, kernels=kernels)
        item = request("r", prompt, max_tokens=LENGTH - len(prompt))
        item = replace(item, params=replace(params[slot], max_tokens=LENGTH - len(prompt)))
        tokens[slot] = [*prompt, *run(core, [item]).tokens["r"]]
    return tokens


@pytest.mark.parametrize("k", [0, 2])
def test_chunks_and_windows_say_what_plain_decoding_says(k):
    tokens, accepted = generate(k, GREEDY)
    assert tokens == plain_tokens(GREEDY)
    assert (accepted > 0) == (k > 0)


@pytest.mark.parametrize("k", [0, 2])
def test_cuts_in_windows_are_those_of_the_eager_verbs(k):
    tokens, accepted = generate(k, CUT)
    assert tokens == plain_tokens(CUT, DeviceChoices())
    assert (accepted > 0) == (k > 0)


def test_those_cuts_decide_tokens():
    uncut = {slot: replace(p, top_k=0, top_p=1.0, min_p=0.0) for slot, p in CUT.items()}
    tokens, others = plain_tokens(CUT), plain_tokens(uncut)
    assert all(tokens[slot] != others[slot] for slot in PROMPTS)


@pytest.mark.parametrize(
    ("asked", "alone", "among_ranks"),
    [
        ({}, True, True),
        ({"temperature": 0.0, "seed": 3}, True, True),
        ({"top_k": 20}, True, False),
        ({"top_p": 0.95}, True, False),
        ({"min_p": 0.1}, True, False),
        ({"top_k": 20, "repetition_penalty": 1.1}, True, False),
        ({"logprobs": 0}, True, False),
        ({"prompt_logprobs": 0}, True, False),
        ({"min_tokens": 2}, True, False),
        ({"bad_words": ("a",)}, True, False),
    ],
)
def test_requests_that_it_serves(asked, alone, among_ranks):
    """Of several ranks each has a part of a row's logits, which cannot be cut by itself."""
    step = padded_step(HybridToy(), 0, GREEDY)
    admission = Admission(0, (1,), 0, SamplingParams(**asked))
    assert step.serves(admission) == alone
    ranks = SimpleNamespace(rank=0, size=2)
    assert replace(step, parallel=ranks).serves(admission) == among_ranks


class Noted(TorchDispatchMode):
    """Names of PyTorch's operations; views, empty memory and the interpreter's own are free."""

    FREE = frozenset(
        ("empty", "new_empty", "empty_like", "unbind", "view", "slice", "select", "set_", "copy_")
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Still:
    """A target and a drafter that have answered before they are asked."""

    kv_caches, lookahead_slots, lookahead_tokens = (), 0, 0

    def __init__(self, batch: int, k: int) -> None:
        self.logits = torch.randn(batch * (k + 1), 11, device=DEVICE)
        ones = torch.ones(batch, k + 1, dtype=torch.int64, device=DEVICE)
        self.drafts = Drafts(ones[:, 1:].contiguous(), ones[:, 0].contiguous())

    def forward(self, token_ids, rows, kv):
        return HiddenStates(self.logits, self.logits[:, :0])

    def compute_rank_logits(self, hidden):
        return hidden

    def propose(self, context):
        return self.drafts


@pytest.mark.parametrize("synthetic", [False, True])
@pytest.mark.parametrize("k", [0, 2])
def test_no_kernel_of_pytorch_runs_beside_the_model_and_the_drafter(k, synthetic):
    """Each would cost a captured step the overlap of two launches."""
    step = padded_step(HybridToy(), k, GREEDY)
    still = Still(3, k)
    by_chance = SyntheticJudge(torch.ones(k, device=DEVICE), step.table)
    judge = by_chance if synthetic else judge_and_commit
    step = replace(step, model=still, drafter=still if k else NoDrafter(), judge=judge)
    layout = step.layout(3, 0)
    plan = plan_of([(0, k, 1, 5), (SLOTS, k, 0, 5), (2, k, 1, 5)])
    with Noted() as noted:
        outcome = step.settle(plan, layout, step.windows(plan)).outcome
    assert outcome[:, 0].tolist() == [5, 5, 5]
    assert noted.names - Noted.FREE == set()
