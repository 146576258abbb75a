"""A summary holds plain values, and crosses to another process."""

from __future__ import annotations

import pickle
from dataclasses import replace

from sametoken.config import SpeculativeConfig
from sametoken.engine.summary import explanation, summarise


def test_plain_values_of_a_resolved_engine(resolved):
    speculative = SpeculativeConfig("ngram", 4)
    summary = summarise(
        replace(resolved, config=replace(resolved.config, speculative_config=speculative))
    )
    assert (summary.device, summary.dtype) == ("cpu", "float32")
    assert (summary.method, summary.num_speculative_tokens) == ("ngram", 4)
    assert (summary.model_path, summary.eos_token_ids) == ("nowhere", (0,))
    assert pickle.loads(pickle.dumps(summary)) == summary


def test_without_speculation_there_is_no_method(resolved):
    summary = summarise(resolved)
    assert (summary.method, summary.num_speculative_tokens) == (None, 0)


def test_every_setting_is_explained_where_the_engine_chose(resolved):
    settings = {setting.name: setting for setting in explanation(resolved)}
    assert settings["dtype"].value == "float32"
    assert settings["dtype"].reason == "the checkpoint is fp32"
    assert (settings["block_size"].value, settings["block_size"].reason) == ("16 tokens", "")
    assert settings["synthetic"].value == "nothing"
    assert settings["tokenizer"].value == "none"
    assert settings["kept_states_bytes"].reason == "the model has no recurrent layers"


def test_kept_states_are_counted_or_said_to_be_off(resolved):
    hybrid = replace(resolved, recurrent_bytes=2**20)
    kept = replace(hybrid, num_kept_states=7, kept_states_bytes=2**20)
    for one, value, reason in (
        (kept, "1.0 MiB", "of 7 kept states and a reserved one, for prefix caching"),
        (hybrid, "0 B", "prefix caching is off"),
    ):
        setting = next(one for one in explanation(one) if one.name == "kept_states_bytes")
        assert (setting.value, setting.reason) == (value, reason)


def test_settings_are_in_people_s_units(resolved):
    config = replace(
        resolved.config,
        kv_cache_memory_bytes=3 * 2**30,
        max_num_batched_tokens=4096,
        speculative_config=SpeculativeConfig("ngram", 4),
    )
    sizes = {"weights_bytes": 5 * 2**20, "kv_bytes": 3 * 2**29, "max_model_len": 40 * 1024}
    found = explanation(replace(resolved, config=config, **sizes))
    settings = {one.name: one.value for one in found}
    assert settings["kv_cache_memory_bytes"] == "3.0 GiB"
    assert settings["max_num_batched_tokens"] == "4K tokens"
    assert settings["max_model_len"] == "40K tokens"
    assert (settings["weights_bytes"], settings["kv_bytes"]) == ("5.0 MiB", "1.5 GiB")
    assert settings["speculative_config"] == '{"method": "ngram", "num_speculative_tokens": 4}'
    found = explanation(replace(resolved, **sizes, adapters_bytes=2**20))
    reasons = {one.name: one.reason for one in found}
    assert reasons["weights_bytes"] == "of the model, and 1.0 MiB of them for adapters"
