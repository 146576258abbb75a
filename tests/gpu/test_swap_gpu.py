"""KV blocks of a GPU in pinned host memory, and engines that are short of both."""

from __future__ import annotations

import pytest
import torch
from gpu_files import OPTIONS, write_files

from helpers.harness import request, run
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.ops.cache_types import LatentKV, PagedKV
from sametoken.runner.swap import SwapStore
from sametoken.state.caches import ModelCache
from sametoken.types.plan import StepPlan, SwapIn, SwapOut

CACHES = (PagedKV(2, 64, 64, torch.bfloat16), LatentKV(5, 3, torch.float32))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("target"), "Qwen3ForCausalLM")


def test_blocks_come_back_as_they_were():
    cache = ModelCache.allocate(
        CACHES,
        num_blocks=40,
        block_size=16,
        max_num_seqs=2,
        num_drafts=0,
        device=torch.device("cuda"),
    )
    for memory in cache.blocks:
        memory.normal_()
    out, back = tuple(range(0, 39, 2)), tuple(range(1, 40, 2))
    held = [memory[:, list(out)].clone() for memory in cache.blocks]
    store = SwapStore((cache,), 2**24, pinned=True)
    hosts = tuple(range(29, 9, -1))
    assert store.host[0].is_pinned()
    store.move_out(StepPlan(1, swap_outs=(SwapOut(0, out, hosts),)))
    for memory in cache.blocks:
        memory.fill_(float("nan"))
    store.move_in(StepPlan(2, swap_ins=(SwapIn(0, back, hosts),)))
    for memory, saved in zip(cache.blocks, held, strict=True):
        assert torch.equal(memory[:, list(back)], saved)


@pytest.mark.parametrize(
    "options",
    [
        {"swap_space": 0},
        {"swap_space": 1},
        {"swap_space": 1, "kv_offloading_size": 1, "swap_dir": "/tmp"},
    ],
    ids=["replays", "host", "prefixes"],
)
def test_the_same_tokens_with_scarce_memory(files, options):
    def answers(**more):
        common = OPTIONS | {"max_num_seqs": 4, "block_size": 16, "max_model_len": 256}
        core = build_engine(EngineConfig.from_options(model=str(files["target"]), **common | more))
        items = [request(f"r{n}", [n + 3] * (20 + n), 150, seed=n) for n in range(6)]
        first = run(core, items).tokens
        again = [request(f"s{n}", [n + 3] * (20 + n), 150, seed=n) for n in range(6)]
        return core, first | run(core, again).tokens

    _, calm = answers()
    core, scarce = answers(num_kv_blocks=24, **options)
    assert scarce == calm
    assert core.scheduler.num_preemptions
