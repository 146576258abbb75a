"""Training against a frozen target: text, states, measurement and results."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sametoken.errors import ConfigError
from sametoken.models.base import ModelConfig
from sametoken.train.acceptance import Acceptance, walk
from sametoken.train.batches import Batch, Batches
from sametoken.train.compute import Compute
from sametoken.train.loop import run_loop
from sametoken.train.options import LoopOptions
from sametoken.train.progress import Report, StepLoss
from sametoken.train.results import write_result
from sametoken.train.states import (
    BatchStates,
    LayerStates,
    RunAnew,
    StateSource,
    Target,
    keep,
    kept_bytes,
    open_states,
    read_states,
)
from sametoken.train.target import FrozenTarget
from sametoken.train.text import Encode, Sequences, read_sequences
from sametoken.types.outputs import SpeculationMetrics
from sametoken.types.units import in_units

# At most this many batches are measured.
_MEASURED_BATCHES = 64


@dataclass(frozen=True, slots=True)
class TrainingText:
    """The text to train on: a file, or directories of extracted states.

    Attributes:
        file: JSON lines, as ``read_sequences`` reads them.
        states: directories that ``extract_hidden_states`` wrote.
        encode: see ``read_sequences``.
    """

    file: Path | None = None
    states: tuple[Path, ...] = ()
    encode: Encode | None = None


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """Accepted drafts of rows, [M] int64, and how many of the rows each sequence has."""

    num_accepted: Tensor
    counts: list[int]


class Distillation(ABC):
    """An ``Objective`` over batches and the target's states, which verifies k drafts a row."""

    def __init__(self, network: nn.Module, k: int) -> None:
        self.network = network
        self.k = k
        self._material: tuple[Batches, StateSource] | None = None

    def train_on(self, batches: Batches, states: StateSource) -> None:
        """Set the batches and states that ``loss`` reads."""
        self._material = (batches, states)

    def loss(self, step: int) -> StepLoss:
        """See ``Objective``."""
        assert self._material is not None
        batches, states = self._material
        batch = batches.at(step)
        return self.batch_loss(batch, states.of(batch))[0]

    @abstractmethod
    def batch_loss(self, batch: Batch, states: BatchStates) -> tuple[StepLoss, VerifiedDrafts]:
        """The loss of a batch, and how its drafts were verified."""


@dataclass(frozen=True, slots=True)
class Material:
    """Sequences, the source of their states, and the split into training and measurement.

    Attributes:
        trained: indices of sequences to train on.
        held: indices of sequences that are held back for measurement.
        counts: [V] int64, how often each token occurs in the training answers.
    """

    sequences: Sequences
    states: StateSource
    trained: list[int]
    held: list[int]
    counts: Tensor
    loop: LoopOptions
    device: torch.device

    def training_batches(self) -> Batches:
        """Batches to train on; with ``prompt_rows`` prompts are trained on like answers."""
        sequences = self.sequences
        if self.loop.prompt_rows:
            sequences = replace(sequences, prompt_lens=torch.zeros_like(sequences.prompt_lens))
        return self._batches(sequences, self.trained, self.loop.seed)

    def _batches(self, sequences: Sequences, indices: list[int], seed: int) -> Batches:
        return Batches(
            sequences, indices, batch_tokens=self.loop.batch_tokens, seed=seed, device=self.device
        )

    @torch.no_grad()
    def measure(self, objective: Distillation) -> tuple[Acceptance, SpeculationMetrics, int]:
        """Acceptance over the held-back sequences, or if there are none over the training ones.

        The last value is how many sequences were measured: of many, those of the first batches.
        """
        batches = self._batches(self.sequences, self.held or self.trained, 0)
        acceptance = Acceptance.none(objective.k, self.device)
        num_accepted: list[int] = []
        counts: list[int] = []
        for step in range(min(len(batches), _MEASURED_BATCHES)):
            batch = batches.at(step)
            found, verified = objective.batch_loss(batch, self.states.of(batch))
            acceptance = acceptance + found.acceptance
            num_accepted += verified.num_accepted.tolist()
            counts += verified.counts
        return acceptance, walk(num_accepted, counts, objective.k), len(counts)


@dataclass(frozen=True, slots=True)
class DrafterResult:
    """Results of a training, as written to ``training.json``.

    Attributes:
        tokens: answer tokens in the training sequences.
        coverage: share of them that the drafter can propose.
        measured: sequences that the figures below are of: held-back ones, if there are any.
        acceptance: over the held-back prompts, how often each draft is accepted if all before
            it were.
        average_length: tokens per step there, from an average row.
        acceptance_length: tokens per step there of an engine with as many drafts as were
            trained, each of whose steps begins where the one before ended.
        acceptance_per_position: the same engine's.
    """

    steps: int
    seconds: float
    loss: float
    sequences: int
    held_back: int
    measured: int
    tokens: int
    coverage: float
    acceptance: tuple[float, ...]
    average_length: float
    acceptance_length: float
    acceptance_per_position: tuple[float, ...]


