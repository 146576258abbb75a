"""Prompts of latent attention in the expanded form: by their length, whatever runs beside."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from helpers.harness import replayed_by, request
from helpers.latents import write_nextn
from helpers.small_engines import build, cached_by, mtp, requests, scored
from sametoken.config import EngineConfig
from sametoken.engine.expanded_prompts import require_expandable
from sametoken.engine.load import validate
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.ops.model.latent_attention.shape import ExpandedShape, LatentShape
from sametoken.ops.native.backend import NativeKernels

FROM = 12
EXPANDED = {"dtype": "bfloat16", "expand_prompts_from": FROM}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
SHORT = [3, 4, 5, 6, 7, 8, 9, 3]
#: Their last tokens lie within a block of 8, at its end, and after it.
LONG = [[0, 1, *range(2, n)] for n in (22, 24, 25)]


def all_requests():
    return [replace(one, params=replace(one.params, logprobs=1)) for one in requests()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_nextn(tmp_path_factory.mktemp("expanded"), "glm4_moe_lite", seed=3)


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Of requests that run alone, their prompts in one chunk."""
    core = build(checkpoint, None, max_num_seqs=1, prefill_chunk_size=0, **EXPANDED)
    return scored(core, all_requests())


@pytest.mark.parametrize(
    ("spec", "steps", "chunk"),
    [(None, "static", 8), (mtp(3), "compact", 7), (mtp(2), "static", 5), (NGRAM, "compact", 3)],
)
def test_drafts_chunks_and_other_requests_change_no_bit(checkpoint, alone, spec, steps, chunk):
    options = {"prefill_chunk_size": chunk, "steps_in_flight": 2} | EXPANDED
    assert scored(build(checkpoint, spec, steps, **options), all_requests()) == alone


def test_only_long_prompts_are_expanded(checkpoint, alone):
    absorbed = scored(build(checkpoint, dtype="bfloat16"), all_requests())
    for one in requests():
        is_short = len(one.prompt_token_ids) < FROM
        assert (absorbed[one.request_id] == alone[one.request_id]) == is_short


def test_what_is_computed_again_has_the_form_that_it_had(checkpoint, alone):
    """The prompt except its last token expanded, that and the answer absorbed."""
    core = build(
        checkpoint, mtp(3), num_kv_blocks=8, max_model_len=40, swap_space=0,
        enable_prefix_caching=False, **EXPANDED,
    )  # fmt: skip
    replayed = replayed_by(core)
    assert scored(core, all_requests()) == alone
    assert sum(replayed) > FROM


def test_a_conversation_reads_no_block_of_another_form(checkpoint):
    """What goes on from a prompt shares its blocks, not its answer's or its last token's."""

    def talk(core):
        said = []
        for prompt in (SHORT, *LONG):
            first = said_by(core, prompt)
            said += [first, said_by(core, [*prompt, *first[1], 5, 6])]
        return said

    def said_by(core, prompt):
        """What ``scored`` gives, and the tokens, whose blocks are kept."""
        asked, tokens, collect = [request("r", prompt, 8, logprobs=1)], [], core.step
        release = core.release

        def noting():
            updates = collect()
            tokens.extend(token for one in updates for token in one.token_ids)
            return updates

        core.step, core.release = noting, lambda name: release(name, len(prompt) + 8)
        bits = scored(core, asked)
        core.step, core.release = collect, release
        return bits, tokens[:8]

    core = build(checkpoint, **EXPANDED)
    cached = cached_by(core)
    warm = talk(core)
    assert talk(core) == warm == talk(build(checkpoint, enable_prefix_caching=False, **EXPANDED))
    assert max(cached) >= 24


def test_a_model_without_latents_is_refused():
    config = EngineConfig(expand_prompts_from=FROM)
    with pytest.raises(ConfigError, match="no latent attention"):
        validate(config, print)


def test_heads_that_kernels_do_not_expand_are_refused_with_the_option():
    wide = ExpandedShape(LatentShape(1, 8, 8, 1.0), nope_dim=1024, v_dim=8)
    with pytest.raises(UnsupportedError, match=r"head_dim 1032 .* leave expand_prompts_from out"):
        require_expandable(SimpleNamespace(layers=(wide,), kernels=NativeKernels()))
