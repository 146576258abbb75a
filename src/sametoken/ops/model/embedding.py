"""Concatenated embeddings and hidden states; also the CPU path, with any backend's norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sametoken.ops.backend import Kernels, Norm
    from sametoken.ops.weight import UnquantizedWeight


def embed_beside(
    kernels: Kernels,
    token_ids: Tensor,
    embedding: UnquantizedWeight,
    embedding_norm: Norm,
    hidden: Tensor,
    hidden_norm: Norm,
) -> Tensor:
    """See ``Kernels.embed_beside``."""
    embedded = embedding.rows(token_ids)
    left = kernels.rms_norm(embedded, embedding_norm.weight, embedding_norm.eps)
    return torch.cat((left, kernels.rms_norm(hidden, hidden_norm.weight, hidden_norm.eps)), dim=1)
