"""Scales of keys and values in float8, as compressed-tensors and Model Optimizer write them.

They lie beside each attention block's projections, as ``X.k_scale`` and ``X.v_scale``, or in them,
as ``X.k_proj.k_scale`` and ``X.v_proj.v_scale``, in a floating dtype: [1] (strategy "tensor"), or
[num_kv_heads, 1, 1] (strategy "attn_head"). Latents have that of the keys alone, as in vLLM and
SGLang. A NextN module may have none.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sametoken.layers.parallel import of_rank
from sametoken.models.load.fp8_linear import positive
from sametoken.models.load.weights import WeightReader
from sametoken.ops.cache_types import LatentKV, LayerCache, PagedKV
from sametoken.ops.model.attention.kv import KVScales


def has_scales(weights: WeightReader, prefix: str) -> bool:
    """Whether there are scales of the attention block at ``prefix``."""
    return _name(weights, prefix, "k") in weights


def with_scales(whole: LayerCache, weights: WeightReader, prefix: str, strategy: str) -> LayerCache:
    """A cache on this rank with its scales, if it is one of an attention block: that at ``prefix``.

    ``strategy`` is as ``kv_strategy`` gives it.

    Raises:
        CheckpointError: scales are missing, of another shape, or not positive.
    """
    size = weights.parallel.size
    if isinstance(whole, LatentKV):
        return replace(whole.divided(size), scale=_latent_scale(weights, prefix))
    if isinstance(whole, PagedKV) and whole.num_kv_heads:
        scales = read_kv_scales(weights, prefix, strategy, whole)
        return replace(whole.divided(size), scales=scales)
    return whole.divided(size)


def read_kv_scales(weights: WeightReader, prefix: str, strategy: str, whole: PagedKV) -> KVScales:
    """This rank's scales of the attention block at ``prefix``, of a cache over all ranks.

    Raises:
        CheckpointError: they are missing, of another shape, or not positive.
    """
    num_heads = whole.num_kv_heads
    shapes = {"tensor": ((1,), ()), "attn_head": ((num_heads, 1, 1), (num_heads,))}[strategy]
    ranks = whole.ranks_per_head(weights.parallel.size)
    own = of_rank(range(num_heads), weights.parallel, ranks)

    def read(which: str) -> Tensor:
        scales = positive(weights, _name(weights, prefix, which), shapes)
        by_head = scales.reshape(-1).expand(num_heads)
        return by_head[own.start : own.stop].contiguous().to(weights.device)

    return KVScales(read("k"), read("v"))


def _latent_scale(weights: WeightReader, prefix: str) -> Tensor:
    """[1], the scale of all vectors of the latent attention at ``prefix``."""
    weights.skip(_name(weights, prefix, "v"))
    scale = positive(weights, _name(weights, prefix, "k"), ((1,), ()))
    return scale.reshape(1).to(weights.device)


def _name(weights: WeightReader, prefix: str, which: str) -> str:
    within = f"{prefix}.{which}_proj.{which}_scale"
    return within if within in weights else f"{prefix}.{which}_scale"
