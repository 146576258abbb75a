"""What families' multi-token-prediction (MTP, NextN) modules have in common.

Row p takes the token at p + 1 and the target's last hidden state at p, and predicts the token at
p + 2. ``fc`` maps ``[norm(embedding) | norm(hidden)]``, 2h wide and in one family in the other
order, to h; one layer follows, and runs for every further draft too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import ClassVar

from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.layers.linear import Linear
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import DecoderLayer
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import DERIVED_TENSORS
from sametoken.models.heads.base import EagleHead, HeadCheckpoint, HeadStates, require_sizes
from sametoken.models.heads.reader import HeadReader
from sametoken.models.heads.stored_names import with_prefix
from sametoken.models.load.settings import Settings
from sametoken.models.load.sources import TensorSource
from sametoken.models.loader import open_checkpoint
from sametoken.ops.backend import AttentionRows, KeptRows
from sametoken.state.caches import ModelCache

ANOTHER_METHOD = "another speculative method"


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


@dataclass(frozen=True, slots=True)
class ModuleHead(EagleHead):
    """A module's weights and its forward pass.

    Attributes:
        module: the weights of its own.
        zeroes_first: whether the embedding of the row at position 0 is zeroed.
        feeds_normed: whether the next row takes the state after the last norm, as the logits do.
    """

    zeroes_first: ClassVar[bool] = False
    feeds_normed: ClassVar[bool] = True

    module: Module

    @staticmethod
    def aux_layers(num_target_layers: int) -> tuple[int, ...]:
        """See ``HeadCheckpoint.aux_layers``."""
        return ()

    @property
    def nbytes(self) -> int:
        """See ``EagleHead``."""
        return self.module.fc.nbytes + self.module.layer.nbytes

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        rows: AttentionRows,
        cache: ModelCache,
        kept: KeptRows | None = None,
    ) -> HeadStates:
        """Run rows over the paged cache; see ``EagleHead.forward``."""
        module, layer = self.module, self.module.layer
        residual = module.fc(self._inputs(token_ids, hidden, rows))
        x = layer.input_norm(residual)
        last, residual = layer(x, residual, module.norm, rows, cache.layers[0], kept=kept)
        assert isinstance(last, Tensor)
        return HeadStates(last, last if self.feeds_normed else residual)

    def _inputs(self, token_ids: Tensor, hidden: Tensor, rows: AttentionRows) -> Tensor:
        """[T, 2h]: normed embeddings beside normed states."""
        both = self.kernels.embed_beside(
            token_ids, self.embedding, self.module.embedding_norm, hidden, self.module.hidden_norm
        )
        if self.zeroes_first:
            # A norm of zeros is zeros, so this is the norm of a zeroed embedding.
            both[:, : hidden.shape[1]].masked_fill_((rows.positions == 0)[:, None], 0.0)
        return both


class ModuleCheckpoint(HeadCheckpoint[ModuleHead]):
    """A module in the target's directory."""

    unused_tensors = DERIVED_TENSORS

    def __init__(self, directory: Path, *, load_format: str = "auto") -> None:
        super().__init__(directory, load_format=load_format)
        self._checkpoint = open_checkpoint(directory, load_format=load_format)
        self.config = self._checkpoint.config
        self.quantization = self._checkpoint.formats(of_module=True)

    def _stored(self) -> TensorSource:
        return self._checkpoint.open_tensors()

    def _open_tensors(self) -> TensorSource:
        return with_prefix(self._open(), self.prefix)

    def require_fit(self, target: ModelConfig) -> None:
        """Refuse a target of another vocabulary or hidden size."""
        require_sizes(self.config.vocab_size, self.config.hidden_size, target)

    def is_divisible(self, size: int) -> bool:
        """See ``HeadCheckpoint``; its sizes are the target's."""
        return True

    def _require_module(self, kind: str, num_layers: object, fusion: str) -> None:
        """Refuse a checkpoint without a module, or with one that is not implemented.

        Args:
            kind: of module, for messages.
            num_layers: that the config claims, unchecked.
            fusion: as in ``ModuleForm``.

        Raises:
            CheckpointError: no module.
            UnsupportedError: not one layer.
        """
        if num_layers not in (0, 1):
            raise UnsupportedError(
                f"{self._directory}: a {kind} module of {short(num_layers)} layers "
                "is not supported",
                f"use {ANOTHER_METHOD}",
            )
        # A quantized weight is stored under several names.
        stored = () if self._is_dummy else self._open_tensors().names()
        is_stored = self._is_dummy or any(name.startswith(f"{fusion}.") for name in stored)
        if num_layers == 0 or not is_stored:
            raise CheckpointError(
                f"{self._directory} holds no {kind} module ({self.prefix}*): it was trained "
                "without one, or a conversion dropped it",
                f"use the published checkpoint, or {ANOTHER_METHOD}",
            )


class ModuleForm(ABC):
    """How a family's checkpoints hold their module.

    Attributes:
        prefix: of all its tensors.
        fusion: name of the tensor of ``Module.fc``, without ``.weight``.
        head: the class that runs it.
    """

    prefix: ClassVar[str]
    fusion: ClassVar[str]
    head: ClassVar[type[ModuleHead]] = ModuleHead

    def num_layers(self, settings: Settings) -> object:
        """The number of modules that a config claims, unchecked; without a claim one."""
        return settings.get("num_nextn_predict_layers", 1)

    @abstractmethod
    def require(self, settings: Settings) -> None:
        """Refuse a form that is not implemented.

        Raises:
            UnsupportedError: named by its key.
        """
        ...

    def is_divisible(self, settings: Settings, size: int) -> bool:
        """Whether ``size`` ranks, which divide the target, divide the module."""
        return True

    @abstractmethod
    def load(self, config: ModelConfig, reader: HeadReader) -> Module:
        """Read all tensors of the module."""
        ...
