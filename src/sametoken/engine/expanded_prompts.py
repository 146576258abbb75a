"""Whether an engine can expand prompts (``EngineConfig.expand_prompts_from``)."""

from __future__ import annotations

from collections.abc import Iterable

from sametoken.config import EngineConfig
from sametoken.engine.step_memory import mixers_of
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.models.decoder import Decoder
from sametoken.ops.cache_types import LatentKV, LayerCache
from sametoken.ops.model.latent_attention.shape import ExpandedShape


def require_latents(config: EngineConfig, caches: Iterable[LayerCache]) -> None:
    """Refuse to expand the prompts of a model without latents.

    Raises:
        ConfigError: names the option.
    """
    if config.expand_prompts_from and not any(isinstance(one, LatentKV) for one in caches):
        raise ConfigError(
            f"expand_prompts_from={config.expand_prompts_from}, and the model has no latent "
            "attention (MLA)",
            "leave the option out",
        )


def require_expandable(target: Decoder) -> None:
    """Refuse to expand prompts where the kernels have no attention over such heads.

    Raises:
        UnsupportedError: with the reason.
    """
    for one in mixers_of(target.layers):
        if isinstance(one, ExpandedShape):
            try:
                target.kernels.require(one.attention)
            except UnsupportedError as error:
                cause = f"prompts cannot be expanded: {error.cause}"
                raise UnsupportedError(cause, "leave expand_prompts_from out") from error
