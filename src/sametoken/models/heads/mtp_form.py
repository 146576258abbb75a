"""What families' multi-token-prediction (MTP) modules have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sametoken.layers.linear import Linear
from sametoken.layers.norm import RMSNorm
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import DecoderLayer
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Module:
    """The weights of a module's own.

    Attributes:
        embedding_norm, hidden_norm: of the two halves of the input of ``fc``.
        fc: projection of both to the hidden size.
        layer: attention and a feed-forward block.
        norm: of what is fed back and of what logits are made from.
    """

    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    fc: Linear
    layer: DecoderLayer
    norm: RMSNorm


class ModuleForm(Protocol):
    """How a family's checkpoints hold their module.

    Attributes:
        fusion: name of the tensor of ``Module.fc``, without ``.weight``.
    """

    @property
    def fusion(self) -> str:
        """See the class."""
        ...

    def num_layers(self, settings: Settings) -> object:
        """The number of modules that a config claims, unchecked."""
        ...

    def require(self, settings: Settings) -> None:
        """Refuse a form that is not implemented.

        Raises:
            UnsupportedError: named by its key.
        """
        ...

    def load(self, config: ModelConfig, reader: WeightReader, max_positions: int) -> Module:
        """Read all tensors of the module."""
        ...
