"""transformers' Llama, and the sizes that its config shares with others."""

from __future__ import annotations

from typing import Any

from transformers import AutoModel, LlamaConfig

from sametoken.errors import UnsupportedError
from sametoken.models.base import ModelConfig


def llama_model(config: ModelConfig) -> Any:
    """The decoder without its lm_head, an ``nn.Module``."""
    return AutoModel.from_config(llama_config(config))


def llama_config(config: ModelConfig, **options: Any) -> LlamaConfig:
    """transformers' config of a Llama of these sizes, without biases.

    Raises:
        UnsupportedError: transformers has no Llama of these sizes.
    """
    if config.hidden_size % config.num_heads:
        raise UnsupportedError(
            f"{config.num_heads} heads over {config.hidden_size} hidden elements are not possible "
            "in transformers' Llama",
            "use a hidden size that is a multiple of the number of heads",
        )
    return LlamaConfig(**sizes_of(config), attention_bias=False, mlp_bias=False, **options)


def sizes_of(config: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of a config that is named as Llama's."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": dict(config.rope),
    }
