"""Blocks behind a sliding window are free while their request runs, and no token knows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.checkpoints import VOCAB, head_tensors, write_llama, write_speculators
from helpers.harness import ScriptedDrafter, Shape, build, replayed_by, request, run
from helpers.recorded import RecordedLogits
from helpers.toy import ToyModel
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine

WINDOW = 6
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4], [5] * 17, [6, 1], [7, 7, 2, 9, 4, 4, 4]]
SHAPE = Shape(num_blocks=16)


def toy() -> ToyModel:
    return ToyModel(window=WINDOW)


def requests(max_tokens: int = 40):
    return [request(f"r{i}", prompt, max_tokens, seed=i) for i, prompt in enumerate(PROMPTS)]


def oracle(asked, count: int = 60) -> list[int]:
    tokens = list(asked.prompt_token_ids)
    for _ in range(count):
        tokens.append(toy().next_token(tokens[-WINDOW:]))
    return tokens[len(asked.prompt_token_ids) :]


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize("steps_in_flight", [1, 3])
@pytest.mark.parametrize("script", ["right", "mixed"])
def test_requests_share_the_blocks_that_they_no_longer_see(script, steps_in_flight):
    core = build(
        toy(),
        replace(SHAPE, steps_in_flight=steps_in_flight),
        make_drafter=lambda parts: ScriptedDrafter(parts, script),
        oracle=oracle,
    )
    ran = run(core, requests())
    assert ran.tokens == {item.request_id: oracle(item, 40) for item in requests()}
    assert core.scheduler.num_preemptions == 0, "three requests of 14 blocks ran in 16"


@pytest.mark.parametrize("num_host_blocks", [0, 20])
def test_preempted_requests_save_what_they_still_see(num_host_blocks):
    shape = Shape(num_blocks=11, num_host_blocks=num_host_blocks, max_num_seqs=6)
    core = build(toy(), replace(shape, steps_in_flight=2))
    items, replayed = [request(f"r{n}", [n, 3], max_tokens=25) for n in range(6)], replayed_by(core)
    assert run(core, items).tokens == {item.request_id: oracle(item, 25) for item in items}
    assert core.scheduler.num_preemptions
    assert any(replayed) == (num_host_blocks == 0)


@pytest.mark.parametrize("num_idle_host_blocks", [0, 20])
def test_a_chat_hits_what_was_freed_behind_its_window_and_not_taken(num_idle_host_blocks):
    shape = replace(SHAPE, num_host_blocks=30, num_idle_host_blocks=num_idle_host_blocks)
    core, prompt = build(toy(), shape), [3] * 22
    for turn in range(4):
        item = request(f"{turn}", [*prompt, turn], max_tokens=9)
        tokens = run(core, [item]).tokens[item.request_id]
        assert tokens == oracle(item, 9)
        run(core, [request("other", [turn + 4] * 30, max_tokens=20)])
    assert core.scheduler.prefix_cache_hits >= (3 * 20 if num_idle_host_blocks else 20)


@pytest.mark.parametrize("method", [None, "ngram", "eagle3"])
def test_the_bits_of_a_windowed_model_stay_as_they_were(method, tmp_path):
    target = write_llama(
        tmp_path / "target",
        architectures=["MistralForCausalLM"],
        sliding_window=20,
        max_position_embeddings=128,
    )
    spec = {"method": method, "num_speculative_tokens": 3} if method else None
    if method == "eagle3":
        layer = {"layer_types": ["sliding_attention"], "sliding_window": 8}
        aux = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
        spec["model"] = str(write_speculators(tmp_path / "head", head_tensors(), layer, **aux))

    def logits(prompts, **options):
        common = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 4, "device": "cpu"}
        core = build_engine(EngineConfig.from_options(model=str(target), **common | options))
        recorded = RecordedLogits()
        core._runner = recorded.runner(core._runner)
        items = [request(f"r{i}", prompt, 40, seed=i) for i, prompt in enumerate(prompts)]
        return core, run(core, items).tokens, recorded.rows

    prompts = [tuple(i * (n + 3) % VOCAB for i in range(20 + n)) for n in range(4)]
    found, tokens, rows = logits(prompts, num_kv_blocks=48, speculative_config=spec)
    assert found.scheduler.limits.sliding_window == 20
    assert found.scheduler.num_preemptions == 0
    for n, prompt in enumerate(prompts):
        _, alone, expected = logits([prompt], num_kv_blocks=48)
        assert tokens[f"r{n}"] == alone["r0"]
        assert all(torch.equal(rows[key], row) for key, row in expected.items())
