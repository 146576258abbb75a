"""The law for a model on two GPUs: graphs or not, any drafter, any batch, the same tokens."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from gpu_files import (
    FOUR_LAYERS,
    HYBRID_SIZES,
    OPTIONS,
    SIZES,
    plain_requests,
    requests,
    write_hybrid_target,
    write_nextn_target,
    write_target,
)
from recorded_gpu import drive
from safetensors.torch import load_file
from test_mamba2_gpu import NANO
from test_mamba2_gpu import write_target as write_nemotron

from helpers.checkpoints import (
    eagle1_tensors,
    head_tensors,
    write_eagle1,
    write_llama,
    write_safeailab,
)
from helpers.hybrids import hybrid_config
from sametoken import LLM
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.errors import EngineDeadError, WeightUpdateError
from sametoken.models.quantize import quantize_checkpoint

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

MAX_TOKENS = 96
# Alone and without graphs a token takes tens of milliseconds.
NUM_ALONE = 6
# Ranks share the KV head, and do not divide the vocabulary evenly.
SHARED = {"num_key_value_heads": 1, "vocab_size": 1501}
SHAPE = SIZES | SHARED
EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
}
HYBRID = HYBRID_SIZES | FOUR_LAYERS | EXPERTS | SHARED


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def files(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    one_layer = SHAPE | {"num_hidden_layers": 1}
    return {
        "target": write_target(folder / "target", request.param, tied=True, **SHAPE),
        "eagle": write_eagle1(folder / "eagle", eagle1_tensors(**SHAPE), **one_layer),
        "eagle3": write_safeailab(folder / "eagle3", head_tensors(**SHAPE), **one_layer),
    }


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def hybrid(request, tmp_path_factory):
    """Dense, and of experts; each holds a multi-token-prediction module."""
    dense = request.param == "qwen3_5"
    sizes = {name: size for name, size in HYBRID.items() if not (dense and "expert" in name)}
    folder = tmp_path_factory.mktemp(request.param)
    return {"target": write_hybrid_target(folder, hybrid_config(request.param, **sizes))}


def speculation(files, method) -> dict | None:
    if method == "plain":
        return None
    if method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
    drafts = {"method": method, "num_speculative_tokens": 3}
    if method == "self":
        return drafts | {"method": "draft_model", "model": str(files["target"])}
    return drafts if method == "mtp" else drafts | {"model": str(files[method])}


def engine(files, method, **options):
    return build_engine(
        EngineConfig.from_options(
            model=str(files["target"]),
            speculative_config=speculation(files, method),
            **OPTIONS | {"tensor_parallel_size": 2} | options,
        )
    )


@pytest.fixture(scope="module")
def truth(files):
    """All requests together, plainly; some of them have the same tokens alone without graphs."""
    core = engine(files, "plain", max_num_seqs=64)
    together = drive(core, list(requests(64, MAX_TOKENS))).tokens
    core = engine(files, "plain", max_num_seqs=1, enforce_eager=True)
    alone = drive(core, list(requests(NUM_ALONE, MAX_TOKENS))).tokens
    assert alone == {name: together[name] for name in alone}
    return together


@pytest.mark.parametrize(
    ("method", "max_num_seqs", "eager"),
    [
        ("plain", 7, False),
        ("plain", 64, True),
        ("ngram", 64, False),
        ("ngram", 7, True),
        ("self", 64, False),
        ("self", 7, True),
        ("eagle3", 64, False),
        ("eagle3", 1, False),
        ("eagle", 64, False),
        ("eagle", 7, True),
    ],
)
def test_the_same_tokens(files, truth, method, max_num_seqs, eager):
    count = 64 if max_num_seqs == 64 else 14
    core = engine(files, method, max_num_seqs=max_num_seqs, enforce_eager=eager)
    found = drive(core, list(requests(count, MAX_TOKENS)))
    assert found.tokens == {name: truth[name] for name in found.tokens}
    assert (found.offered > 0) == (method != "plain")
    if method == "self":
        assert found.accepted > 0.9 * found.offered


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_ranks_divide_a_draft_model_as_its_twin(files, eager):
    core = engine(files, "self", max_num_seqs=8, enforce_eager=eager)
    found = drive(core, plain_requests(24, MAX_TOKENS))
    assert found.accepted == found.offered > 0


@pytest.mark.parametrize("method", ["plain", "ngram", "eagle3"])
def test_copies_by_nccl_have_the_same_tokens(files, truth, method):
    core = engine(files, method, max_num_seqs=64, disable_custom_all_reduce=True)
    assert drive(core, list(requests(64, MAX_TOKENS))).tokens == truth


def test_the_tokens_of_one_gpu_are_near(files, truth):
    """Each degree has an arithmetic of its own, and both are the same model's."""
    core = engine(files, "plain", max_num_seqs=64, tensor_parallel_size=1)
    one = drive(core, list(requests(64, MAX_TOKENS))).tokens
    first = [one[name][0] == truth[name][0] for name in truth]
    assert sum(first) > 0.8 * len(first)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_the_same_tokens_of_hybrids(hybrid, eager):
    items = list(requests(32, MAX_TOKENS))
    few = list(requests(NUM_ALONE, MAX_TOKENS))
    alone = drive(engine(hybrid, "plain", max_num_seqs=1, enforce_eager=True), few).tokens
    plain = drive(engine(hybrid, "plain", max_num_seqs=16, enforce_eager=eager), items).tokens
    assert alone == {name: plain[name] for name in alone}
    for method in ("ngram", "mtp", "self"):
        found = drive(engine(hybrid, method, max_num_seqs=16, enforce_eager=eager), items)
        assert found.tokens == plain
        assert found.offered > 0
    # The last drafts for itself on one GPU: its logits differ by rounding from the target's.
    assert found.accepted > 0.8 * found.offered


