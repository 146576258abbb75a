"""A model whose weights are not read yet, which takes seconds and not minutes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sametoken.config import EngineConfig
from sametoken.engine.input_processor import InputProcessor
from sametoken.engine.load import Requested, validate
from sametoken.engine.sampling_defaults import default_sampling_params
from sametoken.models.base import ModelConfig
from sametoken.text.tokenizer import Tokenizer, all_eos_ids, load_tokenizer_of, require_own_end
from sametoken.types.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """Refuses prompts and parameters as the loaded model would, before anyone waits for it.

    Attributes:
        requested: the engine's options, validated.
        inputs: checks requests; memory may lower the loaded model's ``max_model_len``.
    """

    requested: Requested
    inputs: InputProcessor

    @classmethod
    def of(cls, config: EngineConfig, announce: Callable[[str], None]) -> UnloadedModel:
        """Validate options and load the tokenizer; errors as ``build_engine``."""
        requested = validate(config, announce)
        architecture, config = requested.architecture, requested.config
        tokenizer = load_tokenizer_of(config, requested.path)
        require_own_end(tokenizer, architecture.vocab_size)
        longest = requested.max_model_len
        return cls(requested, inputs_of(tokenizer, architecture, config, longest))

    def get_default_sampling_params(self) -> SamplingParams:
        """As ``LLM.get_default_sampling_params``."""
        requested = self.requested
        return default_sampling_params(requested.path, requested.config.generation_config)


def inputs_of(
    tokenizer: Tokenizer | None, model: ModelConfig, config: EngineConfig, max_model_len: int
) -> InputProcessor:
    """What checks the requests of an engine in this process."""
    return InputProcessor(
        tokenizer,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=all_eos_ids(model.eos_token_ids, tokenizer),
        num_speculative_tokens=config.num_speculative_tokens,
        seed=config.seed,
    )
