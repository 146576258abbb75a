"""Options: every one explained, every mistake refused with a remedy."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.errors import ConfigError
from sametoken.types.speculative_config import METHOD_ALIASES
from sametoken.types.speculative_methods import EXTRACT, HEADS, METHODS, TABLE, WITHOUT_MODEL

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
SYNTHETIC = NGRAM | {"rejection_sample_method": "synthetic"}
BOTH = {"synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 1.5}
EXTRACTION = {"method": EXTRACT, "shared_storage_path": "a/directory"}


@pytest.mark.parametrize("kind", [EngineConfig, SpeculativeConfig])
def test_every_option_has_help(kind):
    for field in dataclasses.fields(kind):
        text = field.metadata["help"]
        assert text, field.name
        assert text[-1] != ".", field.name


def test_defaults_are_possible():
    assert EngineConfig() == EngineConfig.from_options()


def test_a_flag_s_other_spelling_is_a_keyword_too():
    assert EngineConfig.from_options(num_gpu_blocks_override=5).num_kv_blocks == 5
    with pytest.raises(ConfigError, match="override and num_kv_blocks are one option"):
        EngineConfig.from_options(num_gpu_blocks_override=5, num_kv_blocks=6)


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_modl_len", "did you mean 'max_model_len'?"),
        ("speculative_confg", "did you mean 'speculative_config'?"),
        ("torch_dtype", "did you mean 'dtype'?"),
        ("xyz", "known: model, tokenizer"),
    ],
)
def test_unknown_options_are_hinted_at(name, hint):
    with pytest.raises(ConfigError, match=f"unknown option '{name}'") as caught:
        EngineConfig.from_options(**{name: 1})
    assert hint in caught.value.remedy


def test_an_empty_chat_template_is_refused_as_empty(tmp_path):
    file = tmp_path / "template.jinja"
    file.touch()
    with pytest.raises(ConfigError, match=r"is empty\. Give a file of Jinja"):
        EngineConfig(chat_template=file)


def test_files_must_be_there(tmp_path):
    file = tmp_path / "generation_config.json"
    for name, value in (("chat_template", tmp_path), ("generation_config", tmp_path)):
        with pytest.raises(ConfigError, match=f"{name}=") as refused:
            EngineConfig(**{name: value})
        assert refused.value.remedy
    file.write_text("{}")
    config = EngineConfig(chat_template=file, generation_config=tmp_path)
    assert (config.chat_template, config.generation_config) == (str(file), str(tmp_path))


@pytest.mark.parametrize("name", ["dtype", "device", "load_format"])
def test_choices_are_named(name):
    with pytest.raises(ConfigError, match=f"{name}='float16x' is not possible") as caught:
        EngineConfig.from_options(**{name: "float16x"})
    assert "'auto'" in caught.value.remedy


LIMITS = {
    "seed": (0, 2**63 - 1),
    "max_model_len": (2, 2**31),
    "max_num_seqs": (0, 4096),
    "max_num_batched_tokens": (0, 2**20),
    "prefill_chunk_size": (0, 2**20),
    "block_size": (0, 1024),
    "kv_cache_memory_bytes": (1, 2**50),
    "num_kv_blocks": (1, 2**31),
    "steps_in_flight": (0, 3),
}


@pytest.mark.parametrize(("name", "limits"), LIMITS.items())
def test_numbers_have_limits(name, limits):
    low, high = limits
    for value in limits:
        assert getattr(EngineConfig.from_options(**{name: value}), name) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=f"{name}=.* is not possible") as caught:
            EngineConfig.from_options(**{name: value})
        assert f"an integer from {low} to {high}" in caught.value.remedy
    for value in (1.5, "1", True):
        with pytest.raises(ConfigError, match=f"{name}=.* is of the wrong type.*type int"):
            EngineConfig.from_options(**{name: value})


@pytest.mark.parametrize("name", ["max_model_len", "kv_cache_memory_bytes", "num_kv_blocks"])
def test_some_numbers_may_be_left_open(name):
    assert getattr(EngineConfig.from_options(**{name: None}), name) is None
    with pytest.raises(ConfigError, match="max_num_seqs=None"):
        EngineConfig.from_options(max_num_seqs=None)


def test_draft_limits_are_one_of_two():
    assert SpeculativeConfig("ngram", 5).draft_limits == "adaptive"
    assert SpeculativeConfig.parse(NGRAM | {"draft_limits": "fixed"}).draft_limits == "fixed"
    with pytest.raises(ConfigError, match="draft_limits='k' is not possible") as caught:
        SpeculativeConfig.parse(NGRAM | {"draft_limits": "k"})
    assert caught.value.remedy == "use 'adaptive' or 'fixed'"


@pytest.mark.parametrize("form", [dict, json.dumps, lambda value: SpeculativeConfig(**value)])
def test_a_speculative_config_comes_in_three_forms(form):
    config = EngineConfig.from_options(speculative_config=form(NGRAM))
    assert config.speculative_config == SpeculativeConfig("ngram", 5)


@pytest.mark.parametrize("given", [None, "null"])
def test_no_speculation_is_none_as_in_vllm(given):
    assert EngineConfig.from_options(speculative_config=given).speculative_config is None


@pytest.mark.parametrize("method", [name for name in METHODS if name != EXTRACT])
def test_every_method_takes_1_to_64_drafts_but_mtp(method):
    model = None if method in WITHOUT_MODEL else "a drafter"
    _, most = TABLE[method].limits
    for k in (1, most):
        assert SpeculativeConfig(method, k, model).num_speculative_tokens == k
    with pytest.raises(ConfigError, match=f"={most + 1} is not possible with method '{method}'"):
        SpeculativeConfig(method, most + 1, model)


@pytest.mark.parametrize("name", ["mtp", *METHOD_ALIASES])
def test_names_that_vllm_had_for_a_method_are_known(name):
    given = {"method": name, "num_speculative_tokens": 3}
    assert SpeculativeConfig.parse(given) == SpeculativeConfig("mtp", 3)


def test_a_key_of_vllm_that_asks_for_what_happens_anyway_is_accepted():
    given = NGRAM | {"draft_tensor_parallel_size": 2, "disable_by_batch_size": None}
    given |= {"disable_padded_drafter_batch": True, "parallel_drafting": False}
    assert SpeculativeConfig.parse(given) == SpeculativeConfig.parse(NGRAM)


@pytest.mark.parametrize(
    ("value", "cause", "remedy"),
    [
        ("{", "is not JSON: .* at column", '{"method": "ngram"'),
        ("3", "is not a JSON object", "braces"),
        ({}, "neither a method nor a model", "'ngram', "),
        ("ngrm", "method 'ngrm' is not known", "did you mean 'ngram'? Use 'ngram', "),
        ({"method": "xyz"}, "'xyz' is not known", "use 'ngram', "),
        ({"model": "m", "num_speculative_tokens": 65}, "=65 is not possible", "1 to 64"),
        (NGRAM | {"num_speculative_tokens": -1}, "=-1 is not possible", "1 to 64"),
        (NGRAM | {"k": 3}, "unknown key 'k'", "known: method"),
        (NGRAM | {"disable_by_batch_size": 4}, "follows the load", "leave it out"),
        (NGRAM | {"enforce_eager": True}, "run alike", "use --enforce-eager"),
        (NGRAM | {"max_model_len": 2048}, "the engine's own length", "use --max-model-len"),
        (NGRAM | {"use_heterogeneous_vocab": True}, "of the target's tokens", "leave it out"),
        (NGRAM | {"revision": "main"}, "part of its name", "ORG/NAME@REVISION"),
        (NGRAM | {"speculative_token_tree": "[]"}, "one chain", "use num_speculative_tokens"),
        (NGRAM | {"prompt_lookup_mx": 3}, "'prompt_lookup_mx'", "did you mean 'prompt_lookup_max'"),
        (NGRAM | {"num_speculative_tokens": True}, "=True is of the wrong type", "type int"),
        (NGRAM | {"num_speculative_tokens": 2.0}, "=2.0 is of the wrong type", "type int"),
        (NGRAM | {"method": 7}, "method=7 is of the wrong type", "type str"),
        (NGRAM | {"model": None}, "model=None is of the wrong type", "type str"),
        (NGRAM | {"num_speculative_tokens": 0}, "=0 is not possible", "1 to 64"),
        (NGRAM | {"num_speculative_tokens": 65}, "=65 is not possible", "1 to 64"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min=0", "from 1 to 1024"),
        (NGRAM | {"prompt_lookup_min": 6}, "prompt_lookup_min=6", "min <= max"),
        (NGRAM | {"model": "x"}, "'ngram' loads no drafter", 'leave "model" out'),
        (NGRAM | {"method": "mtp", "model": "x"}, "'mtp' loads no drafter", 'leave "model" out'),
        (NGRAM | {"method": "eagle"}, "'eagle' needs a drafter", 'set "model"'),
        (NGRAM | {"rejection_sample_method": "standard"}, "would differ from plain", "'keyed'"),
        (NGRAM | {"rejection_sample_method": "block"}, "would differ from plain", "'keyed'"),
        (NGRAM | {"rejection_sample_method": "x"}, "='x' is not", "'keyed' or 'synthetic'"),
        (NGRAM | {"synthetic_acceptance_rates": [0.5]}, "verified by keyed", "synthetic"),
        (NGRAM | {"synthetic_acceptance_length": 2}, "verified by keyed", "synthetic"),
        (SYNTHETIC, "one of rates and length, 0 were", "synthetic_acceptance_length"),
        (SYNTHETIC | BOTH, "one of rates and length, 2 were", "synthetic_acceptance_length"),
        (SYNTHETIC | {"synthetic_acceptance_rates": []}, "are not possible", "from 0 to 1"),
        (
            SYNTHETIC | {"synthetic_acceptance_rates": [0.5, 0.6]},
            "are not possible",
            "never increase",
        ),
        (SYNTHETIC | {"synthetic_acceptance_rates": [1.1]}, "are not possible", "from 0 to 1"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [-0.1]}, "are not possible", "from 0 to 1"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [0.5] * 6}, "6 .* for 5 drafts", "per draft"),
        (SYNTHETIC | {"synthetic_acceptance_rates": 0.5}, "of the wrong type", "list of numbers"),
        (SYNTHETIC | {"synthetic_acceptance_rates": ["a"]}, "wrong type", "list of numbers"),
        (SYNTHETIC | {"synthetic_acceptance_rates": [True]}, "wrong type", "list of numbers"),
        (SYNTHETIC | {"synthetic_acceptance_length": "2"}, "of the wrong type", "float"),
        (SYNTHETIC | {"synthetic_acceptance_length": True}, "of the wrong type", "float"),
        (SYNTHETIC | {"synthetic_acceptance_length": 0.9}, "=0.9 is not possible", "1 to 6"),
        (SYNTHETIC | {"synthetic_acceptance_length": 6.1}, "=6.1 is not possible", "1 to 6"),
        (SYNTHETIC | {"synthetic_acceptance_length": float("nan")}, "nan is not", "1 to 6"),
        ({"method": EXTRACT}, "needs a directory to write to", 'set "shared_storage_path"'),
        (EXTRACTION | {"shared_storage_path": ""}, "needs a directory", "shared_storage_path"),
        (EXTRACTION | {"model": "x"}, f"'{EXTRACT}' loads no", 'leave "model" out'),
        (EXTRACTION | {"num_speculative_tokens": 2}, "=2 is not possible", "0 to 1"),
        (EXTRACTION | {"eagle_aux_hidden_state_layer_ids": []}, "are no layers", "from 0 on"),
        (EXTRACTION | {"eagle_aux_hidden_state_layer_ids": [-1]}, "are no layers", "from 0 on"),
        (EXTRACTION | {"eagle_aux_hidden_state_layer_ids": [1.0]}, "are no layers", "integers"),
        (EXTRACTION | {"eagle_aux_hidden_state_layer_ids": 2}, "wrong type", "list of numbers"),
        (
            EXTRACTION | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1},
            "tokens that are made up",
            "leave rejection_sample_method out",
        ),
        (NGRAM | {"shared_storage_path": "x"}, "'ngram' takes no shared_storage_path", EXTRACT),
        (NGRAM | {"eagle_aux_hidden_state_layer_ids": [2]}, "'ngram' takes no eagle_aux", EXTRACT),
    ],
)
def test_a_speculative_config_that_cannot_be(value, cause, remedy):
    with pytest.raises(ConfigError, match=cause) as caught:
        SpeculativeConfig.parse(value)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({"synthetic_acceptance_rates": [0.8, 0.64]}, (0.8, 0.64, 0.0, 0.0, 0.0)),
        ({"synthetic_acceptance_rates": [1, 1, 1, 1, 0]}, (1.0, 1.0, 1.0, 1.0, 0.0)),
        ({"synthetic_acceptance_length": 1}, (0.0,) * 5),
        ({"synthetic_acceptance_length": 6}, (1.0,) * 5),
        ({"synthetic_acceptance_length": 3.5}, (1.0, 1.0, 0.5, 0.0, 0.0)),
    ],
)
def test_synthetic_acceptance_has_one_rate_per_draft(given, rates):
    config = SpeculativeConfig.parse(json.dumps(SYNTHETIC | given))
    assert config.synthetic_rates == pytest.approx(rates)
    if length := given.get("synthetic_acceptance_length"):
        assert 1 + sum(config.synthetic_rates) == pytest.approx(length)
    assert SpeculativeConfig.parse(NGRAM).synthetic_rates is None


@pytest.mark.parametrize("k", [{}, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 1}])
def test_extraction_drafts_nothing_whatever_it_is_told(k):
    config = EngineConfig.from_options(speculative_config=EXTRACTION | k)
    assert config.num_speculative_tokens == 0
    assert not config.speculative_config.proposes


def test_what_is_made_up_has_a_name():
    synthetic = SYNTHETIC | {"synthetic_acceptance_rates": [0.5]}
    for options, names in (
        ({"speculative_config": NGRAM}, ()),
        ({"load_format": "dummy"}, ("dummy weights",)),
        ({"speculative_config": synthetic}, ("synthetic acceptance",)),
        (
            {"load_format": "dummy", "speculative_config": synthetic},
            ("dummy weights", "synthetic acceptance"),
        ),
    ):
        config = EngineConfig.from_options(**options)
        assert config.synthetic == names
        assert (config.draft_load_format == "dummy") == (config.load_format == "dummy")


OPTIONS_OF_HEADS = {"quantization": "fp8", "token_map": "map.json"}


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize(("name", "value"), OPTIONS_OF_HEADS.items())
def test_draft_heads_may_be_quantized_and_have_a_token_map(method, name, value):
    model = None if method in WITHOUT_MODEL else "a head"
    given = {"method": method, "num_speculative_tokens": 2, name: value}
    spec = SpeculativeConfig.parse(given | ({"model": model} if model else {}))
    assert getattr(spec, name) == value
    assert getattr(SpeculativeConfig(method, 2, model), name) is None


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(HEADS)))
@pytest.mark.parametrize(("name", "value"), OPTIONS_OF_HEADS.items())
def test_what_has_no_head_takes_no_option_of_heads(method, name, value):
    model = None if method in WITHOUT_MODEL else "a drafter"
    with pytest.raises(ConfigError, match=f"method '{method}' takes no {name}") as caught:
        SpeculativeConfig(method, 1, model, **{name: value})
    assert f'leave "{name}" out' in caught.value.remedy


def test_suffix_drafts_as_far_as_it_matches_unless_told_otherwise():
    assert SpeculativeConfig.parse({"method": "suffix"}).num_speculative_tokens == 24
    deep = {"method": "suffix", "suffix_decoding_max_tree_depth": 32}
    assert SpeculativeConfig.parse(deep).num_speculative_tokens == 32
    assert SpeculativeConfig.parse(deep | {"num_speculative_tokens": 7}).num_speculative_tokens == 7


@pytest.mark.parametrize(
    ("method", "k"), [("ngram", 8), ("draft_model", 4), ("mtp", 3), (EXTRACT, 0)]
)
def test_every_method_has_a_k_of_its_own(method, k):
    given = {"method": method}
    if method == "draft_model":
        given["model"] = "m"
    if method == EXTRACT:
        given["shared_storage_path"] = "d"
    spec = SpeculativeConfig.parse(given)
    assert (spec.num_speculative_tokens, spec.is_complete) == (k, True)


@pytest.mark.parametrize("given", [{"model": "m"}, {"method": "eagle3"}])
def test_what_the_checkpoint_completes_is_left_open(given):
    spec = SpeculativeConfig.parse(given)
    assert (spec.num_speculative_tokens, spec.is_complete) == (0, False)


def test_a_bare_name_is_a_method():
    for name in ("ngram", "suffix"):
        assert SpeculativeConfig.parse(name) == SpeculativeConfig(name)
    for name in ("deepseek_mtp", "nextn", "qwen3_5_mtp", "qwen3_next_mtp"):
        assert SpeculativeConfig.parse(name) == SpeculativeConfig("mtp")
    with pytest.raises(ConfigError, match="names neither"):
        EngineConfig.from_options(speculative_config="{}")


def test_a_cascade_may_draft_more_than_its_model():
    spec = SpeculativeConfig.parse(
        {
            "method": "mtp",
            "num_speculative_tokens": 20,
            "cascade": "suffix",
            "cascade_model_tokens": 3,
        }
    )
    assert (spec.num_speculative_tokens, spec.num_model_tokens) == (20, 3)
    same = SpeculativeConfig("mtp", 3, cascade="ngram")
    assert (same.num_speculative_tokens, same.num_model_tokens) == (3, 3)
    assert same.label == "cascade (ngram, then mtp)"
    assert SpeculativeConfig("mtp", 3).label == "mtp"
    assert SpeculativeConfig(model="a/b", cascade="ngram").label == "cascade (ngram, then a/b)"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"suffix_decoding_max_tree_depth": 0}, "max_tree_depth=0"),
        ({"suffix_decoding_max_cached_requests": -1}, "max_cached_requests=-1"),
        ({"suffix_decoding_max_spec_factor": -0.5}, "max_spec_factor=-0.5"),
        ({"suffix_decoding_min_token_prob": 1.5}, "min_token_prob=1.5"),
        ({"cascade_model_tokens": 2}, "without a cascade"),
        ({"cascade": "mtp"}, "cascade='mtp' is not possible"),
        ({"cascade": "ngram", "method": "suffix", "model": None}, "with method 'suffix'"),
        ({"cascade": "ngram", "cascade_min_match": 0}, "cascade_min_match=0"),
        ({"cascade": "suffix", "cascade_min_match": 25}, "cascade_min_match=25"),
        ({"cascade": "ngram", "cascade_model_tokens": 5}, "cascade_model_tokens=5"),
        ({"cascade": "ngram", "cascade_model_tokens": 0}, "num_speculative_tokens=0"),
        ({"cascade": "ngram", "num_speculative_tokens": 65, "cascade_model_tokens": 2}, "=65"),
        ({"cascade": 3}, "cascade=3 is of the wrong type"),
        ({"suffix_decoding_min_token_prob": "a"}, "wrong type"),
        ({"method": "mtp", "model": None, "quantization": "int4"}, "quantization='int4' is not"),
        (
            {"method": "mtp", "model": None, "quantization": 8},
            "quantization=8 is of the wrong type",
        ),
    ],
)
def test_what_means_nothing_is_refused(changes, cause):
    plain = {"method": "draft_model", "model": "m", "num_speculative_tokens": 4}
    given = {key: value for key, value in (plain | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=cause) as caught:
        SpeculativeConfig.parse(given)
    assert caught.value.remedy
