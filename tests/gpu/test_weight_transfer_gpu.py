"""Weights from a trainer on one GPU to an engine on another, by NCCL."""

from __future__ import annotations

import json

import httpx
import pytest
import torch
from gpu_files import OPTIONS, write_target
from safetensors.torch import load_file

from helpers.http_server import running_server
from sametoken import LLM, SamplingParams
from sametoken.serving.weight_sender import WeightSender

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PROMPTS = [[i + 1, i + 2, i + 3] * 5 for i in range(8)]
SAMPLING = {"max_tokens": 48, "temperature": 0.8, "seed": 3, "ignore_eos": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
ENGINE = OPTIONS | {"skip_tokenizer_init": True, "max_num_seqs": 8}
#: In place of the toy's.
SERVED = {"num_kv_blocks": None, "block_size": 0, "speculative_config": NGRAM}


def offline(path) -> list[tuple[int, ...]]:
    params = SamplingParams(**SAMPLING, detokenize=False)
    prompts = [{"prompt_token_ids": one} for one in PROMPTS]
    outputs = LLM(str(path), **ENGINE).generate(prompts, params)
    return [one.outputs[0].token_ids for one in outputs]


def test_a_server_takes_a_trainer_s_weights(tmp_path):
    models = [write_target(tmp_path / str(i), "LlamaForCausalLM", i) for i in range(2)]
    said = [offline(path) for path in models]
    config = json.dumps({"backend": "nccl", "timeout": 60.0})
    with (
        running_server(models[0], engine=ENGINE | SERVED, weight_transfer_config=config) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
        torch.cuda.device(1),
    ):
        sender = WeightSender([server.url], backend="nccl", timeout_s=60)

        def answers() -> list[tuple[int, ...]]:
            found = []
            for prompt in PROMPTS:
                body = {"prompt": prompt, "return_token_ids": True, **SAMPLING}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                found.append(tuple(answer.json()["choices"][0]["token_ids"]))
            return found

        assert answers() == said[0]
        for version, which in ((5, 1), (6, 0), (7, 1)):
            weights = load_file(models[which] / "model.safetensors", device="cuda:1")
            sender.send(weights.items(), version)
            assert answers() == said[which]
            info = client.get("/weight_info").json()
            assert info == {"weight_version": str(version)}
