"""Hybrids of Gated DeltaNet on a GPU: experts' bits, and the law end to end."""

from __future__ import annotations

import functools

import pytest
import torch
from gpu_files import (
    HYBRID_SIZES,
    LONG_NGRAMS,
    OPTIONS,
    plain_requests,
    requests,
    write_hybrid_target,
)
from recorded_gpu import Recording, answer

from helpers.experts import require_experts
from helpers.fast_passes import require_law
from helpers.hybrids import FULL, LINEAR, hybrid_config
from sametoken.config import EngineConfig
from sametoken.drafters import draft_model
from sametoken.drafters.base import Drafts
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.engine.build import build_engine
from sametoken.ops.backend import Routing
from sametoken.ops.model.gated_delta_rule import triton as gated_delta_rule
from sametoken.ops.model.moe_stack import ExpertStack
from sametoken.ops.model.moe_triton import StackedExperts
from sametoken.runner.swap import SwapStore

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


# Kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_experts_say_of_a_row_does_not_depend_on_the_other_rows(dtype):
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=CUDA).to(dtype)

    count, hidden, inner = 32, 2048, 512
    stacked = StackedExperts(
        ExpertStack(random(count, 2 * inner, hidden) / hidden**0.5),
        ExpertStack(random(count, hidden, inner) / inner**0.5),
    )
    x, logits = random(700, hidden), random(700, count)
    require_experts(stacked, x, logits, Routing(8, True), atol=1e-2)


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
    """Right except in one draft in many windows, and of another length in each."""

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

    return {
        "plain": None,
        "ngram": LONG_NGRAMS,
        "self": drafted("target", 3),
        "other": drafted("other", 2),
        "adversary": drafted("target", 7),
        "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    }[method]


def generate(files, method: str, items, **options) -> Recording:
    with pytest.MonkeyPatch.context() as patch:
        if method == "adversary":
            patch.setattr(draft_model, "DraftModelDrafter", Adversary)
        spec = speculation(files, method)
        return answer(files["target"], items, speculative_config=spec, **options)


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


@pytest.mark.parametrize("method", ["plain", "ngram", "other", "adversary", "mtp"])
def test_the_same_tokens_of_prompts_by_chunks(files, method, monkeypatch):
    items, answers = list(requests(24, MAX_TOKENS)), functools.partial(generate, files)
    require_law(monkeypatch, gated_delta_rule, answers, method, items)


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
    items = plain_requests(24, MAX_TOKENS)
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
    items = plain_requests(8, MAX_TOKENS)
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
