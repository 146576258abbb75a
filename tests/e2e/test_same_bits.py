"""The law for bits on the CPU: logits of accepted rows, with and without speculation.

Real decoders and drafters from checkpoints on disk, through the engine as a user builds
it. Every row is compared by ``torch.equal``, keyed by request and position.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from helpers.checkpoints import VOCAB, eagle1_tensors, write_eagle1
from helpers.harness import Ran, collect, request
from helpers.recorded import RecordedLogits
from helpers.small_drafters import SMALL, write_drafters, write_target
from helpers.state_heads import write_medusa, write_mlp
from helpers.static_steps import in_steps
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine

METHODS = "ngram", "self", "eagle", "ngram-64", "other", "eagle3", "mlp", "medusa"
MAX_TOKENS = 16
PROMPTS = {
    "short": (3, 5),
    "long": tuple(i * 7 % VOCAB for i in range(30)),
    "repeating": (1, 2, 3, 4) * 6,
    "shares": tuple(i * 7 % VOCAB for i in range(21)),
}


def run_engine(
    target, prompts, temperature: float, steps: str = "compact", **options
) -> tuple[Ran, RecordedLogits]:
    options = SMALL | {"block_size": 8} | options
    core = build_engine(EngineConfig.from_options(model=str(target), **options))
    recorded = RecordedLogits()
    core._runner = in_steps(recorded.runner(core._runner), steps)
    ran, limits = Ran(), {}
    for i, prompt in enumerate(prompts):
        item = request(
            f"r{i}", prompt, max_tokens=MAX_TOKENS, temperature=temperature, seed=hash(prompt) % 97
        )
        core.add_request(item)
        ran.tokens[item.request_id], limits[item.request_id] = [], MAX_TOKENS
    while core.has_unfinished:
        collect(core, ran, limits)
    return ran, recorded


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory):
    first = write_eagle1(tmp_path_factory.mktemp("first"), eagle1_tensors(num_layers=2))
    return write_drafters(target, tmp_path_factory.mktemp("drafters")) | {
        "ngram-64": {"method": "ngram", "num_speculative_tokens": 31, "prompt_lookup_max": 3},
        "eagle": {"method": "eagle", "model": str(first), "num_speculative_tokens": 3},
        "mlp": {"model": str(write_mlp(tmp_path_factory.mktemp("mlp")))},
        "medusa": {"model": str(write_medusa(tmp_path_factory.mktemp("medusa")))},
    }


@cache
def plain(target, dtype: str, temperature: float):
    """Tokens of every prompt without drafts and in a batch of its own, and its rows' logits."""
    tokens, rows = [], {}
    for prompt in PROMPTS.values():
        ran, recorded = run_engine(
            target, [prompt], temperature, dtype=dtype, enable_prefix_caching=False
        )
        tokens.append(ran.tokens["r0"])
        rows |= recorded.rows
    return tokens, rows


@pytest.mark.parametrize(
    ("method", "dtype", "temperature"),
    [
        (method, dtype, 0.8 * ((i + j) % 2))
        for i, method in enumerate(METHODS)
        for j, dtype in enumerate(("bfloat16", "float32"))
    ],
)
def test_accepted_rows_have_the_bits_of_plain_decoding(
    target, drafters, method, dtype, temperature
):
    tokens, truth = plain(target, dtype, temperature)
    for steps_in_flight, steps in ((1, "compact"), (3, "static")):
        ran, recorded = run_engine(
            target,
            PROMPTS.values(),
            temperature,
            steps,
            dtype=dtype,
            speculative_config=drafters[method],
            steps_in_flight=steps_in_flight,
        )
        assert [ran.tokens[f"r{i}"] for i in range(len(PROMPTS))] == tokens
        assert ran.offered > 0
        if method == "self":
            assert ran.accepted == ran.offered
        compared = 0
        for key, row in recorded.rows.items():
            if key in truth:
                assert torch.equal(row, truth[key]), key
                compared += 1
        assert compared >= len(PROMPTS) * MAX_TOKENS
