"""Draft heads that read one state of the target and keep no KV."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, ConfigError
from sametoken.layers.linear import Linear
from sametoken.models.base import HiddenStates
from sametoken.models.heads.base import HeadCheckpoint, HeadStates, refuse
from sametoken.models.heads.reader import HeadReader
from sametoken.models.heads.stored_names import NamedSource
from sametoken.models.load.files import read_settings
from sametoken.models.load.settings import quantization_settings
from sametoken.models.load.sources import TensorSource
from sametoken.ops.backend import Kernels
from sametoken.ops.cache_types import LayerCache
from sametoken.ops.weight import Weight
from sametoken.types.speculative_methods import MAX_SPECULATIVE_TOKENS, TABLE

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class StateHead(ABC):
    """Drafts a chain from the target's state that gave the newest token.

    Attributes:
        linears: the projections of each draft, in order; drafts may share them.
        lm_heads: [V', width] of each draft, likewise; V' is V, or the length of ``token_ids``.
        token_ids: [V'] int64, ascending, the only tokens to propose; None: all.
    """

    kernels: Kernels
    linears: tuple[tuple[Linear, ...], ...]
    lm_heads: tuple[Weight, ...]
    token_ids: Tensor | None

    caches: ClassVar[tuple[LayerCache, ...]] = ()

    @property
    def lm_head(self) -> Weight:
        """That of the first draft; of all, if it is the target's."""
        return self.lm_heads[0]

    @property
    def tables(self) -> tuple[Weight, ...]:
        """Embeddings and lm_heads, its own or the target's."""
        return self.lm_heads

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices except embeddings and lm_heads."""
        distinct = {id(one): one.nbytes for several in self.linears for one in several}
        return sum(distinct.values())

    @property
    def draft_bytes(self) -> int:
        """Bytes of the matrices of a draft, lm_head included: the mean of all drafts."""
        linears = (one.nbytes for several in self.linears for one in several)
        return (sum(linears) + sum(one.nbytes for one in self.lm_heads)) // len(self.lm_heads)

    def target_states(self, hidden: HiddenStates, rows: Tensor | None) -> Tensor:
        """The first draft's states from rows of the target's; as ``EagleHead.target_states``."""
        return self.kernels.take_rows(hidden.last, rows)

    @abstractmethod
    def forward(self, index: int, token_ids: Tensor, states: Tensor) -> HeadStates:
        """Run one draft of every chain.

        Args:
            index: 0 for the first draft.
            token_ids: [R] int64, the token before it.
            states: [R, width], from ``target_states`` or the ``feedback`` of the draft before it;
                not written.
        """
        ...

    def compute_logits(self, index: int, last: Tensor) -> Tensor:
        """[R, width] to [R, V'] fp32, of a draft."""
        return self.lm_heads[index].matmul(last, out_dtype=torch.float32)


class StateHeadCheckpoint(HeadCheckpoint[StateHead]):
    """A directory with such a head.

    Attributes:
        settings: its config.
        num_drafts: drafts that are made, at first all that the head can make.
    """

    #: The architecture that its config may name, and the method.
    architecture: ClassVar[str]
    method: ClassVar[str]

    def __init__(self, directory: Path, *, load_format: str = "auto") -> None:
        super().__init__(directory, load_format=load_format)
        self.settings = read_settings(directory / "config.json")
        location = self.settings.location
        named = self.settings.get("architectures", [self.architecture])
        # fms-extras' trainers write a word, others a list.
        refuse(
            location,
            (named not in (self.architecture, [self.architecture]), f"architecture {short(named)}"),
            (quantization_settings(self.settings.values, location), "quantized weights"),
        )
        *others, last = TABLE[self.method].own_k
        key = next((one for one in others if self.settings.get(one) is not None), last)
        self.num_drafts = self._most = self.settings.integer(key, most=MAX_SPECULATIVE_TOKENS)

    @abstractmethod
    def _renamed(self, name: str) -> str:
        """The name that ``_build`` reads, of a stored tensor; "": it is not read."""
        ...

    def drafting(self, k: int) -> Self:
        """See ``HeadCheckpoint``; weights of further drafts are not read."""
        if k > self.num_drafts:
            raise ConfigError(
                f"num_speculative_tokens={k} is not possible: the head in {self._directory} drafts "
                f"{self.num_drafts} tokens",
                f"use at most {self.num_drafts}; in a cascade, for cascade_model_tokens",
            )
        limited = copy.copy(self)
        limited.num_drafts = k
        return limited

    def caches(self, dtype: torch.dtype) -> tuple[LayerCache, ...]:
        """It has no layer that keeps any."""
        return ()

    def _open_tensors(self) -> TensorSource:
        source = self._open()
        names = dict[str, str]()
        for name in source.names():
            if (new := self._renamed(name)) and names.setdefault(new, name) != name:
                raise CheckpointError(
                    f"{source.location} holds both {names[new]} and {name}, which are one tensor",
                    "download or convert the checkpoint again",
                )
        return NamedSource(source, names)

    def _by_draft(
        self, read: Callable[[int], Read], whose: Callable[[int], int] = lambda index: index
    ) -> tuple[Read, ...]:
        """What each draft reads: that of draft ``whose(index)``, read once."""
        places = [whose(index) for index in range(self.num_drafts)]
        found = {place: read(place) for place in dict.fromkeys(places)}
        return tuple(found[place] for place in places)

    def _pass_over(self, reader: HeadReader, part: str, first: int) -> None:
        """Count a part's copies, from draft ``first`` on, and those of further drafts as read."""
        for index in range(min(first, self.num_drafts), self._most):
            reader.weights.pass_over(f"{part}.{index}")
