"""Which models several ranks can run together."""

from __future__ import annotations

from sametoken.errors import ConfigError, UnsupportedError
from sametoken.models.base import ModelConfig
from sametoken.models.registry import model_class

#: Sampling draws its noise for so many token ids at a time.
_VOCABULARY_UNIT = 4


def require_divisible(config: ModelConfig, size: int) -> None:
    """Refuse a model whose heads, features or tokens ``size`` ranks cannot divide evenly.

    Raises:
        UnsupportedError: the architecture is not implemented for several ranks.
        ConfigError: a size does not divide; named by its key in config.json.
    """
    if size == 1:
        return
    if not model_class(config.architecture).tensor_parallel:
        raise UnsupportedError(
            f"tensor_parallel_size={size} with {config.architecture} is not implemented",
            "use tensor_parallel_size=1",
        )
    for name, count, unit in (
        ("num_attention_heads", config.num_heads, 1),
        ("num_key_value_heads", config.num_kv_heads, 1),
        ("intermediate_size", config.intermediate_size, 1),
        ("vocab_size", config.vocab_size, _VOCABULARY_UNIT),
    ):
        if count % (size * unit):
            raise ConfigError(
                f"tensor_parallel_size={size} does not divide the model: {name}={count} "
                f"is no multiple of {size * unit}",
                "use a size that divides it, or 1",
            )
