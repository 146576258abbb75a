"""Loading Mamba-2: sizes, weights and caches, by Nemotron-H's names of keys."""

from __future__ import annotations

import math
from dataclasses import replace
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.layers.mamba2 import Mamba2Mixer
from sametoken.layers.parallel import SINGLE_RANK, TensorParallel
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import attention_cache
from sametoken.models.decoder import Decoder
from sametoken.models.layer_types import FULL, LINEAR
from sametoken.models.load.settings import COMPARE, MAX_HEAD_DIM, MAX_LAYERS, Settings
from sametoken.models.load.weights import Part, Split, WeightReader
from sametoken.ops.cache_types import LayerCache, Recurrent, Stateless
from sametoken.ops.model.mamba2.rule import Mamba2, Mamba2Params

#: What transformers assumes of Bamba's keys, and of its kin's.
IMPLIED_SIZES = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
#: Keys of Falcon-H1, which transformers' other classes of Mamba-2 pass over.
OF_FALCON = ("mamba_rms_norm", "projectors_bias")
_OLD_TYPES = {"mamba": LINEAR, "attention": FULL}


def types_of_layers(settings: Settings) -> tuple[str, ...]:
    """The type of each layer, by ``layers_block_type`` or ``layer_types``; by default Mamba-2.

    Raises:
        CheckpointError: a key has an impossible value, or another number of layers.
    """
    count = settings.integer("num_hidden_layers", most=MAX_LAYERS)
    names = settings.names("layers_block_type") or settings.names("layer_types")
    types = tuple(_OLD_TYPES.get(name, name) for name in names) or (LINEAR,) * count
    if len(types) != count:
        raise CheckpointError(
            f"{settings.location}: layer_types={short(types)} does not name {count} layers", COMPARE
        )
    return types


def divided_by_type(config: ModelConfig) -> dict[str, int]:
    """``Decoder.divided_sizes`` of the types of layers that there are."""
    types = Settings(config.extra, config.architecture).names("layer_types")
    sizes = Decoder.divided_sizes(config)
    if FULL not in types:
        del sizes["num_attention_heads"]
    return sizes | ({"mamba_n_heads": config.extra["mamba_num_heads"]} if LINEAR in types else {})


def shared_by_type(config: ModelConfig) -> dict[str, int]:
    """``Decoder.shared_sizes`` of the types of layers that there are."""
    types = Settings(config.extra, config.architecture).names("layer_types")
    sizes = {"num_key_value_heads": config.num_kv_heads} if FULL in types else {}
    return sizes | ({"mamba_n_groups": config.extra["n_groups"]} if LINEAR in types else {})


def bamba_sizes(settings: Settings, inner: int | None = None) -> dict[str, Any]:
    """The keys of Bamba and its kin by the names that are read here.

    ``inner`` are the features of all heads, by default ``mamba_expand`` times the hidden size.

    Raises:
        CheckpointError: a size is missing or impossible.
    """
    inner = inner or settings.integer("mamba_expand") * settings.integer("hidden_size")
    heads = settings.integer("mamba_n_heads")
    size = settings.get("mamba_d_head", "auto")
    size = inner // heads if size == "auto" else settings.integer("mamba_d_head")
    if heads * size != inner:
        raise CheckpointError(
            f"{settings.location}: mamba_n_heads={heads} of mamba_d_head={size} do not have the "
            f"{inner} features of Mamba-2",
            COMPARE,
        )
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "n_groups": settings.integer("mamba_n_groups"),
        "ssm_state_size": settings.integer("mamba_d_state"),
        "conv_kernel": settings.integer("mamba_d_conv"),
        "use_conv_bias": settings.get("mamba_conv_bias"),
        "use_bias": settings.get("mamba_proj_bias"),
    }


def mamba2_rule(settings: Settings) -> Mamba2:
    """Sizes of the Mamba-2 layers.

    Raises:
        CheckpointError: a size is missing or impossible.
    """
    heads, groups = settings.integer("mamba_num_heads"), settings.integer("n_groups")
    if heads % groups:
        raise CheckpointError(
            f"{settings.location}: {heads} Mamba-2 heads in {groups} groups are not possible",
            COMPARE,
        )
    return Mamba2(
        heads,
        settings.integer("mamba_head_dim", most=MAX_HEAD_DIM),
        groups,
        settings.integer("ssm_state_size", most=MAX_HEAD_DIM),
        settings.integer("conv_kernel", most=MAX_HEAD_DIM),
    )


