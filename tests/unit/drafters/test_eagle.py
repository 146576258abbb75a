"""Draft heads: what they write and propose, against runs from scratch."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import (
    HIDDEN,
    NO_FC,
    VOCAB,
    eagle1_tensors,
    head_tensors,
    write_checkpoint,
    write_eagle1,
    write_llama,
    write_speculators,
)
from helpers.dense_modules import ERNIE, MIMO, write_module
from helpers.drafting import (
    BLOCK_SIZE,
    CPU,
    MAX_LEN,
    Bench,
    requests_of,
    require_all_accepted,
    require_lookahead_slots,
)
from helpers.hybrids import FULL, hybrid_config, hybrid_tensors, twin_config, twin_tensors
from sametoken.drafters.eagle import EagleDrafter
from sametoken.layers.residual import kept_of
from sametoken.models.base import HiddenStates
from sametoken.models.heads.eagle import Eagle1Checkpoint
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.loader import load_model
from sametoken.ops.backend import AttentionRows
from sametoken.ops.cache_types import PagedKV
from sametoken.ops.reference import ReferenceKernels
from sametoken.state.caches import ModelCache

KERNELS = ReferenceKernels()
OPTIONS = {"kernels": KERNELS, "dtype": torch.float32, "device": CPU, "max_positions": MAX_LEN}
EAGLE1, EAGLE3 = "eagle", "eagle3"


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
            assert int(drafts.num_drafts[b]) == (context.num_wanted if samples else 0)
            made = drafts.draft_ids[b, : int(drafts.num_drafts[b])]
            assert made.tolist() == expected[: context.num_wanted]

    bench.run(steps, vocab, check)
    assert bench.counts.cached


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


def load_both(directory, version: str, seed: int, **flags):
    aux_layers = (1, 2, 4) if version == EAGLE3 else ()
    target = load_model(write_llama(directory / "target", seed), **OPTIONS).keeping(aux_layers)
    if version == EAGLE1:
        head = write_eagle1(directory / "head", eagle1_tensors(seed, **flags))
        return target, Eagle1Checkpoint(head).load(target, **OPTIONS)
    layer = flags.pop("layer", None)
    head = write_speculators(directory / "head", head_tensors(seed, **flags), layer, **flags)
    return target, Eagle3Checkpoint(head).load(target, **OPTIONS)


@pytest.mark.parametrize(
    ("version", "k", "temperature", "flags"),
    [
        (EAGLE1, 1, 0.0, {"own": True}),
        (EAGLE1, 3, 0.0, {"fc_bias": True}),
        (EAGLE1, 4, 0.8, {"num_layers": 2}),
        (EAGLE3, 1, 0.0, {}),
        (EAGLE3, 3, 0.0, {"norm_before_residual": True}),
        (EAGLE3, 4, 0.8, {"norm_before_fc": True, "norm_output": True}),
        (EAGLE3, 3, 0.8, {"eagle_config": NO_FC}),
        (EAGLE3, 3, 0.0, {"layer": {"layer_types": ["sliding_attention"], "sliding_window": 5}}),
    ],
)
def test_kv_and_drafts_are_those_of_a_run_from_scratch(tmp_path, version, k, temperature, flags):
    """To the bit: a rejected row, a stale state or a wrong position would show."""
    target, head = load_both(tmp_path, version, k, **flags)
    bench = head_bench(target, head, k, seed=k, temperature=temperature)
    check_from_scratch(bench, head, steps=18 - 2 * k, vocab=VOCAB)


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize("version", [EAGLE1, EAGLE3])
def test_fewer_drafts_are_the_first_of_all_and_its_kv_is_whole_without_any(tmp_path, version):
    target, head = load_both(tmp_path, version, 3)
    bench = head_bench(target, head, 3, seed=3, num_wanted=(0, 2, None, 1))
    check_from_scratch(bench, head, steps=14, vocab=VOCAB)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("version", [EAGLE1, EAGLE3])
def test_it_writes_no_further_than_it_says(tmp_path, version, k):
    target, head = load_both(tmp_path, version, 1)
    require_lookahead_slots(head_bench(target, head, k, seed=5), 10, VOCAB, k - 2)


class MarkovTarget:
    """A target whose next token is a function of its last one alone: ``successor``."""

    def __init__(self, successor: torch.Tensor) -> None:
        self.caches = (PagedKV(1, 1, 1, torch.float32),)
        self.successor = successor
        self.embedding = KERNELS.pack(torch.eye(len(successor)))
        self.head = KERNELS.pack(torch.eye(len(successor)))

    def forward(self, token_ids, rows, kv, kept=None):
        last = 4.0 * torch.eye(len(self.successor))[self.successor[token_ids]]
        return HiddenStates(kept_of(last, kept), torch.randn(len(token_ids), 3 * HIDDEN))

    def compute_logits(self, hidden):
        return hidden

    def whole_head(self):
        return self.head


def markov_head(directory, target: MarkovTarget, draft_ids: list[int]):
    """A head wired to it: sharp attention to its own row maps the embedding to its successor."""
    tensors = {name: torch.zeros_like(t) for name, t in head_tensors(attention_bias=True).items()}
    layer, eye = "layers.0", torch.eye(HIDDEN)
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(HIDDEN)
    sizes = {"num_key_value_heads": 2, "vocab_size": HIDDEN, "attention_bias": True}
    for name in ("q", "k"):
        tensors[f"{layer}.self_attn.{name}_proj.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
        tensors[f"{layer}.self_attn.{name}_proj.bias"] = torch.full((HIDDEN,), 40.0)
    tensors[f"{layer}.self_attn.v_proj.weight"] = torch.cat((eye, torch.zeros_like(eye)), 1)
    tensors[f"{layer}.self_attn.v_proj.bias"] = torch.zeros(HIDDEN)
    tensors[f"{layer}.self_attn.o_proj.weight"] = eye[target.successor].T
    tensors["lm_head.weight"] = eye[draft_ids]
    tensors["d2t"] = torch.tensor(draft_ids) - torch.arange(len(draft_ids))
    tensors["t2d"] = torch.isin(torch.arange(HIDDEN), torch.tensor(draft_ids))
    settings = {"norm_before_residual": True, "draft_vocab_size": len(draft_ids)}
    write_speculators(directory, tensors, sizes, **settings)
    return Eagle3Checkpoint(directory).load(target, **OPTIONS)


def markov_eagle1(directory, target: MarkovTarget, reads: str):
    """Its first version: ``fc`` alone maps the embedding, or the state, to the successor."""
    tensors = {name: torch.zeros_like(t) for name, t in eagle1_tensors().items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    to_successor = torch.eye(HIDDEN)[target.successor].T
    nothing = torch.zeros_like(to_successor)
    halves = (4.0 * to_successor, nothing) if reads == "embedding" else (nothing, to_successor)
    tensors["fc.weight"] = torch.cat(halves, 1)
    write_eagle1(directory, tensors, vocab_size=HIDDEN)
    return Eagle1Checkpoint(directory).load(target, **OPTIONS)


def accept_everything(target: MarkovTarget, head, temperature: float) -> None:
    bench = head_bench(target, head, 4, seed=7, temperature=temperature, spoil=0.0)
    require_all_accepted(bench, steps=30, vocab=HIDDEN)


@pytest.mark.parametrize(
    ("temperature", "draft_ids"),
    [
        (0.0, [1, 3, 6, 7, 10, 15]),
        (0.0, [10, 3, 15, 1, 7, 6]),
        (0.0, list(range(HIDDEN))),
        (0.8, list(range(HIDDEN))),
    ],
    ids=["greedy-reduced", "greedy-shuffled", "greedy", "sampled"],
)
def test_an_exact_head_is_always_accepted(tmp_path, temperature, draft_ids):
    generator = torch.Generator().manual_seed(2)
    choice = torch.randint(len(draft_ids), (HIDDEN,), generator=generator)
    target = MarkovTarget(torch.tensor(draft_ids)[choice])
    accept_everything(target, markov_head(tmp_path, target, draft_ids), temperature)


@pytest.mark.parametrize(
    ("temperature", "reads"), [(0.0, "embedding"), (0.0, "state"), (0.8, "embedding")]
)
def test_an_exact_head_of_the_first_version_is_always_accepted(tmp_path, temperature, reads):
    target = MarkovTarget(torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(2)))
    accept_everything(target, markov_eagle1(tmp_path, target, reads), temperature)


# The bench keeps no recurrent state: tests/e2e/test_mtp_engine.py has layers with some.
DENSE = {"num_hidden_layers": 3, "layer_types": [FULL] * 3}


def load_module(directory, config: dict, tensors: dict):
    write_checkpoint(directory, config, tensors)
    target = load_model(directory, **OPTIONS)
    return target, MTPCheckpoint(directory).load(target, **OPTIONS)


def load_random(directory, kind: str, seed: int = 0):
    if kind in (ERNIE, MIMO):
        checkpoint = MTPCheckpoint(write_module(directory, kind, seed))
        target = load_model(directory, **OPTIONS).keeping(checkpoint.aux_layers(3))
        return target, checkpoint.load(target, **OPTIONS)
    config = hybrid_config(kind, **DENSE)
    return load_module(directory, config, hybrid_tensors(config, seed))


@pytest.mark.parametrize(
    ("kind", "k", "temperature"),
    [
        ("qwen3_5", 3, 0.8),
        ("qwen3_5", 8, 0.0),
        ("qwen3_next", 2, 0.0),
        (ERNIE, 3, 0.0),
        (MIMO, 3, 0.8),
    ],
)
def test_a_module_s_kv_and_drafts_are_those_of_a_run_from_scratch(tmp_path, kind, k, temperature):
    target, head = load_random(tmp_path, kind, seed=k)
    bench = head_bench(target, head, k, seed=k, temperature=temperature)
    check_from_scratch(bench, head, steps=10, vocab=VOCAB)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_a_module_writes_no_further_than_it_says(tmp_path, k):
    target, head = load_random(tmp_path, "qwen3_5")
    require_lookahead_slots(head_bench(target, head, k, seed=5), 8, VOCAB, k - 2)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.0), (4, 0.8), (8, 0.0)])
def test_a_module_that_is_its_target_s_twin_is_always_accepted(tmp_path, k, temperature):
    config = twin_config(**DENSE)
    target, head = load_module(tmp_path, config, twin_tensors(config, seed=k))
    bench = head_bench(target, head, k, seed=7, temperature=temperature, spoil=0.0, first_token=0)
    require_all_accepted(bench, steps=48 - 4 * k, vocab=VOCAB)
