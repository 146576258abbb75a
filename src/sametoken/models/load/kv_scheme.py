"""Scales of keys and values in float8, as compressed-tensors and Model Optimizer write them.

They lie beside each attention block's projections, as ``X.k_scale`` and ``X.v_scale``, or in them,
as ``X.k_proj.k_scale`` and ``X.v_proj.v_scale``, in a floating dtype: [1] (strategy "tensor"), or
[num_kv_heads, 1, 1] (strategy "attn_head"). Modules of draft heads have none.
"""

from __future__ import annotations

from torch import Tensor

from sametoken.layers.parallel import of_rank
from sametoken.models.load.fp8_linear import positive
from sametoken.models.load.weights import WeightReader
from sametoken.ops.cache_types import PagedKV
from sametoken.ops.model.attention.kv import KVScales


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
        name, within = f"{prefix}.{which}_scale", f"{prefix}.{which}_proj.{which}_scale"
        name = within if within in weights else name
        by_head = positive(weights, name, shapes).reshape(-1).expand(num_heads)
        return by_head[own.start : own.stop].contiguous().to(weights.device)

    return KVScales(read("k"), read("v"))
