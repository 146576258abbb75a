"""The law end to end on a GPU: graphs or not, any drafter, any company, the same tokens.

Random Llama- and Qwen3-shaped targets in bf16, through the engine as a user builds it.
"""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import head_tensors, write_llama, write_safeailab
from helpers.harness import Ran, request
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine

MAX_TOKENS = 96
SIZES = {
    "vocab_size": 1500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
LENGTHS = (1, 5, 16, 17, 63, 64, 65, 130, 300, 513)
OPTIONS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_model_len": 640,
    "prefill_chunk_size": 128,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 2**30,
}


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def files(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    target = write_target(folder / "target", request.param)
    other = write_target(folder / "other", request.param, seed=9)
    head = write_safeailab(
        folder / "head", head_tensors(**SIZES), **SIZES | {"num_hidden_layers": 1}
    )
    return {"target": target, "other": other, "head": head}


def write_target(folder, architecture: str, seed: int = 0):
    if architecture == "LlamaForCausalLM":
        return write_llama(folder, seed=seed, **SIZES)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**SIZES, initializer_range=0.08, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def speculation(files) -> dict[str, dict | None]:
    return {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3},
        "self": {
            "method": "draft_model",
            "model": str(files["target"]),
            "num_speculative_tokens": 3,
        },
        "other": {
            "method": "draft_model",
            "model": str(files["other"]),
            "num_speculative_tokens": 2,
        },
        "eagle3": {
            "method": "eagle3",
            "model": str(files["head"]),
            "num_speculative_tokens": 3,
        },
    }


def requests(count: int):
    """Prompts of all lengths; every third is sampled, every seventh has top-p and penalties."""
    generator = torch.Generator().manual_seed(1)
    for i in range(count):
        length = LENGTHS[i % len(LENGTHS)]
        period = 3 + i % 5
        pattern = torch.randint(0, 1500, (period,), generator=generator).tolist()
        prompt = tuple((pattern * (length // period + 1))[:length])
        params: dict = {"seed": i}
        if i % 3 == 1:
            params["temperature"] = 0.8
        if i % 7 == 5:
            params |= {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2}
        yield request(f"r{i}", prompt, max_tokens=MAX_TOKENS, **params)


def generate(files, method: str, count: int, **options) -> tuple[dict[str, list[int]], Ran]:
    config = EngineConfig.from_options(
        model=str(files["target"]),
        speculative_config=speculation(files)[method],
        **OPTIONS | options,
    )
    core = build_engine(config)
    ran, limits = Ran(), {}
    for item in requests(count):
        core.add_request(item)
        ran.tokens[item.request_id] = []
        limits[item.request_id] = MAX_TOKENS
    while core.has_unfinished:
        for update in core.step():
            ran.offered += update.num_drafts
            ran.accepted += update.num_accepted
            out = ran.tokens[update.request_id]
            out.extend(update.token_ids)
            if len(out) >= MAX_TOKENS:
                del out[MAX_TOKENS:]
                core.release(update.request_id)
    core.scheduler.check_integrity()
    return ran.tokens, ran


@pytest.fixture(scope="module")
def truth(files):
    """Every request alone in its batch, plainly, without graphs."""
    tokens, _ = generate(files, "plain", 64, max_num_seqs=1, enforce_eager=True)
    return tokens


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("max_num_seqs", [1, 7, 64])
@pytest.mark.parametrize("method", ["plain", "ngram", "self", "other", "eagle3"])
def test_the_same_tokens(files, truth, method, max_num_seqs, eager):
    count = 12 if max_num_seqs == 1 else 64
    tokens, ran = generate(files, method, count, max_num_seqs=max_num_seqs, enforce_eager=eager)
    assert tokens == {name: truth[name] for name in tokens}
    if method == "self":
        plain = [item for item in requests(count) if item.params.top_p == 1]
        assert plain
        assert ran.accepted > 0.9 * ran.offered
    elif method != "plain":
        assert ran.offered > 0


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_drafter_that_is_the_target_is_always_right(files, eager):
    """Requests without processing: graph and eager mode both accept every draft."""
    config = EngineConfig.from_options(
        model=str(files["target"]),
        speculative_config=speculation(files)["self"],
        enforce_eager=eager,
        max_num_seqs=8,
        **OPTIONS,
    )
    core = build_engine(config)
    offered = accepted = 0
    left = {}
    for item in requests(24):
        if item.params.top_p == 1:
            core.add_request(item)
            left[item.request_id] = MAX_TOKENS
    while core.has_unfinished:
        for update in core.step():
            offered += update.num_drafts
            accepted += update.num_accepted
            left[update.request_id] -= len(update.token_ids)
            if left[update.request_id] <= 0:
                core.release(update.request_id)
    assert offered > 0
    assert accepted == offered
