"""Which class runs which architecture.

Which models several ranks can run together.
"""

from __future__ import annotations

from sametoken.errors import ConfigError, UnsupportedError
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.llama import LlamaForCausalLM, MistralForCausalLM
from sametoken.models.qwen3 import Qwen3ForCausalLM
from sametoken.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3NextForCausalLM

ARCHITECTURES: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5ForConditionalGeneration": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5ForCausalLM,
}


def model_class(architecture: str) -> type[Decoder]:
    """The class for a Hugging Face architecture name.

    Raises:
        UnsupportedError: no class runs it.
    """
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"architecture {architecture!r} is not supported", f"known: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[architecture]


#: Sampling draws its noise for so many token ids at a time.
_VOCABULARY_UNIT = 4


def require_divisible(config: ModelConfig, size: int) -> None:
    """Refuse a model whose heads, features or tokens ``size`` ranks cannot divide evenly.

    Raises:
        UnsupportedError: no class runs the architecture.
        CheckpointError: a size is missing or impossible.
        ConfigError: a size does not divide; named by its key in config.json.
    """
    if size == 1:
        return
    for name, count in model_class(config.architecture).divided_sizes(config).items():
        _require_multiple(name, count, size, size)
    _require_multiple("vocab_size", config.vocab_size, size * _VOCABULARY_UNIT, size)


def _require_multiple(name: str, count: int, unit: int, size: int) -> None:
    if count % unit:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the model: {name}={count} "
            f"is no multiple of {unit}",
            "use a size that divides it, or 1",
        )
