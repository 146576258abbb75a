"""The law on a GPU over random models and engines: every logit's bits, alone and in a batch.

Sizes for which nobody tuned a kernel, formats, adapters and options by chance: which forms of a
kernel a row meets depends on them. Where there are two GPUs, some models are divided.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from recorded_gpu import Recording, record

from helpers.adapters import write_adapter
from helpers.drawn_models import DRAWN, HYBRIDS, WITH_FAST_PROMPTS, write_drawn
from helpers.harness import request
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.models.quantize import SCHEMES, quantize_checkpoint

LENGTHS = (1, 2, 5, 16, 17, 63, 64, 65, 129, 300, 511, 513, 700, 1200)
MAX_TOKENS, COUNT = 24, 8


@pytest.mark.parametrize("name", DRAWN)
# No shrinking: an example takes three engines.
@settings(max_examples=2, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_every_logit_has_the_bits_that_it_has_alone(name, data):
    draw = data.draw
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        vocab_size = write_drawn(draw, path, name)
        shared = target_options(draw, name, path)
        items = list(drawn_requests(draw, vocab_size, "lora_modules" in shared))
        if torch.cuda.device_count() > 1 and draw(st.booleans()):
            shared["tensor_parallel_size"] = 2
        try:
            truth = record(items, **shared, max_num_seqs=1, enforce_eager=True)
        except ConfigError:  # Two ranks do not divide it.
            assert shared.pop("tensor_parallel_size", 1) == 2
            truth = record(items, **shared, max_num_seqs=1, enforce_eager=True)
        for spec in (None, drafts(draw, name, shared["model"])):
            found = record(items, **shared, **engine_options(draw), speculative_config=spec)
            require_equal(found, truth)
            assert spec is None or spec["method"] != "draft_model" or found.accepted > 0


def target_options(draw, name: str, path: Path) -> dict:
    """What may change a request's bits: formats of weights and KV, adapters, the fast form."""
    dtype = draw(st.sampled_from(["bfloat16"] * 5 + ["float32"]))
    options = {"device": "auto", "dtype": dtype, "max_model_len": 1400, "model": str(path)}
    if dtype == "bfloat16" and (scheme := draw(st.sampled_from([None, None, *SCHEMES]))):
        quantized = path.with_name("quantized")
        try:
            quantize_checkpoint(path, quantized, scheme)
            options["model"] = str(quantized)
        except UnsupportedError:  # No matrix of the model has a width for groups.
            assert scheme == "w4a16"
    if name in WITH_FAST_PROMPTS:
        options["fast_prompts_from"] = draw(st.sampled_from([0, 0, 64, 100]))
    elif draw(st.integers(0, 3)) == 0:
        modules = draw(st.sampled_from([("q_proj", "o_proj"), ("k_proj", "v_proj", "qkv_proj")]))
        adapter = write_adapter(path.with_name("adapter"), path, modules, rank=8)
        options["lora_modules"] = {"own": str(adapter)}
    if draw(st.booleans()):
        options["kv_cache_dtype"] = draw(st.sampled_from(["auto", "fp8"]))
    return options | {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**27}


def engine_options(draw) -> dict:
    """What must not."""
    return {
        "max_num_seqs": draw(st.sampled_from([2, 5, 8])),
        "block_size": draw(st.sampled_from([16, 32, 64])),
        "prefill_chunk_size": draw(st.sampled_from([0, 64, 128])),
        "max_num_batched_tokens": draw(st.sampled_from([400, 700, 1100])),
    }


def drafts(draw, name: str, model: str) -> dict:
    """Of a drafter that agrees with the target, or of one that seldom does."""
    itself = {"method": "draft_model", "model": model}
    own_module = [{"method": "mtp"}] if name in HYBRIDS else []
    methods = [{"method": "ngram", "prompt_lookup_min": 1}, itself, *own_module]
    count = {"num_speculative_tokens": draw(st.integers(1, 6)), "draft_limits": "fixed"}
    return draw(st.sampled_from(methods)) | count


def drawn_requests(draw, vocab_size: int, with_adapter: bool):
    """Different prompts of random or repeated tokens, greedy or sampled."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    for index in range(COUNT):
        length, period = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from([1, 3, 7, 1400]))
        pattern = torch.randint(vocab_size, (period,), generator=generator)
        prompt = pattern.repeat(length // period + 1)[:length]
        # The last one tells prompts apart.
        prompt[-1] = index
        params = {"seed": index, "temperature": draw(st.sampled_from([0.0, 0.0, 0.9]))}
        item = request(f"r{index}", tuple(prompt.tolist()), MAX_TOKENS, **params)
        yield replace(item, adapter=index % 2) if with_adapter else item


def require_equal(found: Recording, truth: Recording) -> None:
    assert found.tokens == truth.tokens
    assert found.rows.keys() == truth.rows.keys()
    other = [at for at, logits in found.rows.items() if not torch.equal(logits, truth.rows[at])]
    assert not other, [(len(prompt), position) for prompt, position in other]
