"""Whether an engine can run prompts in a faster form (``EngineConfig.fast_prompts_from``)."""

from __future__ import annotations

from collections.abc import Sequence

from sametoken.config import EngineConfig
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.models.deepseek import LatentSizes
from sametoken.ops.backend import Kernels
from sametoken.ops.cache_types import LatentKV, LayerCache, Recurrent
from sametoken.ops.model.recurrent.rule import FAST_ROWS
from sametoken.scheduler.plan_draft import SHARE
from sametoken.types.fast_prompts import FastForm


def fast_form(config: EngineConfig, caches: Sequence[LayerCache]) -> FastForm:
    """Of a target's prompts, given the caches of its layers."""
    recurs = any(isinstance(one, Recurrent) for one in caches)
    return FastForm(config.fast_prompts_from, FAST_ROWS if recurs else 1)


def require_fast_form(config: EngineConfig, caches: Sequence[LayerCache]) -> None:
    """Refuse fast prompts of a model without such a form, or in steps in which they might starve.

    Args:
        config: the user's options, sizes resolved.
        caches: of the target's layers.

    Raises:
        ConfigError: names the option.
    """
    if not config.fast_prompts_from:
        return
    asked, form = f"fast_prompts_from={config.fast_prompts_from}", fast_form(config, caches)
    needed = form.multiple
    if form.expands and not any(isinstance(one, LatentKV) for one in caches):
        raise ConfigError(
            f"{asked}, and the model has neither latent attention (MLA) nor recurrent layers",
            "leave the option out",
        )
    if (config.lora_modules or config.enable_lora) and form.expands:
        raise ConfigError(
            "prompts in the expanded form have no adapters",
            "leave fast_prompts_from, or lora_modules and enable_lora out",
        )
    # Of every second step the oldest prompt is sure of a share, without what short ones take.
    share = max(1, config.max_num_batched_tokens // SHARE)
    if share - share // SHARE < needed:
        least = next(n for n in range(needed, 2 * needed) if n - n // SHARE >= needed) * SHARE
        raise ConfigError(
            f"{asked}, and steps of {config.max_num_batched_tokens} rows are not sure to have "
            f"{needed} of them for a prompt beside requests that decode",
            f"raise max_num_batched_tokens to {least} or more, or leave the option out",
        )
    if config.prefill_chunk_size < needed:
        raise ConfigError(
            f"{asked}, whose chunks have {needed} tokens at least, and prefill_chunk_size="
            f"{config.prefill_chunk_size}",
            f"raise prefill_chunk_size to {needed} or more, or leave one of them out",
        )


def require_expandable(sizes: LatentSizes, kernels: Kernels) -> None:
    """Refuse fast prompts where the kernels have no attention over expanded heads.

    Raises:
        UnsupportedError: with the reason.
    """
    try:
        kernels.require(sizes.expanded(num_ranks=1).attention)
    except UnsupportedError as error:
        cause = f"prompts cannot be expanded: {error.cause}"
        raise UnsupportedError(cause, "leave fast_prompts_from out") from error
