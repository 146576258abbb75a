"""A rollout server does what verl asks of one, and says what an engine of its weights says."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from helpers.adapters import ATTENTION, write_adapter
from helpers.chat_model import write_chat_model
from helpers.http_server import TOY_ENGINE
from sametoken import LLM, SamplingParams
from sametoken.config import EngineConfig
from sametoken.errors import RequestError
from sametoken.serving.verl.server import RolloutServer

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
PROMPT = [1, 2, 3] * 4
#: As verl's agent loops send them.
SAMPLING = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
SAMPLING |= {"logprobs": True, "seed": 3, "ignore_eos": True}


def offline(path, adapter=None) -> list[int]:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
    modules = {} if adapter is None else {"own": adapter}
    llm = LLM(str(path), **TOY_ENGINE, lora_modules=modules)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, lora_request=adapter and "own")
    return list(output.outputs[0].token_ids)


async def rollouts_around_an_update(server: RolloutServer, paths) -> None:
    """A hybrid step: the trainer has the memory, and then sends its weights."""
    first = await server.answer(PROMPT, SAMPLING, "a")
    assert (first["token_ids"], first["stop_reason"]) == (offline(paths[0]), "completed")
    assert len(first["log_probs"]) == 8
    assert first["extra_fields"]["global_steps"] is None
    with pytest.raises(RequestError, match="no room"):
        await server.answer([1] * 64, SAMPLING, "long")
    await server.sleep()
    await server.wake_up(["weights"])
    await server.update_weights(str(paths[1]), 7)
    await server.wake_up(["kv_cache"])
    second = await server.answer(PROMPT, SAMPLING, "b")
    assert second["token_ids"] == offline(paths[1]) != first["token_ids"]
    assert second["extra_fields"]["global_steps"] == 7


async def held_and_rejected(server: RolloutServer, expected: list[int]) -> None:
    await server.abort_all_requests()
    waiting = asyncio.ensure_future(server.answer(PROMPT, SAMPLING, "c"))
    await server.clear_kv_cache()
    assert not waiting.done()
    await server.resume_generation()
    assert (await waiting)["token_ids"] == expected
    await server.abort_all_requests(reject_request=True)
    rejected = await server.answer(PROMPT, SAMPLING, "d")
    assert (rejected["token_ids"], rejected["stop_reason"]) == ([], "aborted")
    await server.release_kv_cache()
    await server.resume_kv_cache()
    await server.resume_generation()
    assert (await server.answer(PROMPT, SAMPLING, "e"))["token_ids"] == expected


async def ended_by_a_text(server: RolloutServer, path) -> None:
    """Agent loops end a turn by a mark; the tokens that complete it are among the answer's."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
    (output,) = LLM(str(path), **TOY_ENGINE).generate([{"prompt_token_ids": PROMPT}], params)
    mark = output.outputs[0].text[2]
    params = replace(params, stop=[mark])
    (output,) = LLM(str(path), **TOY_ENGINE).generate([{"prompt_token_ids": PROMPT}], params)
    answer = await server.answer(PROMPT, SAMPLING | {"stop": [mark]}, "s")
    assert answer["token_ids"] == list(output.outputs[0].token_ids)
    assert len(answer["token_ids"]) == len(answer["log_probs"]) < 8


async def scored_as_a_teacher(server: RolloutServer, path) -> None:
    """As verl's ``AsyncTeacherLLMServerManager`` asks and reads, by the likeliest tokens or not."""
    llm = LLM(str(path), **TOY_ENGINE)
    for count in (0, 3):
        given = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": count, "detokenize": False}
        scored = (await server.answer(PROMPT, dict(given), "t"))["extra_fields"]
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(**given))
        expected = []
        for at, entry in enumerate(output.prompt_logprobs[1:], 1):
            of_token = {PROMPT[at]: entry[PROMPT[at]]}
            best = sorted(entry.items() if count else of_token.items(), key=lambda one: one[1].rank)
            expected.append([(token, one.logprob) for token, one in best[: max(count, 1)]])
        expected.append([(0, 0.0)] * max(count, 1))
        columns = zip(scored["prompt_ids"], scored["prompt_logprobs"], strict=True)
        assert [[*zip(*row, strict=True)] for row in columns] == expected


async def test_rollouts_updates_and_sleep(tmp_path):
    paths = [write_chat_model(tmp_path / str(seed), seed) for seed in (0, 1)]
    options = TOY_ENGINE | {"speculative_config": NGRAM, "max_model_len": 64}
    config = EngineConfig.from_options(model=str(paths[0]), **options)
    server = RolloutServer(config, "127.0.0.1", lengths=(12, 8), sleeps=True)
    await server.launch_server()
    try:
        await rollouts_around_an_update(server, paths)
        await held_and_rejected(server, offline(paths[1]))
        await ended_by_a_text(server, paths[1])
        await scored_as_a_teacher(server, paths[1])
    finally:
        await server.shutdown()


async def test_the_adapter_of_a_trainer_answers_once_it_came(tmp_path):
    """The weights under it are not sent again, so that they stay through a sleep."""
    path = write_chat_model(tmp_path / "model")
    adapters = [write_adapter(tmp_path / str(i), path, ATTENTION, seed=i) for i in range(2)]
    options = TOY_ENGINE | {"max_model_len": 64, "enable_lora": True, "max_loras": 1}
    config = EngineConfig.from_options(model=str(path), **options)
    server = RolloutServer(config, "127.0.0.1", lengths=(12, 8), sleeps=True)
    await server.launch_server()
    try:
        said = [(await server.answer(PROMPT, SAMPLING, "a"))["token_ids"]]
        for step, adapter in enumerate(adapters):
            await server.sleep()
            await server.wake_up(["weights"])
            await server.update_adapter(str(adapter), step)
            await server.wake_up(["kv_cache"])
            answer = await server.answer(PROMPT, SAMPLING, "b")
            assert answer["extra_fields"]["global_steps"] == step
            said.append(answer["token_ids"])
    finally:
        await server.shutdown()
    assert said == [offline(path), *(offline(path, one) for one in adapters)]
    assert len({tuple(one) for one in said}) == 3