def read_text(
    text: TrainingText, config: ModelConfig, loop: LoopOptions, aux_layers: tuple[int, ...] | None
) -> Sequences | tuple[LayerStates, ...]:
    """Read the text, or open extracted states, before the target's weights are read.

    Args:
        text: what to train on.
        config: the target's.
        loop: the longest sequence.
        aux_layers: layers whose states the drafter reads; None: it takes no extracted ones.

    Raises:
        ConfigError: the text or the states are missing, malformed or of another target.
        CheckpointError: a manifest of states is missing or malformed.
    """
    if (text.file is None) == (not text.states):
        raise ConfigError("training needs either text or states", "give one of the two")
    longest = loop.longest(config.max_position_embeddings)
    if text.file is not None:
        return read_sequences(
            text.file, vocab_size=config.vocab_size, max_length=longest, encode=text.encode
        )
    if aux_layers is None:
        raise ConfigError("this training takes no extracted states", "give text")
    return open_states(text.states, config, aux_layers, longest)


def prepare_material(
    target: Target,
    given: Sequences | tuple[LayerStates, ...],
    num_aux: int,
    loop: LoopOptions,
    compute: Compute,
    *,
    cache: bool,
    announce: Callable[[str], None],
) -> Material:
    """Prepare the target's states.

    Args:
        target: computes the states; extracted states must be this target's.
        given: from ``read_text``.
        num_aux: layers whose states the drafter reads.
        loop: the longest sequence and the share that is held back.
        compute: device and dtype.
        cache: keep the states in memory if they fit.
        announce: receives a line before each long part.

    Raises:
        ConfigError, CheckpointError: as ``read_states``.
    """
    states: StateSource
    if isinstance(given, Sequences):
        sequences, needed = given, kept_bytes(given, target, num_aux)
        if cache and needed <= compute.data_bytes:
            announce(f"keeping the target's states of {sequences.token_ids.shape[0]} tokens")
            states = keep(target, sequences, num_aux)
        else:
            announce(
                f"the target runs anew in every step; kept states would take {in_units(needed)}"
            )
            states = RunAnew(target)
    else:
        assert isinstance(target, FrozenTarget)
        longest = loop.longest(target.config.max_position_embeddings)
        sequences, states = read_states(given, target, longest)
    trained, held = sequences.split(loop.validation)
    counts = sequences.answer_counts(target.config.vocab_size, trained)
    announce(
        f"sequences to train on: {len(trained)}, with {int(counts.sum())} answer tokens; "
        f"held back: {len(held)}"
    )
    return Material(sequences, states, trained, held, counts, loop, compute.device)


@dataclass(frozen=True, slots=True)
class Run:
    """A training that is ready to start.

    Attributes:
        settings: identify it together with the loop's options, as JSON values.
        coverage: see ``DrafterResult``.
        write: writes the drafter; measurement runs the written weights.
    """

    objective: Distillation
    material: Material
    settings: dict[str, Any]
    coverage: float
    write: Callable[[], None]


def run(ready: Run, output: Path, report: Callable[[Report], None], began: float) -> DrafterResult:
    """Train, write, measure.

    Args:
        ready: what to train.
        output: the drafter's directory, for the checkpoint and ``training.json``.
        report: receives the progress every few steps.
        began: ``time.monotonic`` at the start of the training.

    Raises:
        ConfigError: the output cannot be written, or a checkpoint is of another training.
        CheckpointError: a checkpoint cannot be read.
        NumericalError: the loss is not finite.
    """
    material, loop = ready.material, ready.material.loop
    ready.objective.train_on(material.training_batches(), material.states)
    identity = ready.settings | {"text": material.sequences.digest}
    last = run_loop(ready.objective, loop, output, report, identity=identity, began=began)
    ready.write()
    acceptance, engine, measured = material.measure(ready.objective)
    result = DrafterResult(
        steps=last.step,
        seconds=round(time.monotonic() - began, 1),
        loss=last.loss,
        sequences=len(material.trained),
        held_back=len(material.held),
        measured=measured,
        tokens=int(material.counts.sum()),
        coverage=ready.coverage,
        acceptance=acceptance.conditional,
        average_length=acceptance.length,
        acceptance_length=engine.acceptance_length,
        acceptance_per_position=engine.acceptance_per_position,
    )
    write_result(output, ready.settings | {"loop": asdict(loop)}, asdict(result))
    return result
