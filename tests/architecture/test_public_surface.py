"""The names that users write. Changing one of them is a decision, not an accident."""

from __future__ import annotations

import dataclasses
import inspect

import sametoken
from sametoken.config import EngineConfig, SpeculativeConfig
from sametoken.llm import LLM
from sametoken.types.outputs import CompletionOutput, Logprob, RequestOutput
from sametoken.types.sampling_params import SamplingParams

ENGINE = {
    "model": "smollm2",
    "enable_lora": False,
    "max_loras": 1,
    "max_lora_rank": 16,
    "tokenizer": None,
    "chat_template": None,
    "generation_config": "auto",
    "skip_tokenizer_init": False,
    "dtype": "auto",
    "device": "auto",
    "seed": 0,
    "max_model_len": None,
    "max_num_seqs": 0,
    "max_num_batched_tokens": 0,
    "enable_prefix_caching": True,
    "enable_return_routed_experts": False,
    "enforce_eager": False,
    "kv_cache_dtype": "auto",
    "swap_space": 4.0,
    "tensor_parallel_size": 1,
    "disable_custom_all_reduce": False,
    "load_format": "auto",
    "logprobs_mode": "raw_logprobs",
    "speculative_config": None,
}
OWN_ENGINE_OPTIONS = {
    "lora_modules",
    "lora_experts",
    "fast_prompts_from",
    "prefill_chunk_size",
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kept_states_memory_bytes",
    "num_kv_blocks",
    "kv_offloading_size",
    "swap_dir",
    "swap_dir_size",
    "steps_in_flight",
}
SAMPLING = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "max_tokens": 16,
    "min_tokens": 0,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "logprobs": None,
    "prompt_logprobs": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "bad_words": (),
    "allowed_token_ids": None,
    "include_stop_str_in_output": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "num_speculative_tokens": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
}
SPECULATIVE = {
    "method": "",
    "num_speculative_tokens": 0,
    "model": None,
    "prompt_lookup_max": 5,
    "prompt_lookup_min": 1,
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_cached_requests": 0,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_min_token_prob": 0.1,
    "quantization": None,
    "token_map": None,
    "cascade": None,
    "cascade_min_match": 4,
    "cascade_model_tokens": None,
    "draft_limits": "adaptive",
    "rejection_sample_method": "keyed",
    "synthetic_acceptance_rates": None,
    "synthetic_acceptance_length": None,
    "shared_storage_path": None,
    "eagle_aux_hidden_state_layer_ids": None,
}
LLM_METHODS = {
    "generate": ["prompts", "sampling_params", "use_tqdm", "on_finished", "lora_request"],
    "chat": ["messages", "sampling_params", "use_tqdm", "lora_request", "template_options"],
    "generate_stream": ["prompt", "sampling_params", "lora_request"],
    "abort": ["request_id"],
    "get_tokenizer": [],
    "get_default_sampling_params": [],
}


def defaults(kind: type) -> dict:
    return {field.name: field.default for field in dataclasses.fields(kind)}


def names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_package_offers_these_names():
    assert set(sametoken.__all__) == {
        "LLM",
        "AsyncLLM",
        "SamplingParams",
        "StructuredOutputs",
        "RequestOutput",
        "CompletionOutput",
        "LoRARequest",
    }


def test_engine_options_have_the_field_s_names_and_these_defaults():
    found = defaults(EngineConfig)
    assert {name: found[name] for name in ENGINE} == ENGINE
    assert set(found) == set(ENGINE) | OWN_ENGINE_OPTIONS


def test_sampling_parameters_have_the_field_s_names_and_defaults():
    assert defaults(SamplingParams) == SAMPLING


def test_speculative_config_has_the_field_s_keys():
    assert defaults(SpeculativeConfig) == SPECULATIVE


def test_llm_takes_the_model_first_and_options_by_name():
    signature = inspect.signature(LLM.__init__).parameters
    kinds = {name: parameter.kind for name, parameter in signature.items() if name != "self"}
    assert kinds == {
        "model": inspect.Parameter.POSITIONAL_OR_KEYWORD,
        "revision": inspect.Parameter.KEYWORD_ONLY,
        "announce": inspect.Parameter.KEYWORD_ONLY,
        "options": inspect.Parameter.VAR_KEYWORD,
    }


def test_llm_has_these_methods():
    for name, expected in LLM_METHODS.items():
        assert parameters(getattr(LLM, name)) == expected, name
    for name in ("resolved", "speculation_metrics"):
        assert isinstance(inspect.getattr_static(LLM, name), property)


def test_outputs_have_the_field_s_names():
    assert names(RequestOutput) == [
        "request_id",
        "prompt",
        "prompt_token_ids",
        "outputs",
        "finished",
        "metrics",
        "prompt_logprobs",
        "weight_versions",
    ]
    assert names(CompletionOutput) == [
        "index",
        "text",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "logprobs",
        "cumulative_logprob",
        "error",
        "windows",
        "routed_experts",
    ]
    assert names(Logprob)[:2] == ["logprob", "rank"]
