"""Families whose checkpoints may hold a NextN module as one layer past the last."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sametoken.layers.residual import Block
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.load.weights import WeightReader


def nextn_prefix(config: ModelConfig) -> str:
    """Prefix of the tensors of the NextN module."""
    return f"model.layers.{config.num_layers}."


class NextNTarget(Decoder, ABC):
    """The shared decoder; the tensors of a NextN module are not read but by ``heads.nextn``.

    The module's layer has a cache and an MLP like the target's last.
    """

    @classmethod
    @abstractmethod
    def load_module_attention(
        cls, config: ModelConfig, weights: WeightReader, prefix: str, max_positions: int
    ) -> Block:
        """Load the attention block at ``prefix`` of a module, for a single rank.

        ``config`` is the target's.

        Raises:
            CheckpointError, UnsupportedError: as for the target's layers.
        """
        ...

    def _unused(self) -> tuple[str, ...]:
        return (*super()._unused(), nextn_prefix(self.config))
