"""Logits of the engine in bf16 on a GPU against the model in fp32 on a CPU.

The bound. bf16 keeps 8 bits, so a rounding errs by at most 2**-9 of a value. A layer rounds
about ten times on the way to the residual stream (norm, q k v, attention, output, sum; norm,
gate and up, their product, down, sum), on values as large as what it adds there. The errors are
independent, so L layers, the embedding and the final norm leave sqrt(10 * L + 2) * 2**-9 of the
logits' norm if later layers pass on what they are given. They may enlarge it, and weights that
were not bf16 are rounded as well: twice that is allowed over all rows, and twice again in one
row. One wrong token in the context is at least ten times as much.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from gpu_files import OPTIONS, SIZES, plain_requests, speculation, write_files
from recorded_gpu import record

from helpers.forward import CPU, Bench
from helpers.harness import request
from sametoken.models.loader import load_model
from sametoken.ops.dispatch import select_kernels

MAX_TOKENS = 32
MAX_LEN = 640
SMOLLM2 = os.environ.get("SAMETOKEN_SMOLLM2")
# In SmolLM2's chat format, a question about the colour of the sky.
QUESTION = "1 4093 198 4898 314 260 6376 4461 47 19842 281 827 8545 30 2 198 1 520 9531 198"


def assert_within_bf16(rows: torch.Tensor, num_layers: int) -> None:
    """Relative errors by row, [R]."""
    bound = 2 * (10 * num_layers + 2) ** 0.5 * 2**-9
    overall = rows.square().mean().sqrt()
    assert overall < bound
    assert rows.max() < 2 * bound
    # fp32 would be nearer by orders of magnitude: bf16 was at work.
    assert overall > bound / 100


def reference_rows(path, items, tokens, max_len: int):
    """fp32 logits of every emitted token, by one pass over each prompt and its answer."""
    model = load_model(
        path,
        kernels=select_kernels(CPU),
        dtype=torch.float32,
        device=CPU,
        max_positions=max_len,
    )
    for item in items:
        prompt, answer = item.prompt_token_ids, tokens[item.request_id]
        bench = Bench(model, max_len=max_len, block_size=16)
        hidden = bench.run([*prompt, *answer[:-1]], 0).last[len(prompt) - 1 :]
        yield item, model.compute_logits(hidden)


def errors(found, path, items, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of prompts' last rows and of decoded rows: ``|ours - theirs| / |theirs|``, centred."""
    prefill, decode = [], []
    for item, expected in reference_rows(path, items, found.tokens, max_len):
        prompt, theirs = item.prompt_token_ids, expected.double()
        keys = [(prompt, len(prompt) + r) for r in range(len(theirs))]
        ours = torch.stack([found.rows[key] for key in keys]).double().cpu()
        theirs = theirs - theirs.mean(dim=1, keepdim=True)
        ours = ours - ours.mean(dim=1, keepdim=True)
        error = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
        prefill.append(error[:1])
        decode.append(error[1:])
    return torch.cat(prefill), torch.cat(decode)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("method", ["plain", "ngram"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_random_models(tmp_path, architecture, method, eager):
    files, items = write_files(tmp_path, architecture), plain_requests(12, MAX_TOKENS)
    found = record(
        items,
        model=str(files["target"]),
        speculative_config=speculation(files)[method],
        **OPTIONS | {"max_num_seqs": 4, "enforce_eager": eager},
    )
    for rows in errors(found, files["target"], items, MAX_LEN):
        assert_within_bf16(rows, SIZES["num_hidden_layers"])


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_one_wrong_token_is_far_above_the_bound(tmp_path, architecture):
    files, (item,) = write_files(tmp_path, architecture), plain_requests(1, MAX_TOKENS)
    found = record([item], model=str(files["target"]), **OPTIONS | {"enforce_eager": True})
    answer = found.tokens[item.request_id]
    found.tokens[item.request_id] = [(answer[0] + 1) % SIZES["vocab_size"], *answer[1:]]
    _, decode = errors(found, files["target"], [item], MAX_LEN)
    assert decode.min() > 0.3


@pytest.mark.skipif(not SMOLLM2, reason="SAMETOKEN_SMOLLM2 does not name the GGUF file")
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_smollm2(eager):
    prompt = tuple(map(int, QUESTION.split()))
    items = [request("short", prompt, MAX_TOKENS), request("long", prompt * 20, MAX_TOKENS)]
    found = record(
        items,
        model=SMOLLM2,
        **OPTIONS | {"max_num_seqs": 2, "enforce_eager": eager},
    )
    for rows in errors(found, Path(SMOLLM2), items, MAX_LEN):
        assert_within_bf16(rows, 30)
