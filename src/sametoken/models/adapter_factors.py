"""Adapters as they are read, and a rank's share of their factors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.errors import CheckpointError
from sametoken.layers.parallel import TensorParallel
from sametoken.layers.share import Part, Split, share_of
from sametoken.ops.model.low_rank import Factors

#: Where a decoder's layers begin in the names of modules.
_LAYERS = "layers."
#: An expert's projections as Mixtral has them.
_EXPERT = re.compile(r"(.*\.experts\.\d+\.)(w[123])", re.ASCII)
_RENAMED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class StackedFactors(NamedTuple):
    """What an adapter adds to the matrices [E, N, K] of all experts of a layer.

    Attributes:
        down: [E, r, K].
        up: [E, N, r].
        scale: not 0.
    """

    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.down.shape[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N and K."""
        return self.down.shape[0], self.up.shape[1], self.down.shape[2]

    def turned(self) -> StackedFactors:
        """Those of the transposed matrices."""
        return StackedFactors(self.up.mT, self.down.mT, self.scale)

    def of(self, expert: int, rows: slice = slice(None)) -> Factors:
        """Of some rows of an expert's matrix."""
        return Factors(self.down[expert], self.up[expert, rows], self.scale)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The low-rank updates of a model's linear modules and experts.

    Attributes:
        location: its directory, for messages.
        modules: by ``module_name``, e.g. "layers.0.self_attn.q_proj" or
            "layers.0.mlp.experts.3.up_proj"; on the host.
        stacks: of all experts of a layer at once, e.g. "layers.0.mlp.experts.down_proj", likewise.
    """

    location: str
    modules: Mapping[str, Factors]
    stacks: Mapping[str, StackedFactors] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        ranks = {one.rank for one in self.modules.values()}
        return max(ranks | {one.rank for one in self.stacks.values()})

    @property
    def changed(self) -> frozenset[str]:
        """The modules that it changes, and as one module the experts of each of their layers."""
        names = {*self.modules, *self.stacks}
        return frozenset(names | {one for one in map(experts_of, names) if one})

    @property
    def has_experts(self) -> bool:
        """Whether it changes experts."""
        return any(map(experts_of, (*self.stacks, *self.modules)))


def module_name(name: str) -> str:
    """A module's name in adapters and models, of one that has more before its layer.

    Mixtral's names become those that transformers gives them since.
    """
    module = _LAYERS + name.partition(_LAYERS)[2].replace(".block_sparse_moe.", ".mlp.")
    match = _EXPERT.fullmatch(module)
    return match[1] + _RENAMED[match[2]] if match else module


def experts_of(module: str) -> str:
    """The experts that a module is one of, as ``module_name`` names them; "" if of none."""
    layer, found, _ = module.partition(".experts")
    return layer + found if found else ""


@dataclass(frozen=True, slots=True)
class RankShares:
    """A rank's shares of factors.

    Attributes:
        parallel: the ranks.
        dtype, device: of the shares.
    """

    parallel: TensorParallel
    dtype: torch.dtype
    device: torch.device

    def of(self, own: Factors, module: str, part: Part, in_features: int, location: str) -> Factors:
        """The share of what an adapter adds to a part of ``in_features`` columns.

        Raises:
            CheckpointError: the factors are of a matrix of another shape.
        """
        found = own.up.shape[0], own.down.shape[1]
        if found != (part.rows, in_features):
            raise CheckpointError(
                f"adapter {location} is for a {module} of {found[0]} x {found[1]}, the "
                f"model's has {part.rows} x {in_features}",
                "check that adapter and model belong together",
            )
        # Ranks that divide a linear's inputs divide the first factor, else the second.
        inputs = part.split if part.split is Split.COLUMNS else Split.WHOLE
        down = share_of(Part(module, own.rank, split=inputs), (in_features,), self.parallel)
        up = share_of(part.of_rows(), (own.rank,), self.parallel)
        at = self.dtype, self.device
        return Factors(down.of(own.down, *at), up.of(own.up, *at), own.scale)
