"""The experts that computed a request's tokens: the same with speculation, and a reference's."""

from __future__ import annotations

import base64
import copy
import io

import httpx
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from helpers.chat_model import save_tokenizer, vocab_size, write_chat_model
from helpers.http_server import TOY_ENGINE, running_server
from sametoken import LLM, SamplingParams
from sametoken.config import EngineConfig
from sametoken.engine.resolve import resolve_extraction
from sametoken.errors import UnsupportedError

LAYERS, TOP_K = 3, 2
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
SAMPLING = {"max_tokens": 20, "temperature": 0.3, "seed": 3, "ignore_eos": True}
PROMPTS = [[1, 2, 3] * 14, [5], [7, 8] * 3]


@pytest.fixture(scope="module")
def theirs():
    """A mixture of six experts in all layers except the first."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size(),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        eos_token_id=None,
        num_experts=6,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=16,
        mlp_only_layers=[0],
        initializer_range=0.4,
    )
    return Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model(theirs, tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("mixture")
    theirs.save_pretrained(path)
    return save_tokenizer(path)


def outputs(model, **options):
    llm = LLM(str(model), **TOY_ENGINE | options, enable_return_routed_experts=True)
    asked = [{"prompt_token_ids": one} for one in PROMPTS]
    made = llm.generate(asked, SamplingParams(**SAMPLING))
    return llm, [one.outputs[0] for one in made]


@torch.inference_mode()
def reference(theirs, token_ids) -> torch.Tensor:
    """[layers with experts, tokens, top_k], sorted."""
    logits = theirs(torch.tensor([token_ids]), output_router_logits=True).router_logits
    return torch.stack([one.topk(TOP_K).indices.sort().values for one in logits])


def test_they_are_those_of_a_reference_router_and_of_no_rejected_draft(theirs, model):
    _, plain = outputs(model)
    for prompt, one in zip(PROMPTS, plain, strict=True):
        found = one.routed_experts
        token_ids = [*prompt, *one.token_ids][:-1]
        assert (found.shape, found.dtype) == ((len(token_ids), LAYERS, TOP_K), np.uint8)
        assert not found[:, 0].any()
        by_layer = torch.from_numpy(np.sort(found[:, 1:])).long().transpose(0, 1)
        assert torch.equal(by_layer, reference(theirs, token_ids))
    # Too few blocks for all: a request is preempted, and its KV is swapped or computed again.
    few = {"num_kv_blocks": 10, "max_num_batched_tokens": 16}
    for options in ({}, few, few | {"swap_space": 0.0}):
        llm, drafted = outputs(model, speculative_config=NGRAM, **options)
        metrics = llm.speculation_metrics
        assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
        assert drafted == plain
        for one, other in zip(drafted, plain, strict=True):
            assert np.array_equal(one.routed_experts, other.routed_experts)


def test_a_stop_inside_a_window_ends_them(model):
    llm, plain = outputs(model, speculative_config=NGRAM)
    params = SamplingParams(**SAMPLING | {"stop_token_ids": [plain[0].token_ids[9]]})
    (request,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params)
    (one,) = request.outputs
    assert one.finish_reason == "stop"
    length = len(PROMPTS[0]) + len(one.token_ids) - 1
    assert np.array_equal(one.routed_experts, plain[0].routed_experts[:length])


def test_an_update_of_the_weights_changes_them(theirs, model, tmp_path):
    other = copy.deepcopy(theirs)
    for tensor in other.parameters():
        tensor.data.mul_(-1.1)
    other.save_pretrained(tmp_path)
    llm, before = outputs(model, speculative_config=NGRAM)
    llm.update_weights(other.state_dict().items())
    asked = [{"prompt_token_ids": one} for one in PROMPTS]
    after = [one.outputs[0] for one in llm.generate(asked, SamplingParams(**SAMPLING))]
    _, expected = outputs(save_tokenizer(tmp_path))
    assert after == expected != before
    for one, right in zip(after, expected, strict=True):
        assert np.array_equal(one.routed_experts, right.routed_experts)


def decoded(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def test_over_http_they_are_a_file_in_base64(model):
    _, plain = outputs(model)
    engine = {"speculative_config": NGRAM, "enable_return_routed_experts": True}
    with (
        running_server(model, engine=engine) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        body = {"prompt": PROMPTS, **SAMPLING}
        choices = http.post("/v1/completions", json=body).json()["choices"]
        for choice, one in zip(choices, plain, strict=True):
            assert np.array_equal(decoded(choice["routed_experts"]), one.routed_experts)
        chat = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 3}
        answer = http.post("/v1/chat/completions", json=chat | {"return_token_ids": True}).json()
        num_tokens = len(answer["prompt_token_ids"]) + len(answer["choices"][0]["token_ids"])
        whole = answer["choices"][0]["routed_experts"]
        assert decoded(whole).shape == (num_tokens - 1, LAYERS, TOP_K)
        streamed = http.post("/v1/chat/completions", json=chat | {"stream": True}).text
        assert streamed.count('"routed_experts"') == 1


@pytest.mark.parametrize(
    ("device", "options", "told"),
    [
        ("cuda", {}, "captured steps of a GPU"),
        ("cpu", {"tensor_parallel_size": 2}, "several ranks"),
        (
            "cpu",
            {
                "speculative_config": {
                    "method": "extract_hidden_states",
                    "shared_storage_path": "/states",
                }
            },
            "extract_hidden_states",
        ),
    ],
)
def test_where_they_cannot_be_recorded_the_option_is_refused(device, options, told):
    config = EngineConfig.from_options(model="m", enable_return_routed_experts=True, **options)
    with pytest.raises(UnsupportedError, match=told):
        resolve_extraction(config, torch.device(device))


def test_a_model_without_experts_is_refused(tmp_path):
    path = write_chat_model(tmp_path / "dense")
    with pytest.raises(UnsupportedError, match="has no experts"):
        LLM(str(path), **TOY_ENGINE, enable_return_routed_experts=True)
