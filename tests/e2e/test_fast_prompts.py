"""Prompts in the fast form: by their length and position alone, whatever runs beside.

Latents are expanded, all but of the last token; recurrent layers run in chunks of 64 positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from helpers.adapters import write_adapter
from helpers.checkpoints import change_config
from helpers.families import write_family
from helpers.harness import replayed_by, request, requests_of
from helpers.hybrids import write_hybrid
from helpers.latents import write_nextn
from helpers.nemotron import write_nemotron
from helpers.small_engines import PROMPTS, build, cached_by, mtp, scored
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.load import validate
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.scheduler import kept_states


def ngram(k: int) -> dict:
    return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1}


def text(length: int, *repeated: int) -> list[int]:
    """Repetitive, so that n-grams are found."""
    return ([0, 1] + [*repeated] * length)[:length]


@dataclass(frozen=True)
class Family:
    """A model, and prompts around the edges of its fast form.

    Attributes:
        fast_from: of the engine.
        turns: prompts of conversations: a short one, then long ones.
        few_blocks: options with which requests preempt each other, inside of prompts too.
        most_cached: tokens of the longest prefix that a conversation shares.
    """

    write: Callable
    fast_from: int
    options: dict
    prompts: list[list[int]]
    turns: list[list[int]]
    few_blocks: dict
    most_cached: int
    checkpoints: dict = field(default_factory=dict)

    def build(self, spec: dict | None = None, steps: str = "compact", **options):
        own = {"fast_prompts_from": self.fast_from} | self.options
        return build(self.checkpoints["own"], spec, steps, **own | options)

    def requests(self):
        """Every other one is sampled."""
        return requests_of(self.prompts, 16, 0.0, 0.9, logprobs=1)


LATENTS = Family(
    lambda path: write_nextn(path, "glm4_moe_lite", seed=3),
    fast_from=12,
    options={"dtype": "bfloat16"},
    prompts=PROMPTS,
    # Their last tokens lie within a block of 8, at its end, and after it.
    turns=[text(8, 4, 5, 6), *(text(n, *range(2, 22)) for n in (22, 24, 25))],
    few_blocks={"num_kv_blocks": 8, "max_model_len": 40},
    most_cached=24,
)
HYBRIDS = Family(
    lambda path: write_hybrid(path, seed=3, max_position_embeddings=320),
    fast_from=66,
    options={
        "max_num_batched_tokens": 341,
        "prefill_chunk_size": 0,
        "max_model_len": 320,
        "kv_cache_memory_bytes": 2**22,
    },
    # No chunk, one and several; ends just after a chunk, just before one, and between.
    prompts=[text(n, 7, 9, 4) for n in (193, 205, 5, 66, 128, 129)],
    turns=[text(65, 4, 5, 6), *(text(n, *range(2, 22)) for n in (100, 130, 193))],
    few_blocks={"num_kv_blocks": 36, "max_model_len": 280, "prefill_chunk_size": 64},
    most_cached=192,
)
FAMILIES = {"latents": LATENTS, "hybrid": HYBRIDS}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    found = FAMILIES[request.param]
    if not found.checkpoints:
        found.checkpoints["own"] = found.write(tmp_path_factory.mktemp("fast"))
    return found


@pytest.fixture(scope="module")
def alone(family):
    """Of requests that run alone, their prompts in one chunk and the rest."""
    return scored(family.build(max_num_seqs=1, prefill_chunk_size=0), family.requests())


CASES = {
    "latents": [
        (None, "static", {"prefill_chunk_size": 8}),
        (mtp(3), "compact", {"prefill_chunk_size": 7}),
        (mtp(2), "static", {"prefill_chunk_size": 5}),
        (ngram(4), "compact", {"prefill_chunk_size": 3}),
    ],
    "hybrid": [
        (None, "static", {"prefill_chunk_size": 100}),
        (mtp(3), "compact", {"prefill_chunk_size": 64}),
        (mtp(8), "static", {"max_num_batched_tokens": 347, "max_num_seqs": 6}),
        (ngram(8), "compact", {"max_num_batched_tokens": 405, "block_size": 24}),
    ],
}


@pytest.mark.parametrize("index", range(4))
def test_drafts_chunks_and_other_requests_change_no_bit(family, alone, index):
    (name,) = (name for name, one in FAMILIES.items() if one is family)
    spec, steps, options = CASES[name][index]
    core = family.build(spec, steps, **{"steps_in_flight": 2} | options)
    assert scored(core, family.requests()) == alone


def test_only_long_prompts_are_fast(family, alone):
    usual = scored(family.build(fast_prompts_from=0), family.requests())
    for one in family.requests():
        is_short = len(one.prompt_token_ids) < family.fast_from
        assert (usual[one.request_id] == alone[one.request_id]) == is_short


@pytest.mark.parametrize("swap_space", [0, 2**-6])
def test_what_is_computed_again_has_the_form_that_it_had(family, alone, swap_space):
    """The fast form of the prompt, the rest of it and the answer in the usual one."""
    core = family.build(
        mtp(3), swap_space=swap_space, enable_prefix_caching=False, **family.few_blocks
    )
    replayed = replayed_by(core)
    assert scored(core, family.requests()) == alone
    assert core.scheduler.num_preemptions
    assert (sum(replayed) > family.fast_from) == (not swap_space)


@pytest.mark.parametrize(("spec", "block_size"), [(None, 8), (mtp(2), 8), (mtp(2), 24)])
def test_a_conversation_reads_no_block_of_another_form(family, spec, block_size, monkeypatch):
    """What goes on from a prompt shares its blocks, not its answer's or those of its end."""
    monkeypatch.setattr(kept_states, "INTERVAL", 2)

    def talk(core):
        said = []
        for prompt in family.turns:
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

    options = {"block_size": block_size}
    core = family.build(spec, **options)
    cached = cached_by(core)
    warm = talk(core)
    assert talk(core) == warm == talk(family.build(enable_prefix_caching=False, **options))
    assert max(cached) >= family.most_cached
    core.scheduler.check_integrity()


