"""Captured steps of two ranks, as far as an interpreter runs them: the eager verbs' tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.checkpoints import write_llama
from helpers.harness import request, run
from helpers.thread_ranks import engine_over_threads, run_ranks
from sametoken.config import EngineConfig
from sametoken.drafters.base import NoDrafter
from sametoken.drafters.ngram import NgramDrafter
from sametoken.drafters.shared import share_drafter
from sametoken.kernels.ngram.triton import lookup
from sametoken.kernels.reference import ReferenceKernels
from sametoken.models.loader import load_model
from sametoken.runner.padded import PaddedStep
from sametoken.runner.shared_judge import SharedJudge
from sametoken.runner.synthetic import SyntheticJudge
from sametoken.state.kv_cache import KVCache
from sametoken.state.padded import judge
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
PROMPTS = {0: [3, 1, 4, 3, 1, 4, 3], 1: [7, 8, 7]}
TEMPERATURES = {0: 0.0, 1: 0.7}
SLOTS, CHUNK, LENGTH, K = 2, 8, 13, 2

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs on a CPU; tests/gpu has it on GPUs"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("model"), **SIZES)


def padded_step(path, parallel, make_judge) -> PaddedStep:
    model = load_model(
        path,
        kernels=ReferenceKernels(),
        dtype=torch.float32,
        device=CPU,
        max_positions=64,
        parallel=parallel,
    )
    kv = KVCache.allocate(model.kv_spec, num_blocks=20, block_size=4, device=CPU)
    kv.memory.fill_(float("nan"))
    kv.memory[:, :, -1] = 0
    sequences = Sequences.allocate(
        max_num_seqs=SLOTS,
        max_len=2 * LENGTH,
        num_drafts=K,
        block_size=4,
        reserved_block=20,
        device=CPU,
    )
    table = SamplingTable.allocate(SLOTS, CPU)
    for slot, prompt in PROMPTS.items():
        sequences.token_ids[slot, : len(prompt)] = torch.tensor(prompt)
        sequences.num_tokens[slot] = len(prompt)
        sequences.block_table[slot] = torch.arange(7) + 7 * slot
        table.temperature[slot] = TEMPERATURES[slot]
        table.seed[slot] = slot
    own = NgramDrafter(K, 1, 2, lookup) if parallel.rank == 0 else NoDrafter()
    drafter = share_drafter(own, K, parallel)
    return PaddedStep(sequences, model, kv, table, drafter, make_judge(parallel, table), parallel)


def generate(path, parallel, make_judge):
    """Tokens by slot, and how many drafts were accepted."""
    step = padded_step(path, parallel, make_judge)
    layout, done = step.layout(1, CHUNK), dict.fromkeys(PROMPTS, 0)
    for slot, prompt in PROMPTS.items():
        while done[slot] < len(prompt):
            count = min(CHUNK, len(prompt) - done[slot])
            done[slot] += count
            plan = torch.tensor([[slot], [count], [int(done[slot] == len(prompt))], [0]])
            step.chunks(plan, layout, CHUNK)
    layout, accepted = step.layout(2, 0), 0
    while min(step.sequences.num_tokens[slot] for slot in PROMPTS) < LENGTH:
        plan = torch.tensor([[0, 1], [K, K], [1, 1], [1, 1]])
        accepted += int(step.windows(plan, layout)[:, 2].sum())
    tokens = step.sequences.token_ids
    return {slot: tokens[slot, :LENGTH].tolist() for slot in PROMPTS}, accepted


@pytest.fixture(scope="module")
def plain_tokens(path):
    """By the eager verbs of two ranks, one request at a time."""
    config = EngineConfig.from_options(
        model=str(path), device="cpu", max_num_seqs=1, tensor_parallel_size=2
    )
    tokens = {}
    with engine_over_threads(config) as (core, _):
        for slot, prompt in PROMPTS.items():
            count = LENGTH - len(prompt)
            item = request("r", prompt, count, temperature=TEMPERATURES[slot], seed=slot)
            tokens[slot] = [*prompt, *run(core, [item]).tokens["r"]]
    return tokens


def test_rank_0_alone_decides_and_says_what_plain_decoding_says(path, plain_tokens):
    """The other rank would accept nothing and say 5 for ever; nobody asks it."""

    def stubborn(parallel, table):
        def inner(keys, x, window):
            verdict = judge(keys, x, window)
            if parallel.rank == 0:
                return verdict
            nothing = torch.zeros_like(verdict.num_accepted)
            return dataclasses.replace(verdict, num_accepted=nothing, next_token=nothing + 5)

        return SharedJudge(inner, parallel)

    for tokens, accepted in run_ranks(2, lambda p: generate(path, p, stubborn)):
        assert tokens == plain_tokens
        assert accepted > 0


def test_drawn_verdicts_are_shared_as_well(path):
    def drawn(parallel, table):
        rates = torch.full((K,), 0.5)
        return SharedJudge(SyntheticJudge(rates, table).verdict, parallel)

    first, second = run_ranks(2, lambda p: generate(path, p, drawn))
    assert first == second
    assert first[1] > 0
