"""Options of training: each defined once here, and from here fed to Python, CLI help and docs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sametoken.config import option
from sametoken.errors import ConfigError
from sametoken.models.load.settings import MAX_EXPERTS
from sametoken.types.option_values import listed, require_least
from sametoken.types.speculative_methods import default_aux_layers

MAX_SEED = 2**31 - 1
DTYPES = ("auto", "bfloat16", "float32")
ARCHITECTURES = ("hybrid", "nemotron_h", "llama")


def _validation() -> Any:
    return option(0.02, "share of the prompts that is held back to measure with")


def require_seconds(max_seconds: float | None) -> None:
    """Refuse a time in which nothing can be done; None is no limit.

    Raises:
        ConfigError: it is not a finite number above 0.
    """
    if max_seconds is not None and not 0 < max_seconds < math.inf:
        raise ConfigError(f"max_seconds={max_seconds} is not possible", "use a number above 0")


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How long and how fast to train, on what, and where from.

    Raises:
        ConfigError: a value is impossible on its face.
    """

    steps: int = option(1000, "optimizer steps, at most")
    max_seconds: float | None = option(
        None, "fewer steps if they would not fit this time in all; decided after warm-up"
    )
    batch_tokens: int = option(16384, "tokens of a batch, padding counted")
    max_length: int = option(
        1024, "cut sequences to this number of tokens, and to the target's context"
    )
    learning_rate: float = option(1e-3, "highest learning rate; it falls to 0 as a cosine does")
    warmup_steps: int = option(100, "steps over which the learning rate rises from 0")
    weight_decay: float = option(0.0, "AdamW's, of matrices alone")
    clip_norm: float = option(1.0, "longest gradient; a longer one is scaled down to it")
    validation: float = _validation()
    prompt_rows: bool = option(False, "train on the tokens of prompts as well as of answers")
    seed: int = option(0, "of weights and of the order of the data")
    checkpoint_every: int = option(
        0, "steps between checkpoints; 0: only at the end and after Ctrl-C"
    )
    resume: bool = option(False, "go on from the checkpoint in the output directory")
    device: str = option("auto", "auto, cpu or cuda")
    dtype: str = option("auto", "auto, bfloat16 or float32: of matrix products; weights are fp32")

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is not possible", f"use {listed(DTYPES)}")
        require_least(self, steps=1, batch_tokens=1, max_length=3, warmup_steps=1)
        require_least(self, checkpoint_every=0, seed=0)
        if self.seed > MAX_SEED:
            raise ConfigError(f"seed={self.seed} is not possible", f"use at most {MAX_SEED}")
        if not 0 < self.learning_rate < math.inf or not self.clip_norm > 0:
            raise ConfigError(
                f"learning_rate={self.learning_rate} and clip_norm={self.clip_norm} are not both "
                "possible",
                "use numbers above 0, and a finite learning rate",
            )
        if not 0 <= self.weight_decay < math.inf or not 0 <= self.validation < 1:
            raise ConfigError(
                f"weight_decay={self.weight_decay} and validation={self.validation} are not "
                "both possible",
                "use a weight decay of 0 or more, and a share from 0 to below 1",
            )
        require_seconds(self.max_seconds)

    def longest(self, context: int) -> int:
        """Tokens of the longest sequence, for a target with a context of ``context`` tokens."""
        return min(self.max_length, context)


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """The head, and how far training unrolls it.

    Raises:
        ConfigError: a value is impossible on its face.
    """

    ttt_steps: int = option(7, "training-time test: drafts in a row that are trained")
    step_loss_decay: float = option(0.8, "weight of a draft's loss against the one before it")
    draft_vocab_size: int = option(
        32000, "tokens that the head can propose, the most frequent ones; at most the target's"
    )
    intermediate_size: int | None = option(None, "of the head's MLP; default the target's")
    num_kv_heads: int | None = option(
        None, "key-value heads of the head's attention; default the target's"
    )
    aux_layers: str | None = option(
        None, "three layers whose inputs the head reads, as in 2,15,27; default 2, n // 2, n - 3"
    )
    norm_before_residual: bool = option(True, "the residual stream begins after the hidden norm")
    cache_states: bool = option(True, "keep the target's hidden states in memory if they fit")

    def __post_init__(self) -> None:
        if self.ttt_steps < 1 or self.draft_vocab_size < 2:
            raise ConfigError(
                f"ttt_steps={self.ttt_steps} and draft_vocab_size={self.draft_vocab_size} are "
                "not both possible",
                "use at least 1 step and 2 tokens",
            )
        if not 0 < self.step_loss_decay <= 1:
            raise ConfigError(
                f"step_loss_decay={self.step_loss_decay} is not possible",
                "use a number above 0 and up to 1",
            )
        require_least(self, intermediate_size=1, num_kv_heads=1)
        self.layer_ids(3)

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The target's layers whose inputs the head reads, as ``Decoder`` counts them.

        Raises:
            ConfigError: they are not three numbers.
        """
        if self.aux_layers is None:
            return default_aux_layers(num_layers)
        parts = self.aux_layers.split(",")
        if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
            raise ConfigError(
                f"aux_layers={self.aux_layers!r} does not name three layers", "give 2,15,27"
            )
        return tuple(int(part) for part in parts)


@dataclass(frozen=True, slots=True)
class MTPOptions:
    """How far training unrolls a module for further tokens.

    Raises:
        ConfigError: a value is impossible on its face.
    """

    ttt_steps: int = option(3, "drafts in a row that are trained")
    step_loss_decay: float = option(0.8, "weight of a draft's loss against the one before it")
    cache_states: bool = option(True, "keep the target's hidden states in memory if they fit")

    def __post_init__(self) -> None:
        if self.ttt_steps < 1 or not 0 < self.step_loss_decay <= 1:
            raise ConfigError(
                f"ttt_steps={self.ttt_steps} and step_loss_decay={self.step_loss_decay} are not "
                "both possible",
                "use at least 1 step, and a weight above 0 and up to 1",
            )


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Sizes of a drafter that is a model of its own.

    Raises:
        ConfigError: a value is impossible on its face.
    """

    hidden_size: int = option(256, "elements of a hidden state")
    num_layers: int = option(4, "decoder layers")
    num_heads: int = option(4, "attention heads")
    intermediate_size: int | None = option(None, "of the MLP; default 4 hidden sizes")
    verified_drafts: int = option(4, "drafts in a row whose acceptance is shown")
    cache_states: bool = option(True, "keep the target's hidden states in memory if they fit")

    def __post_init__(self) -> None:
        sizes = (self.hidden_size, self.num_layers, self.num_heads, self.verified_drafts)
        if min(sizes) < 1 or self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"{self.num_heads} heads of {self.num_layers} layers over {self.hidden_size} "
                "hidden elements are not possible",
                "use a hidden size that is an even number of times the heads",
            )
        require_least(self, intermediate_size=1)


