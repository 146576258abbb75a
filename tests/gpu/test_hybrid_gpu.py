"""Hybrids on a GPU at the real head shape: kernels' bits, and the law end to end.

32 value heads over 16 key heads, 128 x 128 each. The reference of every kernel is the row by
row form in PyTorch.
"""

from __future__ import annotations

import functools

import pytest
import torch
from gpu_files import HYBRID_SIZES, OPTIONS, requests, write_hybrid_target
from recorded_gpu import Recording, drive

from helpers.hybrids import FULL, LINEAR, hybrid_config
from helpers.recurrent import Slots
from helpers.rows import runs_of
from sametoken.config import EngineConfig
from sametoken.drafters import draft_model
from sametoken.drafters.base import Drafts
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.engine.build import build_engine
from sametoken.ops.backend import (
    AttentionRows,
    Routing,
    RowRuns,
)
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model import moe as experts_reference
from sametoken.ops.model import moe_triton as experts
from sametoken.ops.model.gated_delta_rule.rule import (
    GatedDelta,
    GatedDeltaParams,
)
from sametoken.ops.model.moe_gate_triton import moe_gate
from sametoken.ops.model.moe_triton import StackedExperts
from sametoken.ops.model.recurrent.row_by_row import RowByRowPass
from sametoken.ops.model.recurrent.triton import TritonPass
from sametoken.ops.reference import PlainWeight
from sametoken.runner.swap import SwapStore

HEADS = {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 128, "value_dim": 128}
RULE, NUM_LAYERS, DTYPE = GatedDelta(**HEADS, conv_kernel=4), 2, torch.bfloat16
SIZES = HYBRID_SIZES
SPARSE = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
}
MAX_TOKENS = 96
VOCABULARY = SIZES["vocab_size"]
CUDA = torch.device("cuda")
KEPT = ("states", "history")


# Kernels


def layer_params(layer: int) -> GatedDeltaParams:
    generator = torch.Generator("cuda").manual_seed(layer)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=CUDA).to(dtype)

    heads = RULE.num_value_heads
    weight = random(RULE.conv_kernel, RULE.conv_channels, dtype=DTYPE)
    # A slow decay: what was folded once is seen for long.
    return GatedDeltaParams(RULE, random(heads) - 3, random(heads), weight, None)


WIDTHS = (RULE.conv_channels, RULE.out_features, *RULE.gate_sizes)


@functools.cache
def projections() -> torch.Tensor:
    """[q | k | v | z | b | a] of every token."""
    generator = torch.Generator("cuda").manual_seed(5)
    return torch.randn(64, sum(WIDTHS), generator=generator, device=CUDA).bfloat16()


