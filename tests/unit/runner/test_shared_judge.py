"""Captured steps of two ranks, as far as an interpreter runs them: the eager verbs' tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.checkpoints import write_llama
from helpers.harness import request, run
from helpers.hybrids import write_hybrid
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
from sametoken.state.recurrent import RecurrentCache
from sametoken.state.recurrent_device import DevicePass
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
SLOTS, CHUNK, K = 2, 8, 2
#: Least tokens of a slot by target: the interpreter takes its time over recurrent state.
LENGTHS = {"llama": 13, "qwen3_next": 9}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs on a CPU; tests/gpu has it on GPUs"
)


HYBRID = SIZES | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": write_llama(folder / "llama", **SIZES),
        "qwen3_next": write_hybrid(folder / "qwen3_next", "qwen3_next", **HYBRID),
    }


def recurrent_cache(model) -> RecurrentCache | None:
    """As a GPU runs it."""
    if model.recurrent_spec is None:
        return None
    cache = RecurrentCache.allocate(
        model.recurrent_spec, max_num_seqs=SLOTS, num_drafts=K, device=CPU
    )
    for held in (cache.states, cache.history, cache.pending_qkv, cache.pending_gates):
        held.fill_(float("nan"))
    return dataclasses.replace(cache, open_pass=DevicePass.begin)


def padded_step(path, parallel, make_judge) -> PaddedStep:
    model = load_model(
        path,
        kernels=ReferenceKernels(),
        dtype=torch.float32,
        device=CPU,
        max_positions=64,
        parallel=parallel,
    )
    kv = KVCache.allocate(
        model.kv_spec, num_blocks=26, block_size=4, device=CPU, recurrent=recurrent_cache(model)
    )
    kv.memory.fill_(float("nan"))
    kv.memory[:, :, -1] = 0
    sequences = Sequences.allocate(
        max_num_seqs=SLOTS,
        # A slot goes on until the other one is done, by up to K + 1 tokens a step.
        max_len=52,
        num_drafts=K,
        block_size=4,
        reserved_block=26,
        device=CPU,
    )
    table = SamplingTable.allocate(SLOTS, CPU)
    for slot, prompt in PROMPTS.items():
        sequences.token_ids[slot, : len(prompt)] = torch.tensor(prompt)
        sequences.num_tokens[slot] = len(prompt)
        sequences.block_table[slot] = torch.arange(13) + 13 * slot
        table.temperature[slot] = TEMPERATURES[slot]
        table.seed[slot] = slot
    own = NgramDrafter(K, 1, 2, lookup) if parallel.rank == 0 else NoDrafter()
    drafter = share_drafter(own, K, parallel)
    return PaddedStep(sequences, model, kv, table, drafter, make_judge(parallel, table), parallel)


def generate(path, parallel, make_judge, length):
    """Tokens by slot, at least so many of each, and how many drafts were accepted."""
    step = padded_step(path, parallel, make_judge)
    layout, done = step.layout(1, CHUNK), dict.fromkeys(PROMPTS, 0)
    for slot, prompt in PROMPTS.items():
        while done[slot] < len(prompt):
            count = min(CHUNK, len(prompt) - done[slot])
            done[slot] += count
            plan = torch.tensor([[slot], [count], [int(done[slot] == len(prompt))], [0]])
            step.settle(plan, layout, step.chunks(plan, layout, CHUNK))
    layout, accepted = step.layout(2, 0), 0
    while min(step.sequences.num_tokens[slot] for slot in PROMPTS) < length:
        plan = torch.tensor([[0, 1], [K, K], [1, 1], [1, 1]])
        accepted += int(step.settle(plan, layout, step.windows(plan)).outcome[:, 2].sum())
    tokens, num_tokens = step.sequences.token_ids, step.sequences.num_tokens
    return {slot: tokens[slot, : num_tokens[slot]].tolist() for slot in PROMPTS}, accepted


def plain_tokens(path, lengths):
    """By the eager verbs of two ranks, one request at a time."""
    config = EngineConfig.from_options(
        model=str(path), device="cpu", max_num_seqs=1, tensor_parallel_size=2
    )
    tokens = {}
    with engine_over_threads(config) as (core, _):
        for slot, prompt in PROMPTS.items():
            count = lengths[slot] - len(prompt)
            item = request("r", prompt, count, temperature=TEMPERATURES[slot], seed=slot)
            tokens[slot] = [*prompt, *run(core, [item]).tokens["r"]]
    return tokens


@pytest.mark.parametrize("kind", LENGTHS)
def test_rank_0_alone_decides_and_says_what_plain_decoding_says(paths, kind):
    """The other rank would accept nothing and say 5 for ever; nobody asks it."""

    def stubborn(parallel, table):
        def inner(keys, x, window):
            verdict = judge(keys, x, window)
            if parallel.rank == 0:
                return verdict
            nothing = torch.zeros_like(verdict.num_accepted)
            return dataclasses.replace(verdict, num_accepted=nothing, next_token=nothing + 5)

        return SharedJudge(inner, parallel)

    path, length = paths[kind], LENGTHS[kind]
    first, second = run_ranks(2, lambda p: generate(path, p, stubborn, length))
    assert first == second
    tokens, accepted = first
    assert tokens == plain_tokens(path, {slot: len(row) for slot, row in tokens.items()})
    assert accepted > 0


def test_drawn_verdicts_are_shared_as_well(paths):
    def drawn(parallel, table):
        rates = torch.full((K,), 0.5)
        return SharedJudge(SyntheticJudge(rates, table).verdict, parallel)

    first, second = run_ranks(2, lambda p: generate(paths["llama"], p, drawn, LENGTHS["llama"]))
    assert first == second
    assert first[1] > 0
