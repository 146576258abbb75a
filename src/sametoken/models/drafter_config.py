"""Complete a speculative config from the drafter's checkpoint: its method and its k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sametoken.config import SpeculativeConfig
from sametoken.io.files import is_there
from sametoken.models.load.files import INDEX_PICKLED, SINGLE_PICKLED, read_json_object
from sametoken.models.load.huggingface import open_weights
from sametoken.types.speculative_config import HEAD_NUM_TOKENS
from sametoken.types.speculative_methods import MAX_SPECULATIVE_TOKENS, METHODS, TABLE

_CONFIG = "config.json"
_WEIGHTS = ("*.safetensors", SINGLE_PICKLED, INDEX_PICKLED)
_SPECULATORS = "speculators_model_type"


def complete_drafter(
    spec: SpeculativeConfig | None,
) -> tuple[SpeculativeConfig | None, dict[str, str]]:
    """The config with a method and k, and the reason for what the checkpoint told.

    It has the path of its drafter in place of a name.

    Raises:
        CheckpointError: the drafter's files cannot be read.
        ConfigError: the method that they tell does not fit the other keys.
    """
    if spec is None or spec.is_complete or spec.model is None:
        return spec, {}
    path = Path(spec.model)
    config = read_json_object(path / _CONFIG) if is_there(path / _CONFIG) else {}
    method = spec.method or _method(path, config)
    complete = replace(spec, method=method)
    if not complete.is_complete:
        k = _own_k(config, method) or max(HEAD_NUM_TOKENS, complete.num_model_tokens)
        complete = replace(complete, num_speculative_tokens=k)
    why = f"completed for {path}: {method}, {complete.num_speculative_tokens} drafts per step"
    return complete, {"speculative_config": why}


def _method(path: Path, config: Mapping[str, Any]) -> str:
    """The method of a checkpoint: that of a draft head, or ``draft_model``."""
    if (stated := config.get(_SPECULATORS)) in METHODS:
        return str(stated)
    if "draft_vocab_size" in config:
        return "eagle3"
    architectures = str(config.get("architectures")).lower()
    parts = [(part, name) for name, method in TABLE.items() for part in method.architectures]
    # The longest part tells: "eagle3" holds "eagle".
    if found := [one for one in parts if one[0] in architectures]:
        return max(found, key=lambda one: len(one[0]))[1]
    if (stated := config.get("model_type")) in METHODS:
        return str(stated)
    # FasterDecoding's configs name nothing.
    if "medusa_num_heads" in config:
        return "medusa"
    # A head of the first EAGLE has the config.json of a Llama.
    has_weights = any(any(path.glob(one)) for one in _WEIGHTS)
    # Quantized or not.
    names = open_weights(path).names() if has_weights else ()
    return "eagle" if any(name.startswith("fc.weight") for name in names) else "draft_model"


def _own_k(config: Mapping[str, Any], method: str) -> int | None:
    """The drafts per step that a head's config proposes, in ``speculators``' form or its own."""
    nested = config.get("speculators_config")
    methods = nested.get("proposal_methods") if isinstance(nested, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    stated = [first.get("speculative_tokens")] if isinstance(first, dict) else []
    stated += [config.get(key) for key in TABLE[method].own_k]
    possible = (k for k in stated if type(k) is int and 1 <= k <= MAX_SPECULATIVE_TOKENS)
    return next(possible, None)
