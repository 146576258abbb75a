"""The MLP speculator (Wertheimer et al., arXiv:2404.19124), IBM's accelerators.

Each draft folds the token before it into a state, which begins as the target's. From the reference
(``fms_extras/models/speculator.py`` of foundation-model-stack/fms-extras) and vLLM
(``vllm/model_executor/models/mlp_speculator.py``):

- The target's state is the one after its final norm.
- With ``scale_input`` it is first normed to ``sqrt(1/2)``, without a weight.
- ``state = gelu(ln(proj(state) + factor * emb(token)))``, then ``head(state)``; ``ln`` is an RMS
  norm with a bias and an epsilon of 1e-6, gelu the exact one.
- ``factor`` is ``emb_weight / state_weight``: ``state_weight`` is ``0.5 ^ (0.5 / n_predict)``, of
  the config's ``n_predict`` whatever k is, and ``emb_weight`` is
  ``sqrt((1 - state_weight^2) * inner_dim / 2)``.
- ``inner_dim`` 0 is ``emb_dim``, the target's hidden size.
- Each draft has its own ``emb``, ``proj``, ``ln`` and ``head``. With ``tie_weights`` all have those
  of the first, except that ``proj`` of the second serves all later ones.

Tensors are ``speculator.<part>.<i>.weight`` and ``speculator.ln.<i>.bias``; the prefix may be
missing, and so may tied copies. ``top_k_tokens_per_head`` and ``n_candidates`` describe trees of
candidates: drafts are one chain, so they are not read, as in vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu

from sametoken.layers.norm import RMSNorm
from sametoken.models.base import HiddenStates, ModelConfig
from sametoken.models.heads.base import HeadStates, require_sizes
from sametoken.models.heads.reader import HeadReader
from sametoken.models.heads.state_head import StateHead, StateHeadCheckpoint
from sametoken.models.load.weights import Part
from sametoken.ops.weight import UnquantizedWeight, Weight

_EPS = 1e-6
_PREFIX = "speculator."


@dataclass(frozen=True, slots=True)
class MLPSpeculatorHead(StateHead):
    """The weights, by draft, and one draft of them.

    Attributes:
        token_factor: on embeddings, beside a projected state.
        input_norm: of the target's state.
        embeddings: [V, width] of the token before.
        norms, biases: of the state; biases are [width].
    """

    token_factor: float
    input_norm: RMSNorm | None
    embeddings: tuple[UnquantizedWeight, ...]
    norms: tuple[RMSNorm, ...]
    biases: tuple[Tensor, ...]

    @property
    def tables(self) -> tuple[Weight, ...]:
        """See ``StateHead.tables``."""
        return (*self.embeddings, *self.lm_heads)

    def target_states(self, hidden: HiddenStates, rows: Tensor | None) -> Tensor:
        """See ``StateHead.target_states``."""
        states = self.kernels.take_rows(hidden.last, rows)
        return states if self.input_norm is None else self.input_norm(states)

    def forward(self, index: int, token_ids: Tensor, states: Tensor) -> HeadStates:
        """See ``StateHead.forward``."""
        (project,) = self.linears[index]
        token = self.embeddings[index].rows(token_ids)
        mixed = torch.add(project(states), token, alpha=self.token_factor)
        state = gelu(self.norms[index](mixed) + self.biases[index])
        return HeadStates(state, state)


class MLPSpeculatorCheckpoint(StateHeadCheckpoint):
    """A directory with an MLP speculator."""

    architecture, method = "MLPSpeculatorPreTrainedModel", "mlp_speculator"

    def __init__(self, directory: Path, *, load_format: str = "auto") -> None:
        super().__init__(directory, load_format=load_format)
        settings = self.settings
        self._vocab_size = settings.integer("vocab_size")
        self._hidden_size = self._width = settings.integer("emb_dim")
        if settings.get("inner_dim", 0) != 0:
            self._width = settings.integer("inner_dim")
        self._is_tied = settings.switch("tie_weights")
        self._norms_input = settings.switch("scale_input")

    def require_fit(self, target: ModelConfig) -> None:
        """Refuse a target of another vocabulary or hidden size."""
        require_sizes(self._vocab_size, self._hidden_size, target)

    def _renamed(self, name: str) -> str:
        return name.removeprefix(_PREFIX)

    def _build(self, reader: HeadReader) -> MLPSpeculatorHead:
        weights, hidden, width = reader.weights, self._hidden_size, self._width
        is_tied, kept = self._is_tied, 0.5 ** (1 / self._most)

        def norm(index: int) -> RMSNorm:
            return RMSNorm(weights.kernels, weights.vector(f"ln.{index}.weight", width), _EPS)

        def table(name: str) -> UnquantizedWeight:
            return weights.packed(width, Part(f"{name}.weight", self._vocab_size))

        def whose(index: int) -> int:
            return 0 if is_tied else index

        projections = self._by_draft(
            lambda i: weights.linear(width if i else hidden, Part(f"proj.{i}", width)),
            lambda i: min(i, 1) if is_tied else i,
        )
        head = MLPSpeculatorHead(
            kernels=weights.kernels,
            linears=tuple((one,) for one in projections),
            lm_heads=self._by_draft(lambda i: reader.made_of(table(f"head.{i}")), whose),
            token_ids=reader.token_ids,
            token_factor=sqrt((1 - kept) * width / 2 / kept),
            input_norm=_input_norm(reader, hidden) if self._norms_input else None,
            embeddings=self._by_draft(lambda i: table(f"emb.{i}"), whose),
            norms=self._by_draft(norm, whose),
            biases=self._by_draft(lambda i: weights.vector(f"ln.{i}.bias", width), whose),
        )
        for part in ("emb", "head", "ln"):
            self._pass_over(reader, part, 1 if is_tied else self.num_drafts)
        self._pass_over(reader, "proj", 2 if is_tied else self.num_drafts)
        return head


def _input_norm(reader: HeadReader, hidden: int) -> RMSNorm:
    weights = reader.weights
    weight = torch.full((hidden,), sqrt(0.5), dtype=weights.dtype, device=weights.device)
    return RMSNorm(weights.kernels, weight, _EPS)
