"""The law for a model on two GPUs: graphs or not, any drafter, any company, the same tokens."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from gpu_files import OPTIONS, SIZES, requests
from recorded_gpu import drive

from helpers.checkpoints import head_tensors, write_llama, write_safeailab
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.errors import EngineDeadError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

MAX_TOKENS = 96
# Ranks divide the vocabulary.
SHAPE = SIZES | {"vocab_size": 1536}


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def files(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    head = write_safeailab(
        folder / "head", head_tensors(**SHAPE), **SHAPE | {"num_hidden_layers": 1}
    )
    return {"target": write_target(folder / "target", request.param), "head": head}


def write_target(folder, architecture):
    if architecture == "LlamaForCausalLM":
        return write_llama(folder, **SHAPE)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, initializer_range=0.08, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def engine(files, method, **options):
    speculation = {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3},
        "self": {
            "method": "draft_model",
            "model": str(files["target"]),
            "num_speculative_tokens": 3,
        },
        "eagle3": {
            "method": "eagle3",
            "model": str(files["head"]),
            "num_speculative_tokens": 3,
        },
    }
    return build_engine(
        EngineConfig.from_options(
            model=str(files["target"]),
            speculative_config=speculation[method],
            **OPTIONS | {"tensor_parallel_size": 2} | options,
        )
    )


@pytest.fixture(scope="module")
def truth(files):
    """Every request alone in its batch, plainly, without graphs."""
    core = engine(files, "plain", max_num_seqs=1, enforce_eager=True)
    return drive(core, list(requests(64, MAX_TOKENS))).tokens


@pytest.mark.parametrize(
    ("method", "max_num_seqs", "eager"),
    [
        ("plain", 64, False),
        ("plain", 7, False),
        ("plain", 64, True),
        ("ngram", 64, False),
        ("ngram", 7, True),
        ("self", 64, False),
        ("self", 7, True),
        ("eagle3", 64, False),
        ("eagle3", 1, False),
    ],
)
def test_the_same_tokens(files, truth, method, max_num_seqs, eager):
    count = 12 if max_num_seqs == 1 else 64
    core = engine(files, method, max_num_seqs=max_num_seqs, enforce_eager=eager)
    found = drive(core, list(requests(count, MAX_TOKENS)))
    assert found.tokens == {name: truth[name] for name in found.tokens}
    assert (found.offered > 0) == (method != "plain")
    if method == "self":
        # The draft model runs on one GPU: its logits differ by rounding from the target's.
        assert found.accepted > 0.8 * found.offered


def test_the_tokens_of_one_gpu_are_near(files, truth):
    """Each degree has an arithmetic of its own, and both are the same model's."""
    core = engine(files, "plain", max_num_seqs=64, tensor_parallel_size=1)
    one = drive(core, list(requests(64, MAX_TOKENS))).tokens
    first = [one[name][0] == truth[name][0] for name in truth]
    assert sum(first) > 0.8 * len(first)


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