@dataclass(frozen=True, slots=True)
class LMOptions:
    """The architecture of a new model; the defaults give 29 million parameters.

    Raises:
        ConfigError: a value is impossible on its face.
    """

    architecture: str = option(
        "hybrid",
        "hybrid (Qwen3.5: three Gated DeltaNet layers, then full attention), nemotron_h or llama",
    )
    vocab_size: int = option(8192, "tokens of the tokenizer, at most")
    hidden_size: int = option(384, "elements of a hidden state")
    intermediate_size: int = option(1024, "of the MLP")
    num_layers: int = option(12, "decoder layers")
    num_heads: int = option(6, "attention heads")
    num_kv_heads: int = option(2, "key-value heads")
    head_dim: int = option(64, "elements of an attention head")
    linear_key_heads: int = option(4, "key heads of Gated DeltaNet; groups of Mamba-2")
    linear_value_heads: int = option(8, "value heads of Gated DeltaNet; heads of Mamba-2")
    linear_head_dim: int = option(64, "elements of their heads; width of Mamba-2's state too")
    pattern: str | None = option(
        None,
        "layers of a nemotron_h: M for Mamba-2, * attention, E experts, - MLP; default the first "
        "num_layers of MEM*E again and again",
    )
    num_experts: int = option(8, "experts of a nemotron_h's layer, beside the shared one")
    num_experts_per_tok: int = option(2, "experts that a token meets")
    moe_intermediate_size: int = option(384, "of an expert's MLP; the shared one has the MLP's")
    mtp_steps: int | None = option(
        None,
        "drafts in a row of the multi-token-prediction module; 0: none; default 3, "
        "and 0 for a llama, which has no module",
    )
    mtp_weight: float = option(0.3, "weight of the module's loss")

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(
                f"architecture={self.architecture!r} is not known", f"use {listed(ARCHITECTURES)}"
            )
        if self.pattern is not None and (not self.pattern or set(self.pattern) - set("M*E-")):
            raise ConfigError(
                f"pattern={self.pattern!r} is not possible", "use the letters M, *, E and -"
            )
        chosen, experts = self.num_experts_per_tok, self.num_experts
        if not 0 < chosen <= experts <= MAX_EXPERTS or self.moe_intermediate_size < 1:
            raise ConfigError(
                f"{chosen} of {experts} experts of {self.moe_intermediate_size} features are not "
                "possible",
                f"use at least 1 of each, and no more than there are or {MAX_EXPERTS}",
            )
        if self.architecture == "llama" and self.mtp_steps:
            raise ConfigError("a llama has no multi-token-prediction module", "leave mtp_steps out")
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.num_layers)
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        linear = (self.linear_key_heads, self.linear_value_heads, self.linear_head_dim)
        if min(*sizes, *heads, *linear) < 1:
            raise ConfigError("a size of the model is below 1", "use sizes of at least 1")
        if self.module_steps < 0 or not 0 <= self.mtp_weight < math.inf:
            raise ConfigError(
                f"mtp_steps={self.module_steps} and mtp_weight={self.mtp_weight} are not both "
                "possible",
                "use 0 or more of each",
            )
        for count, shared, what in (
            (self.num_heads, self.num_kv_heads, "attention"),
            (self.linear_value_heads, self.linear_key_heads, "Gated DeltaNet"),
        ):
            if count % shared:
                raise ConfigError(
                    f"{count} heads of {what} cannot share {shared}", "use a multiple of it"
                )
        if self.head_dim % 4:
            raise ConfigError(f"head_dim={self.head_dim} is not possible", "use a multiple of 4")

    @property
    def module_steps(self) -> int:
        """``mtp_steps``, or the architecture's own."""
        if self.mtp_steps is None:
            return 0 if self.architecture == "llama" else 3
        return self.mtp_steps

    @property
    def layer_letters(self) -> str:
        """The layers of a nemotron_h, a letter each."""
        return self.pattern or ("MEM*E" * self.num_layers)[: self.num_layers]


@dataclass(frozen=True, slots=True)
class TokenMapOptions:
    """How large a map of a draft head's tokens is.

    Raises:
        ConfigError: a value is impossible on its face.
    """

    size: int = option(32768, "tokens of the map, the most frequent ones of the answers")
    validation: float = _validation()

    def __post_init__(self) -> None:
        require_least(self, size=1)
        if not 0 <= self.validation < 1:
            raise ConfigError(
                f"validation={self.validation} is not possible", "use a share from 0 to below 1"
            )