def write_other(folder, name: str):
    """Latent attention with NextN, Mamba-2 with MTP, or a Llama in float8 or 4 bits."""
    if name == "latent":
        return write_nextn_target(folder, 20)
    if name == "nemotron":
        return write_nemotron(folder, NANO)
    if name == "shared_group":
        return write_nemotron(folder, NANO | SHARED | {"n_groups": 1})
    copy = folder.with_name(name + "-copy")
    quantize_checkpoint(write_target(folder, "LlamaForCausalLM", **SHAPE), copy, name)
    return copy


@pytest.mark.parametrize("name", ["latent", "nemotron", "shared_group", "fp8-dynamic", "w4a16"])
def test_the_same_tokens_of_other_models(tmp_path, name):
    files = {"target": write_other(tmp_path / name, name)}
    items, few = list(requests(16, MAX_TOKENS)), list(requests(NUM_ALONE, MAX_TOKENS))
    alone = drive(engine(files, "plain", max_num_seqs=1, enforce_eager=True), few).tokens
    plain = drive(engine(files, "plain", max_num_seqs=16), items).tokens
    assert alone == {name: plain[name] for name in alone}
    found = drive(engine(files, "ngram", max_num_seqs=16), items)
    assert found.tokens == plain
    if name in ("latent", "nemotron", "shared_group"):
        found = drive(engine(files, "mtp", max_num_seqs=16), items)
        assert found.tokens == plain
    assert found.offered > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_new_weights_reach_every_rank(tmp_path, device):
    """Under captured graphs, while requests run, and not at all if rank 1 refuses its share."""
    paths = [write_llama(tmp_path / str(seed), seed, **SHAPE) for seed in (0, 1)]
    items = list(requests(16, MAX_TOKENS))
    old, new = (drive(engine({"target": path}, "plain"), items).tokens for path in paths)
    live = LLM.from_engine(engine({"target": paths[0]}, "ngram"), None)
    core = live._engine
    tensors = load_file(paths[1] / "model.safetensors", device=device)
    spoilt = {name: tensor.clone() for name, tensor in tensors.items()}
    spoilt["model.layers.0.mlp.up_proj.weight"][-1] = torch.nan
    with pytest.raises(WeightUpdateError, match="up_proj"):
        live.update_weights(spoilt.items())
    assert drive(core, items).tokens == old
    for item in items:
        core.add_request(item)
    for _ in range(3):
        core.step()
    assert live.update_weights(tensors.items()) == 1
    for item in items:
        core.release(item.request_id, aborted=True)
    while core.has_unfinished:
        core.step()
    assert drive(core, items).tokens == new != old
    live.update_weights(paths[0])
    assert drive(core, items).tokens == old


def test_a_dead_rank_is_seen_while_the_device_waits_for_it(files):
    core = engine(files, "plain", max_num_seqs=8)
    for item in requests(8, MAX_TOKENS):
        core.add_request(item)
    core.step()
    (follower,) = core._runner.ranks.followers
    os.kill(follower.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        drive(core, [])
    assert time.monotonic() - started < 30
