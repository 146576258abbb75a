"""Options of speculation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sametoken.errors import ConfigError, shown
from sametoken.types.option_values import (
    choice,
    json_object,
    listed,
    option,
    require_choices,
    require_limits,
    require_path,
    require_types,
    suggestion,
    typed,
)
from sametoken.types.speculative_checks import (
    KEYED,
    SYNTHETIC,
    check_acceptance,
    check_acceptance_method,
    check_cascade,
    check_extraction,
    check_head_options,
    without_vllm_keys,
)
from sametoken.types.speculative_methods import (
    CASCADED,
    DRAFTING,
    EXTRACT,
    HEADS,
    LOOKUPS,
    MAX_SPECULATIVE_TOKENS,
    METHODS,
    TABLE,
    WITH_MODEL,
    WITHOUT_MODEL,
    Checkpoint,
)

# vLLM's former, model-specific names of "mtp".
METHOD_ALIASES = dict.fromkeys(
    (
        "qwen3_next_mtp",
        "qwen3_5_mtp",
        "deepseek_mtp",
        "glm4_moe_mtp",
        "glm4_moe_lite_mtp",
        "nemotron_h_mtp",
        "nextn",
    ),
    "mtp",
)
# Quantizations of draft heads.
QUANTIZATIONS = ("fp8",)
# Each further token costs one more pass over the matches.
MAX_LOOKUP_TOKENS = 1024
#: The k of a head whose checkpoint states none.
HEAD_NUM_TOKENS = 4
ADAPTIVE, FIXED = "adaptive", "fixed"
# Prefix of a key's name in an error.
_SPECULATIVE = "speculative config: "
# What JSON is wanted for, with an example.
_JSON = ("speculative config", '{"method": "ngram", "num_speculative_tokens": 5}')


def cascade_label(cascade: str | None, own: str) -> str:
    """A drafter's name, with the lookup that goes first if it is a cascade."""
    return f"cascade ({cascade}, then {own})" if cascade else own


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding options, with the keys of vLLM's ``--speculative-config``.

    Raises:
        ConfigError: a value is impossible or a key that the method needs is missing.
    """

    method: str = option(
        "",
        "how drafts are made; where it is left out, the checkpoint of model tells it",
        choices=METHODS,
        methods=METHODS,
    )
    num_speculative_tokens: int = option(
        0,
        f"maximum number of drafts per step, k; mtp: at most {TABLE['mtp'].limits[1]}; medusa and "
        "mlp_speculator: at most those of the head",
        limits=(1, MAX_SPECULATIVE_TOKENS),
        methods=METHODS,
    )
    model: str | None = option(
        None,
        "the drafter's checkpoint or hub id, or smollm2-eagle3; eagle3 may leave it out with "
        "smollm2",
        methods=WITH_MODEL,
    )
    prompt_lookup_max: int = option(
        5, "longest suffix to match, in tokens", limits=(1, MAX_LOOKUP_TOKENS), methods=("ngram",)
    )
    prompt_lookup_min: int = option(
        1, "shortest suffix to match, in tokens", limits=(1, MAX_LOOKUP_TOKENS), methods=("ngram",)
    )
    suffix_decoding_max_tree_depth: int = option(
        24, "longest match, in tokens", limits=(1, 64), methods=("suffix",)
    )
    suffix_decoding_max_cached_requests: int = option(
        0,
        "earlier requests whose text is matched too, as far as 256 MiB hold them",
        limits=(0, 2**20),
        methods=("suffix",),
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, "drafts for a matched token", limits=(0, 64), methods=("suffix",)
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "share of the matches that must agree on a draft", limits=(0, 1), methods=("suffix",)
    )
    quantization: str | None = option(
        None,
        "on a GPU: fp8 keeps the head's matrices as float8 e4m3",
        choices=QUANTIZATIONS,
        methods=HEADS,
    )
    token_map: str | None = option(
        None, "file with a JSON list of the only tokens that the head may propose", methods=HEADS
    )
    cascade: str | None = option(
        None,
        "the method that drafts first where it matches; it reads its own keys",
        choices=LOOKUPS,
        methods=CASCADED,
    )
    cascade_min_match: int = option(
        4, "shortest match of the cascade, in tokens", limits=(1, 64), methods=CASCADED
    )
    cascade_model_tokens: int | None = option(
        None,
        "maximum drafts of the method itself where the cascade does not match; default k",
        limits=(1, MAX_SPECULATIVE_TOKENS),
        methods=CASCADED,
    )
    rejection_sample_method: str = option(
        KEYED,
        "keyed emits the tokens of plain decoding; synthetic accepts drafts by chance, to measure "
        "times alone",
        choices=(KEYED, SYNTHETIC),
        methods=DRAFTING,
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = option(
        None,
        "synthetic: how often draft i and all before it are accepted, 0..1; 0 from its end on",
        methods=DRAFTING,
    )
    synthetic_acceptance_length: float | None = option(
        None,
        "synthetic: mean tokens per step instead, the target's own counted, 1..k+1",
        methods=DRAFTING,
    )
    draft_limits: str = option(
        ADAPTIVE,
        "adaptive: a request's drafts follow its matches, its acceptance and the load; "
        "fixed: always num_speculative_tokens",
        choices=(ADAPTIVE, FIXED),
        methods=DRAFTING,
    )
    shared_storage_path: str | None = option(
        None, "directory for the shards and their manifest; must be given", methods=(EXTRACT,)
    )
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = option(
        None,
        "layers whose inputs are kept, 0..n; default 2, n // 2 and n - 3, as EAGLE-3 reads them",
        methods=(EXTRACT,),
    )

    @property
    def is_complete(self) -> bool:
        """Whether the method and k are known; else the drafter's checkpoint completes them."""
        return bool(self.method) and (self.num_speculative_tokens != 0 or self.method == EXTRACT)

    @property
    def proposes(self) -> bool:
        """Whether the method proposes drafts; only extraction does not."""
        return self.method != EXTRACT and self.num_speculative_tokens > 0

    @property
    def label(self) -> str:
        """The method for people and metrics; a cascade with the lookup that goes first.

        The drafter's model where its checkpoint tells the method.
        """
        return cascade_label(self.cascade, self.method or str(self.model))

    @property
    def num_model_tokens(self) -> int:
        """Maximum drafts of the method's own drafter; a cascade's lookup may propose more."""
        own = self.cascade_model_tokens
        return self.num_speculative_tokens if own is None else own

    @property
    def shortest_match(self) -> int:
        """The least tokens that a lookup matches; a cascade's has to match more."""
        return 1 if self.cascade is None else self.cascade_min_match

    @property
    def synthetic_rates(self) -> tuple[float, ...] | None:
        """Probabilities that draft i and all before it are accepted; None for keyed sampling.

        An acceptance length fills the first drafts: 2.6 gives rates 1, 0.6, 0, ...
        """
        k = self.num_speculative_tokens
        if self.synthetic_acceptance_rates is not None:
            given = tuple(map(float, self.synthetic_acceptance_rates))
            return given + (0.0,) * (k - len(given))
        if self.synthetic_acceptance_length is None:
            return None
        drafts = self.synthetic_acceptance_length - 1
        return tuple(min(max(drafts - i, 0.0), 1.0) for i in range(k))

    def __post_init__(self) -> None:
        require_types(self, _SPECULATIVE)
        for name in ("model", "token_map", "shared_storage_path"):
            require_path(_SPECULATIVE + name, getattr(self, name))
        self._check_method()
        check_acceptance_method(self.rejection_sample_method)
        require_choices(self)
        require_limits(self, skip=("num_speculative_tokens", "cascade_model_tokens"))
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} and "
                f"prompt_lookup_max={self.prompt_lookup_max} leave nothing to match",
                "use min <= max",
            )
        if self.method:
            self._check_model()
            check_head_options(self)
            check_extraction(self)
        if self.method and self.num_speculative_tokens == 0:
            object.__setattr__(self, "num_speculative_tokens", self._default_num_tokens())
        if self.num_speculative_tokens != 0:
            self._check_num_tokens()
        if self.is_complete:
            check_cascade(self)
            check_acceptance(self)

    def _check_method(self) -> None:
        if not self.method and not self.model:
            raise ConfigError(
                "speculative config names neither a method nor a model",
                f'set "method" to {listed(METHODS)}, or "model" to a drafter\'s checkpoint',
            )
        if self.method and self.method not in METHODS:
            raise ConfigError(
                f"speculative method {shown(self.method)} is not known",
                choice(self.method, METHODS),
            )

    def _check_model(self) -> None:
        if TABLE[self.method].checkpoint is Checkpoint.REQUIRED and not self.model:
            raise ConfigError(f"method {self.method!r} needs a drafter", 'set "model"')
        if self.method in WITHOUT_MODEL and self.model:
            raise ConfigError(
                f"method {self.method!r} loads no drafter of its own", 'leave "model" out'
            )

    def _default_num_tokens(self) -> int:
        """The method's own k; 0 if the head's checkpoint may tell it."""
        if self.method == "suffix":
            return self.suffix_decoding_max_tree_depth
        return TABLE[self.method].num_tokens

    def _check_num_tokens(self) -> None:
        limits = TABLE[self.method].limits if self.method else (1, MAX_SPECULATIVE_TOKENS)
        least, most = limits
        if not least <= self.num_model_tokens <= most:
            of_method = f" with method {self.method!r}" if self.method else ""
            raise ConfigError(
                f"num_speculative_tokens={shown(self.num_model_tokens)} is not possible{of_method}",
                f"use an integer from {least} to {most}",
            )

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """Parse JSON text, a method's name, a mapping, or an instance.

        Accepts vLLM's older method names, and its keys whose values describe what happens here.

        Raises:
            ConfigError: malformed JSON, an unknown key, or a value of the wrong type.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            # No JSON object is an identifier, and every method's name is one.
            is_name = value.isidentifier()
            value = {"method": value} if is_name else json_object(value, *_JSON)
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"speculative_config={shown(value)} is not possible", "give a mapping or its JSON"
            )
        value = without_vllm_keys(value)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key in value:
            if key not in fields:
                raise ConfigError(
                    f"unknown key {shown(key)} in speculative config",
                    f"{suggestion(str(key), fields)} (sametoken help speculative explains all)",
                )
        given = {
            key: typed(_SPECULATIVE + key, fields[key].type, one) for key, one in value.items()
        }
        method = given.get("method", "")
        config = cls(**given | {"method": METHOD_ALIASES.get(method, method)})
        if given.get("num_speculative_tokens") == 0 and config.method != EXTRACT:
            raise ConfigError(
                "num_speculative_tokens=0 is not possible: nothing would be drafted",
                f"use an integer from 1 to {MAX_SPECULATIVE_TOKENS}, or leave it out for the "
                "method's own",
            )
        return config
