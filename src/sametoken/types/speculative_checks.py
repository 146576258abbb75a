"""Checks of speculative options that depend on each other or on the method."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sametoken.errors import ConfigError, shown
from sametoken.types.option_values import listed
from sametoken.types.speculative_methods import CASCADED, EXTRACT, HEADS, MAX_SPECULATIVE_TOKENS
from sametoken.types.vllm_options import as_keyword, read_options

if TYPE_CHECKING:
    from sametoken.types.speculative_config import SpeculativeConfig

#: Keys of vLLM that are none here.
_VLLM_KEYS = read_options("""
draft_tensor_parallel_size tensor_parallel_size:
    ranks divide a drafter as they divide its target, where its sizes allow
disable_by_batch_size num_speculative_tokens_per_batch_size = none:
    the number of drafts follows the load -> leave it out
enforce_eager/ = none:
    target and drafter run alike -> use --enforce-eager
revision = none:
    a drafter's revision is part of its name -> use "model": "ORG/NAME@REVISION"
attention_backend draft_load_config kv_cache_dtype moe_backend = none auto:
    a drafter runs as its target does -> leave it out
max_model_len = none:
    drafts are made up to the engine's own length -> use --max-model-len
draft_sample_method = none:
    drafts are chosen with the target's own noise -> leave it out: no choice of drafts changes a
    token
enable_adaptive_verification/ parallel_drafting/ use_heterogeneous_vocab/ = false:
    drafts are made one after the other, of the target's tokens, and all are verified -> leave it
    out
disable_eagle_block_drop/ disable_padded_drafter_batch/ use_local_argmax_reduction/:
    nothing is padded, dropped or gathered for drafts
code_revision:
    code of a checkpoint is never run
speculative_token_tree = none:
    drafts are one chain -> use num_speculative_tokens
""")
_VLLM_KEY = {name: options for options in _VLLM_KEYS for name in options.names}


def without_vllm_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys without those of vLLM whose values describe what happens here.

    Raises:
        ConfigError: such a key asks for something else.
    """
    for key, value in given.items():
        if key in _VLLM_KEY:
            spelled = f"speculative config: {as_keyword(key, value)}"
            _VLLM_KEY[key].require_accepted(value, spelled)
    return {key: value for key, value in given.items() if key not in _VLLM_KEY}


def check_cascade(config: SpeculativeConfig) -> None:
    """Check the cascade.

    Raises:
        ConfigError: names the key and its allowed values.
    """
    if config.cascade is None:
        if config.cascade_model_tokens is not None:
            raise ConfigError("cascade_model_tokens is set without a cascade", 'set "cascade"')
        return
    lookup, method = config.cascade, config.method
    if method not in CASCADED:
        raise ConfigError(
            f"cascade {shown(lookup)} with method {method!r} is not possible",
            f"use it with the method {listed(CASCADED)}",
        )
    depth = config.suffix_decoding_max_tree_depth
    if lookup == "suffix" and config.cascade_min_match > depth:
        raise ConfigError(
            f"cascade_min_match={config.cascade_min_match} is not possible",
            f"use an integer from 1 to {depth}, the depth of the suffix tree",
        )
    own, num_tokens = config.num_model_tokens, config.num_speculative_tokens
    most = MAX_SPECULATIVE_TOKENS
    if not own <= num_tokens <= most:
        raise ConfigError(
            f"num_speculative_tokens={num_tokens} and cascade_model_tokens={own} are not possible",
            f"use 1 <= cascade_model_tokens <= num_speculative_tokens <= {most}",
        )


def check_head_options(config: SpeculativeConfig) -> None:
    """Refuse options of draft heads with a method that has none.

    Raises:
        ConfigError: names the option and the methods that read it.
    """
    for name in ("quantization", "token_map"):
        if getattr(config, name) is not None and config.method not in HEADS:
            raise ConfigError(
                f"method {config.method!r} takes no {name}: it has no draft head",
                f'leave "{name}" out, or use the method {listed(HEADS)}',
            )


KEYED, SYNTHETIC = "keyed", "synthetic"
# Methods of vLLM and others with which speculation changes tokens.
_CHANGES_TOKENS = ("standard", "strict", "probabilistic", "block", "fly")


def check_acceptance_method(method: str) -> None:
    """Refuse methods of others that change tokens.

    Raises:
        ConfigError: names the method that does not.
    """
    if method in _CHANGES_TOKENS:
        raise ConfigError(
            f"rejection_sample_method {method!r} is not offered: its output would differ from "
            "plain decoding",
            f"use {KEYED!r}, which emits the same tokens as plain decoding",
        )


def check_acceptance(config: SpeculativeConfig) -> None:
    """Refuse a missing or wrong synthetic acceptance.

    Raises:
        ConfigError: names the key and its allowed values.
    """
    method = config.rejection_sample_method
    rates, length = config.synthetic_acceptance_rates, config.synthetic_acceptance_length
    num_given = (rates is not None) + (length is not None)
    if method == KEYED and num_given:
        raise ConfigError(
            "synthetic acceptance is set, but drafts are verified by keyed sampling",
            f'set "rejection_sample_method": "{SYNTHETIC}" to measure times, or leave it out',
        )
    if method == SYNTHETIC and num_given != 1:
        raise ConfigError(
            f"synthetic acceptance needs one of rates and length, {num_given} were given",
            "give synthetic_acceptance_rates or synthetic_acceptance_length",
        )
    if rates is not None:
        _check_rates(rates, config.num_speculative_tokens)
    most = config.num_speculative_tokens + 1
    if length is not None and not 1 <= length <= most:
        raise ConfigError(
            f"synthetic_acceptance_length={shown(length)} is not possible",
            f"use a number from 1 to {most}, the drafts and the target's own token",
        )


def _check_rates(rates: Sequence[float], num_drafts: int) -> None:
    falls = all(a >= b for a, b in itertools.pairwise(rates))
    if not rates or not falls or not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(
            f"synthetic_acceptance_rates={shown(list(rates))} are not possible",
            "give numbers from 0 to 1 that never increase",
        )
    if len(rates) > num_drafts:
        raise ConfigError(
            f"{len(rates)} synthetic_acceptance_rates were given for {num_drafts} drafts",
            "give at most one per draft",
        )


def check_extraction(config: SpeculativeConfig) -> None:
    """Check the options of extraction, and refuse them with other methods.

    Raises:
        ConfigError: names the key and what it needs.
    """
    layers = config.eagle_aux_hidden_state_layer_ids
    if config.method != EXTRACT:
        for name in ("shared_storage_path", "eagle_aux_hidden_state_layer_ids"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"method {config.method!r} takes no {name}", f"it belongs to {EXTRACT!r}"
                )
        return
    if not config.shared_storage_path:
        raise ConfigError(
            f"method {EXTRACT!r} needs a directory to write to", 'set "shared_storage_path"'
        )
    if layers is not None and not (
        layers and all(isinstance(i, int) and 0 <= i < 2**31 for i in layers)
    ):
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids={shown(layers)} are no layers",
            "give a list of integers from 0 on",
        )
    if config.rejection_sample_method == SYNTHETIC:
        raise ConfigError(
            f"method {EXTRACT!r} with synthetic acceptance would record tokens that are made up",
            "leave rejection_sample_method out",
        )