def raw_rows(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    qkv, _, b, a = projections()[tokens].split(WIDTHS, dim=-1)
    return qkv, a, b


def poisoned(num_seqs: int, num_drafts: int, begin_pass=TritonPass.begin) -> Slots:
    return Slots(
        Recurrent(RULE, DTYPE),
        num_drafts,
        num_slots=num_seqs,
        num_layers=NUM_LAYERS,
        begin_pass=begin_pass,
        device=CUDA,
    )


def run(
    cache: Slots,
    rows: list[tuple[int, int, int, bool] | None],
    runs: RowRuns | None = None,
):
    """One pass of (slot, position, token, committed) rows, None where dead: [L, T, Hv * Dv].

    By default all are one run.
    """
    reserved = (cache.position.shape[0] - 1, 0, 0, False)
    facts = torch.tensor([row or reserved for row in rows], device=CUDA).t().contiguous()
    slots, positions, tokens, committed = facts.unbind(0)
    runs = runs or RowRuns.even(1, len(rows))
    at = AttentionRows(positions, slots, slots, slots[None], runs, committed.bool())
    running = cache.begin(at)
    raw = raw_rows(tokens)
    out = torch.stack([cache.run(running, i, layer_params(i), *raw) for i in range(NUM_LAYERS)])
    running.finish()
    return out


@pytest.fixture(scope="module")
def sequence():
    """Tokens, their outputs row by row, and the cache after the last."""
    tokens = torch.randint(0, 64, (150,), generator=torch.Generator().manual_seed(2)).tolist()
    cache = poisoned(1, 0)
    out = [run(cache, [(0, p, token, True)]) for p, token in enumerate(tokens)]
    return tokens, torch.cat(out, dim=1), cache


def test_rows_are_those_of_the_reference(sequence):
    tokens, out, cache = sequence
    oracle = poisoned(1, 0, RowByRowPass.begin)
    expected = run(oracle, [(0, p, token, True) for p, token in enumerate(tokens)])
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(cache.states[:, 0], oracle.states[:, 0], rtol=1e-3, atol=1e-4)
    assert torch.equal(cache.history[:, 0], oracle.history[:, 0])


@pytest.mark.parametrize("chunk", [3, 64, 128])
@pytest.mark.parametrize("padded", [False, True])
def test_chunks_have_the_bits_of_single_rows(sequence, chunk, padded):
    tokens, expected, plain = sequence
    cache = poisoned(3, 4)
    for first in range(0, len(tokens), chunk):
        part = [(2, first + i, token, True) for i, token in enumerate(tokens[first:][:chunk])]
        dead = [None] * (chunk - len(part) if padded else 0)
        out = run(cache, [*part, *dead])
        assert torch.equal(out[:, : len(part)], expected[:, first : first + len(part)])
        assert not out[:, len(part) :].any()
    for name in KEPT:
        assert torch.equal(getattr(cache, name)[:, 2], getattr(plain, name)[:, 0])


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("k", [1, 3, 16])
def test_windows_have_the_bits_of_single_rows(sequence, batch, k):
    """Every slot accepts other numbers of drafts; some windows are short, some skip a step."""
    tokens, expected, plain = sequence
    cache, generator = poisoned(batch, k), torch.Generator().manual_seed(batch + k)

    def below(stop: int) -> int:
        return int(torch.randint(0, stop, (1,), generator=generator))

    done = [0] * batch
    for step in range(200):
        if done == [len(tokens)] * batch:
            break
        rows, windows = [], []
        for slot in range(batch):
            n, left = done[slot], len(tokens) - done[slot]
            # The last row stands alone, so that in the end all is folded.
            if left == 0 or (batch > 1 and (slot + step) % 5 == 0):
                rows += [None] * (k + 1)
                continue
            drafts = min(below(k + 1), max(left - 2, 0))
            good = below(drafts + 1)
            ids = [tokens[n], *tokens[n + 1 : n + 1 + good], *[63] * (drafts - good)]
            own = [(slot, n + i, token, i == 0) for i, token in enumerate(ids)]
            windows.append((len(rows), n, good))
            rows += [*own, *[None] * (k - drafts)]
            done[slot] = n + 1 + good
        out = run(cache, rows, RowRuns.even(batch, k + 1))
        for at, n, good in windows:
            assert torch.equal(out[:, at : at + good + 1], expected[:, n : n + good + 1])
    assert done == [len(tokens)] * batch
    for slot in range(batch):
        for name in KEPT:
            assert torch.equal(getattr(cache, name)[:, slot], getattr(plain, name)[:, 0])


def test_ragged_runs_have_the_bits_of_single_rows(sequence):
    """Windows and a prompt's chunk in one pass, dead rows behind some, none of others."""
    tokens, expected, plain = sequence
    cache, done = poisoned(3, 4), [0, 0, 0]
    for counts in ((1, 3, 70), (5, 0, 17), (144, 147, 63)):
        rows, places = [], []
        lengths = [count + dead for count, dead in zip(counts, (0, 2, 1), strict=True)]
        for slot, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            first = done[slot]
            places.append((len(rows), first, count))
            rows += [(slot, p, tokens[p], True) for p in range(first, first + count)]
            rows += [None] * (length - count)
            done[slot] += count
        out = run(cache, [*rows, None], runs_of(lengths, 2, "cuda"))
        for at, first, count in places:
            assert torch.equal(out[:, at : at + count], expected[:, first : first + count])
    for slot in range(3):
        for name in KEPT:
            assert torch.equal(getattr(cache, name)[:, slot], getattr(plain, name)[:, 0])


def test_a_captured_pass_has_the_bits_of_an_eager_one(sequence):
    """The graph reads counts, positions and rows when it is replayed."""
    tokens, expected, _ = sequence
    cache, width = poisoned(2, 3), 4
    facts = torch.tensor([[2, 0, 0, 0]] * 2 * width, device=CUDA).t().contiguous()
    slots, positions, ids, committed = facts.unbind(0)

    def passed() -> torch.Tensor:
        even = RowRuns.even(2, width)
        at = AttentionRows(positions, slots, slots, slots[None], even, committed.bool())
        running, raw = cache.begin(at), raw_rows(ids)
        out = torch.stack([cache.run(running, i, params, *raw) for i, params in enumerate(weights)])
        running.finish()
        return out

    weights = [layer_params(i) for i in range(NUM_LAYERS)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        passed()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = passed()
    position, drafted = 0, 0
    while position + width <= len(tokens):
        good = drafted % width
        window = [tokens[position], *tokens[position + 1 : position + 1 + good]]
        rows = [(1, position + i, token, i == 0) for i, token in enumerate(window)]
        rows += [(2, 0, 0, False)] * (2 * width - len(rows))
        facts.copy_(torch.tensor(rows, device=CUDA).t())
        graph.replay()
        assert torch.equal(out[:, : good + 1], expected[:, position : position + good + 1])
        assert not out[:, good + 1 :].any()
        position, drafted = position + good + 1, drafted + 1
    assert cache.states[:, 2].isnan().all(), "the reserved slot has been written"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_experts_say_of_a_row_does_not_depend_on_the_other_rows(dtype):
    """Over both sizes of tiles, and whatever an expert is chosen by."""
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=CUDA).to(dtype)

    count, hidden, inner = 32, 2048, 512
    stacked = StackedExperts(
        random(count, 2 * inner, hidden) / hidden**0.5, random(count, hidden, inner) / inner**0.5
    )
    x, logits = random(700, hidden), random(700, count)
    chosen, weights = moe_gate(logits, Routing(8, True))
    whole = experts.moe_forward(x, stacked, chosen, weights)
    separate = experts_reference.SeparateExperts(
        *([PlainWeight(one) for one in each] for each in (stacked.gate_up, stacked.down))
    )
    expected = separate(x[:9], chosen[:9], weights[:9])
    torch.testing.assert_close(whole[:9], expected, rtol=2e-2, atol=1e-2)
    for rows in (1, 2, 17, 64, 256, 257):
        ids, parts = moe_gate(logits[:rows].clone(), Routing(8, True))
        assert torch.equal(ids, chosen[:rows])
        assert torch.equal(parts, weights[:rows])
        assert torch.equal(experts.moe_forward(x[:rows].clone(), stacked, ids, parts), whole[:rows])


# Engines


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target with its MTP module, and a hybrid draft model that disagrees with it."""
    return write_files(tmp_path_factory.mktemp("hybrid"), hybrid_config("qwen3_5", **SIZES))


@pytest.fixture(scope="module")
def sparse_files(tmp_path_factory):
    """The same with mixtures of experts, and projections interleaved by head."""
    config = hybrid_config("qwen3_next", **SIZES | SPARSE)
    return write_files(tmp_path_factory.mktemp("sparse"), config)


def write_files(folder, config: dict) -> dict:
    seeds = {"target": 0, "other": 9}
    return {name: write_hybrid_target(folder / name, config, seed) for name, seed in seeds.items()}


class Adversary(DraftModelDrafter):
    """Right but for one draft in many windows, and of another length in each."""

    def propose(self, context) -> Drafts:
        drafts = super().propose(context)
        k = context.num_speculative_tokens
        place = torch.arange(k, device=CUDA)
        spoilt = place == (context.num_tokens % (k + 2))[:, None]
        wrong = (drafts.draft_ids + 1) % VOCABULARY
        return Drafts(
            torch.where(spoilt, wrong, drafts.draft_ids),
            torch.minimum(drafts.num_drafts, context.num_tokens % (k + 1)),
        )


def speculation(files, method: str) -> dict | None:
    def drafted(name: str, k: int) -> dict:
        return {"method": "draft_model", "model": str(files[name]), "num_speculative_tokens": k}

    # Adaptive limits may withhold every draft on random weights, whose matches end at once.
    ngram = {"method": "ngram", "num_speculative_tokens": 64, "draft_limits": "fixed"}
    return {
        "plain": None,
        "ngram": ngram | {"prompt_lookup_max": 10, "prompt_lookup_min": 1},
        "self": drafted("target", 3),
        "other": drafted("other", 2),
        "adversary": drafted("target", 7),
        "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    }[method]


def generate(files, method: str, items, **options) -> Recording:
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        if method == "adversary":
            patched.setattr(draft_model, "DraftModelDrafter", Adversary)
        core = build_engine(
            EngineConfig.from_options(
                model=str(files["target"]),
                speculative_config=speculation(files, method),
                **OPTIONS | options,
            )
        )
    return drive(core, items)


@pytest.fixture(scope="module")
def truth(files):
    """Every request alone in its batch, plainly, without graphs."""
    items = list(requests(32, MAX_TOKENS))
    return generate(files, "plain", items, max_num_seqs=1, enforce_eager=True).tokens


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 32])
@pytest.mark.parametrize("method", ["plain", "ngram", "self", "other", "adversary", "mtp"])
def test_the_same_tokens(files, truth, method, max_num_seqs, eager):
    items = list(requests(6 if max_num_seqs == 1 else 32, MAX_TOKENS))
    ran = generate(files, method, items, max_num_seqs=max_num_seqs, enforce_eager=eager)
    assert ran.tokens == {name: truth[name] for name in ran.tokens}
    if method == "plain":
        return
    assert ran.offered > 0
    if method == "adversary":
        assert 0 < ran.accepted < ran.offered


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_the_same_tokens_of_experts(sparse_files, eager):
    items = list(requests(16, MAX_TOKENS))
    alone = generate(sparse_files, "plain", items, max_num_seqs=1, enforce_eager=True)
    for method in ("plain", "ngram", "self", "mtp"):
        ran = generate(sparse_files, method, items, max_num_seqs=16, enforce_eager=eager)
        assert ran.tokens == alone.tokens
        assert method == "plain" or ran.offered > 0


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_prompt_of_several_chunks_alone(sparse_files, eager):
    """All rows of a chunk but the last only catch up: none is left for the module's experts."""
    item = next(item for item in requests(16, 8) if len(item.prompt_token_ids) > 256)
    plain, ran = (
        generate(sparse_files, method, [item], max_num_seqs=1, enforce_eager=eager)
        for method in ("plain", "mtp")
    )
    assert ran.tokens == plain.tokens
    assert ran.offered > 0


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_hybrid_that_drafts_for_itself_is_always_right(files, eager):
    """Requests without processing; losslessness alone would not notice a broken drafter."""
    items = [item for item in requests(24, MAX_TOKENS) if item.params.top_p == 1]
    ran = generate(files, "self", items, max_num_seqs=8, enforce_eager=eager)
    assert ran.accepted == ran.offered > 0


def test_preempted_requests_go_on_from_the_state_of_their_slot(files, truth, monkeypatch):
    saved, save = [], SwapStore._save

    def watched(store, swap):
        saved.append(swap)
        save(store, swap)

    monkeypatch.setattr(SwapStore, "_save", watched)
    items = list(requests(12, MAX_TOKENS))
    scarce = {"num_kv_blocks": 24, "block_size": 64, "max_num_seqs": 12}
    for method in ("plain", "ngram", "self"):
        ran = generate(files, method, items, **scarce)
        assert ran.tokens == {item.request_id: truth[item.request_id] for item in items}
        assert saved, "nothing was preempted"
        saved.clear()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("method", ["plain", "ngram", "self"])
def test_no_step_waits_for_the_device(files, method):
    core = build_engine(
        EngineConfig.from_options(
            model=str(files["target"]),
            speculative_config=speculation(files, method),
            max_num_seqs=4,
            **OPTIONS,
        )
    )
    items = [item for item in requests(8, MAX_TOKENS) if item.params.top_p == 1]
    left = {item.request_id: MAX_TOKENS for item in items}
    for item in items:
        core.add_request(item)
    while core.has_unfinished:
        try:
            torch.cuda.set_sync_debug_mode("error")
            updates = core.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for update in updates:
            left[update.request_id] -= len(update.token_ids)
            if left[update.request_id] <= 0:
                core.release(update.request_id)
    assert max(left.values()) <= 0