def test_latents_in_float8_change_no_bit_either(tmp_path):
    """Those of its own chunk are read as they are stored, too."""
    options = LATENTS.options | {"kv_cache_dtype": "fp8"}
    own = replace(LATENTS, options=options, checkpoints={"own": LATENTS.write(tmp_path)})
    alone = scored(own.build(max_num_seqs=1, prefill_chunk_size=0), own.requests())
    assert scored(own.build(mtp(2), "static", prefill_chunk_size=5), own.requests()) == alone
    core = own.build(ngram(4), enable_prefix_caching=False, **own.few_blocks)
    assert scored(core, own.requests()) == alone
    assert core.scheduler.num_preemptions
    wide = scored(own.build(kv_cache_dtype="auto"), own.requests())
    assert all(wide[name] != alone[name] for name in alone)


def test_chunks_of_mamba_2_change_no_bit_either(tmp_path):
    target = write_nemotron(tmp_path, seed=3, max_position_embeddings=320)
    own = replace(HYBRIDS, checkpoints={"own": target})
    alone = scored(own.build(max_num_seqs=1), own.requests())
    assert scored(own.build(mtp(3), "static", prefill_chunk_size=100), own.requests()) == alone
    usual = scored(own.build(fast_prompts_from=0), own.requests())
    changed = [usual[f"r{i}"] != alone[f"r{i}"] for i in range(6)]
    assert changed == [True, True, False, True, True, True]


@pytest.mark.parametrize("name", ["granite_hybrid", "bamba", "falcon_h1"])
def test_nor_those_of_other_hybrids_of_mamba_2(tmp_path, name):
    target = write_family(tmp_path, name, max_position_embeddings=320)
    own = replace(HYBRIDS, prompts=HYBRIDS.prompts[2:5], checkpoints={"own": target})
    alone = scored(own.build(max_num_seqs=1), own.requests())
    assert scored(own.build(ngram(3), "static", prefill_chunk_size=100), own.requests()) == alone


def test_chunks_have_adapters_and_expanded_prompts_none(tmp_path):
    target = HYBRIDS.write(tmp_path / "target")
    modules = ("in_proj_qkv", "in_proj_b", "out_proj", "q_proj")
    adapter = write_adapter(tmp_path / "adapter", target, modules, seed=3)
    own, options = replace(HYBRIDS, checkpoints={"own": target}), {"lora_modules": {"own": adapter}}
    asked = [replace(one, adapter=index % 2) for index, one in enumerate(own.requests())]
    alone = scored(own.build(max_num_seqs=1, **options), asked)
    assert scored(own.build(mtp(3), prefill_chunk_size=100, **options), asked) == alone
    plain = scored(own.build(), own.requests())
    assert [plain[f"r{i}"] != alone[f"r{i}"] for i in range(6)] == [False, True] * 3
    latents = LATENTS.write(tmp_path / "latents")
    with pytest.raises(ConfigError, match="in the expanded form have no adapters"):
        validate(config_of(latents, enable_lora=True, skip_tokenizer_init=True), print)


def config_of(model="smollm2", **options) -> EngineConfig:
    return EngineConfig.from_options(model=str(model), fast_prompts_from=12, **options)


def test_a_model_without_a_fast_form_is_refused():
    with pytest.raises(ConfigError, match=r"neither latent attention .* nor recurrent layers"):
        validate(config_of(skip_tokenizer_init=True), print)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_batched_tokens": 339}, r"Raise max_num_batched_tokens to 340 or more"),
        ({"prefill_chunk_size": 63}, r"Raise prefill_chunk_size to 64 or more"),
    ],
)
def test_steps_that_may_hold_no_chunk_are_refused(tmp_path, options, said):
    model = write_hybrid(tmp_path)
    with pytest.raises(ConfigError, match=said):
        validate(config_of(model, skip_tokenizer_init=True, **options), print)
    validate(config_of(model, skip_tokenizer_init=True, max_num_batched_tokens=340), print)


def test_heads_that_kernels_do_not_expand_are_refused_before_weights_are_read(
    tmp_path, monkeypatch
):
    """These would be found to be of another size."""
    path = change_config(LATENTS.write(tmp_path), qk_nope_head_dim=1024, qk_rope_head_dim=8)
    monkeypatch.setenv("SAMETOKEN_KERNELS", "native")
    with pytest.raises(UnsupportedError, match=r"head_dim 1032 .* Leave fast_prompts_from out"):
        build_engine(config_of(path, device="cpu", skip_tokenizer_init=True))