def time_step_limit(settings: Settings) -> tuple[float, float]:
    """Least and largest time step; transformers may write infinity as {"__float__": ...}."""
    given = settings.get("time_step_limit", [0.0, math.inf])
    try:
        low, high = (float(one["__float__"] if isinstance(one, dict) else one) for one in given)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        low = high = math.nan
    if not low <= high:
        raise CheckpointError(
            f"{settings.location}: time_step_limit={short(given)} is no range", COMPARE
        )
    return low, high


def mamba2_cache(settings: Settings, dtype: torch.dtype) -> Recurrent:
    """The cache declaration of a layer of Mamba-2.

    Raises:
        CheckpointError: a size is missing or impossible, or the limit of time steps is no range.
    """
    time_step_limit(settings)
    return Recurrent(mamba2_rule(settings), dtype)


def caches_by_type(
    config: ModelConfig, dtype: torch.dtype, location: str
) -> tuple[LayerCache, ...]:
    """As ``Decoder.caches_of``, where each layer is of one of ``layer_types``.

    Raises:
        CheckpointError: see ``mamba2_cache``.
    """
    settings = Settings(config.extra, location)
    types = settings.names("layer_types")
    kept: dict[str, LayerCache] = {FULL: attention_cache(config, dtype)}
    if LINEAR in types:
        kept[LINEAR] = mamba2_cache(settings, dtype)
    return tuple(kept.get(kind, Stateless()) for kind in types)


def load_mamba2(config: ModelConfig, weights: WeightReader, prefix: str) -> Mamba2Mixer:
    """Load the Mamba-2 block at ``prefix``; ranks divide its heads, and its groups if they can."""
    settings, hidden = Settings(config.extra, weights.source.location), config.hidden_size
    rule, rows = mamba2_rule(settings), Split.ROWS
    own = rule.divided(weights.parallel.size)
    sizes, ranks = (rule.out_features, *rule.xbc_sizes, rule.num_heads), own.ranks_per_group
    conv = Part(
        f"{prefix}.conv1d.weight",
        rule.conv_channels,
        split=rows,
        output_sizes=rule.xbc_sizes,
        ranks_per_share=(1, ranks, ranks),
    )
    bias = replace(conv, name=f"{prefix}.conv1d.bias")
    has_bias = settings.switch("use_bias")
    is_normed = settings.switch("mamba_rms_norm", default=True)
    # A norm reads whole groups.
    over: TensorParallel = weights.parallel if ranks > 1 else SINGLE_RANK
    split = Split.WHOLE if ranks > 1 else rows
    norm = Part(f"{prefix}.norm.weight", rule.out_features, split=split)

    def by_head(name: str) -> Tensor:
        return weights.tensor(
            Part(f"{prefix}.{name}", rule.num_heads, split=rows), dtype=torch.float32
        )

    params = Mamba2Params(
        own,
        A_log=by_head("A_log"),
        D=by_head("D"),
        dt_bias=by_head("dt_bias"),
        conv_weight=weights.tensor(conv, (1, rule.conv_kernel)).squeeze(1).t().contiguous(),
        conv_bias=weights.tensor(bias) if settings.switch("use_conv_bias", default=True) else None,
        time_step_limit=time_step_limit(settings),
    )
    into = Part(
        f"{prefix}.in_proj",
        sum(sizes),
        split=rows,
        output_sizes=sizes,
        ranks_per_share=(1, 1, ranks, ranks, 1),
    )
    return Mamba2Mixer(
        weights.kernels,
        projection=weights.linear(hidden, into, bias=has_bias),
        params=params,
        parallel=over,
        norm_weight=weights.tensor(norm) if is_normed else None,
        eps=config.rms_norm_eps,
        output=weights.row_parallel(
            rule.out_features,
            Part(f"{prefix}.out_proj", hidden),
            bias=settings.switch("projectors_bias", default=has_bias),
        ),
    )
