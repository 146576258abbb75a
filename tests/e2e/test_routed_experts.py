"""The experts that computed a request's tokens: the same with speculation, and a reference's."""

from __future__ import annotations

import base64
import copy
import io
from dataclasses import dataclass

import httpx
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from helpers.chat_model import save_tokenizer, vocab_size, write_chat_model
from helpers.harness import request
from helpers.http_server import TOY_ENGINE, running_server
from helpers.nemotron import write_twin
from helpers.static_steps import in_steps
from helpers.thread_ranks import engine_over_threads
from sametoken import LLM, SamplingParams
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.core import EngineCore
from sametoken.engine.resolve import resolve_extraction
from sametoken.errors import UnsupportedError
from sametoken.extraction.shards import ExtractedStates
from sametoken.layers import slices

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
        num_key_value_heads=2,
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
    path = tmp_path_factory.mktemp("mixture")
    theirs.save_pretrained(path)
    return save_tokenizer(path)


def outputs(model, steps="compact", **options):
    llm = LLM(str(model), **TOY_ENGINE | options, enable_return_routed_experts=True)
    llm._engine._runner = in_steps(llm._engine._runner, steps)
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


@pytest.mark.parametrize(
    ("steps", "steps_in_flight"), [("static", 1), ("static", 3), ("kernels", 3)]
)
def test_rows_of_padding_and_of_rejected_drafts_are_not_among_them(
    theirs, model, steps, steps_in_flight
):
    """In the shapes of captured steps, whose dead rows are routed too; layers run in slices."""
    options = {"max_num_batched_tokens": 24, "steps_in_flight": steps_in_flight}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SLICE_ROWS", 7)
        llm, drafted = outputs(model, steps, speculative_config=NGRAM, **options)
    metrics = llm.speculation_metrics
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
    for prompt, one in zip(PROMPTS, drafted, strict=True):
        found = torch.from_numpy(np.sort(one.routed_experts[:, 1:])).long().transpose(0, 1)
        assert torch.equal(found, reference(theirs, [*prompt, *one.token_ids][:-1]))


@dataclass
class Recorded:
    """What a core says of requests: their tokens and experts, and drafts accepted."""

    tokens: dict[str, list[int]]
    experts: dict[str, np.ndarray]
    accepted: int


def recorded(core: EngineCore, prompts) -> Recorded:
    """Prompts of any length, each with ten tokens more."""
    tokens, experts, accepted = {}, {}, 0
    for i, prompt in enumerate(prompts):
        core.add_request(request(f"r{i}", prompt, max_tokens=10, temperature=0.4 * i, seed=i))
        tokens[f"r{i}"], experts[f"r{i}"] = [], []
    while core.has_unfinished:
        for update in core.step():
            name = update.request_id
            tokens[name].extend(update.token_ids)
            experts[name].append(update.routed_experts)
            accepted += update.num_accepted
            if len(tokens[name]) >= 10:
                core.release(name)
    whole = {name: np.concatenate(parts) for name, parts in experts.items()}
    for i, prompt in enumerate(prompts):
        del tokens[f"r{i}"][10:]
        whole[f"r{i}"] = whole[f"r{i}"][: len(prompt) + 9]
    return Recorded(tokens, whole, accepted)


def config_of(path, **options) -> EngineConfig:
    sizes = {"max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    memory = {"block_size": 8, "kv_cache_memory_bytes": 2**20, "device": "cpu"}
    asked = {"enable_return_routed_experts": True, "skip_tokenizer_init": True}
    return EngineConfig.from_options(model=str(path), **asked, **sizes, **memory, **options)


@pytest.mark.parametrize(("steps", "steps_in_flight"), [("compact", 1), ("static", 3)])
def test_experts_of_a_drafter_s_module_are_not_among_them(tmp_path, steps, steps_in_flight):
    """The module's are four as well: rows of its own would fit in."""
    path = write_twin(tmp_path, seed=6)
    prompts = [[0, 1, 4], [0, 2, 6, 5, 3, 5, 8, 9], [*range(17)], [0, 7, 7, 7]]
    plain = recorded(build_engine(config_of(path)), prompts)
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    core = build_engine(config_of(path, speculative_config=spec, steps_in_flight=steps_in_flight))
    core._runner = in_steps(core._runner, steps)
    drafted = recorded(core, prompts)
    assert drafted.accepted > 0
    assert drafted.tokens == plain.tokens
    assert {one.shape[1:] for one in plain.experts.values()} == {(4, 2)}
    for name, one in plain.experts.items():
        assert one.any()
        assert np.array_equal(drafted.experts[name], one)


def test_several_ranks_return_those_of_the_first(theirs, model):
    found = {}
    for name, spec in (("plain", None), ("drafted", NGRAM)):
        config = config_of(model, tensor_parallel_size=2, speculative_config=spec)
        with engine_over_threads(config) as (core, _):
            found[name] = recorded(core, PROMPTS)
    plain, drafted = found["plain"], found["drafted"]
    assert drafted.accepted > 0
    assert drafted.tokens == plain.tokens
    for i, prompt in enumerate(PROMPTS):
        one = plain.experts[f"r{i}"]
        assert np.array_equal(drafted.experts[f"r{i}"], one)
        by_layer = torch.from_numpy(np.sort(one[:, 1:])).long().transpose(0, 1)
        assert torch.equal(by_layer, reference(theirs, [*prompt, *plain.tokens[f"r{i}"]][:-1]))


def test_hidden_states_may_be_written_beside_them(model, tmp_path):
    _, plain = outputs(model)
    spec = {"method": "extract_hidden_states", "shared_storage_path": str(tmp_path)}
    _, extracted = outputs(model, speculative_config=spec)
    for one, other in zip(extracted, plain, strict=True):
        assert np.array_equal(one.routed_experts, other.routed_experts)
    states = ExtractedStates(tmp_path)
    lengths = sorted(len(states[i].hidden_states) for i in range(len(states)))
    assert lengths == sorted(len(one.routed_experts) for one in plain)


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


def test_a_gpu_keeps_its_graphs_and_drops_the_prefix_cache():
    config = EngineConfig.from_options(model="m", enable_return_routed_experts=True)
    config, reasons = resolve_extraction(config, torch.device("cuda"))
    assert not config.enforce_eager
    assert not config.enable_prefix_caching
    assert reasons == {"enable_prefix_caching": "off: experts of cached positions are not computed"}


def test_a_model_without_experts_is_refused(tmp_path):
    path = write_chat_model(tmp_path / "dense")
    with pytest.raises(UnsupportedError, match="has no experts"):
        LLM(str(path), **TOY_ENGINE, enable_return_routed_experts=True)
