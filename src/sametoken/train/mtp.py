"""``sametoken train mtp``: the multi-token-prediction (MTP) module of a hybrid."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from sametoken.errors import ConfigError, UnsupportedError
from sametoken.models.base import ModelConfig
from sametoken.models.load.files import PICKLED, weight_files
from sametoken.models.load.sources import TensorSource
from sametoken.models.loader import read_config
from sametoken.train.compute import Compute, generator_of
from sametoken.train.distillation import (
    DrafterResult,
    Run,
    TrainingText,
    prepare_material,
    read_text,
    run,
)
from sametoken.train.networks import (
    WITH_MODULE,
    DecoderNetwork,
    in_drawing_order,
    load_weights,
    open_decoder,
)
from sametoken.train.objectives import HeadNetwork, HeadObjective, Unroll
from sametoken.train.options import LoopOptions, MTPOptions
from sametoken.train.progress import Report
from sametoken.train.results import training_in, write_with_module
from sametoken.train.target import TargetStates
from sametoken.train.unrolled import DraftModule
from sametoken.types.option_values import listed


class FrozenHybrid:
    """A hybrid with frozen weights, as a ``Target``.

    The MTP module reads the states after the final norm, so that both states are the same.
    """

    def __init__(self, network: DecoderNetwork, compute: Compute) -> None:
        self.config: ModelConfig = network.config
        self.embedding: Tensor = network.embedding.detach()
        self.head: Tensor = network.head.detach()
        self._network = network
        self._compute = compute

    @torch.no_grad()
    def states(self, token_ids: Tensor) -> TargetStates:
        """See ``Target``."""
        with self._compute.autocast():
            last = self._network(token_ids).to(self.embedding.dtype)
        return TargetStates(last, last)


class ModuleNetwork(HeadNetwork):
    """The MTP module, with the head of its target."""

    def __init__(self, module: DraftModule, head: Tensor) -> None:
        super().__init__()
        self.mtp = module
        # A tuple hides it from ``parameters``: it is not trained.
        self._frozen = (head,)

    def unroll(
        self, embedding: Tensor, token_ids: Tensor, states: Tensor, k: int
    ) -> Iterator[Tensor]:
        """See ``DraftModule``."""
        return self.mtp.unroll(embedding, token_ids, states, k)

    @property
    def draft_head(self) -> Tensor:
        """See ``HeadNetwork``."""
        return self._frozen[0]


def train_mtp(
    model: Path,
    output: Path,
    text: TrainingText,
    module: MTPOptions,
    loop: LoopOptions,
    *,
    report: Callable[[Report], None],
    announce: Callable[[str], None],
) -> DrafterResult:
    """Train a module and write it; arguments and errors are as in ``train_draft``.

    Args:
        model: the target's checkpoint directory.
        output: directory for the whole checkpoint, a copy of the target included.
        module: the number of unrolled steps.
    """
    began = time.monotonic()
    network, source = open_for_module(model, output)
    settings = {"kind": "mtp", "model": model.name} | asdict(module)
    with training_in(output, loop, settings) as compute:
        given = read_text(text, network.config, loop, None)
        load_weights(network, source)
        initialise_module(network, loop.seed)
        network = network.to(compute.device)
        target = FrozenHybrid(network, compute)
        # One state of the hidden size; no extracted layer is read.
        material = prepare_material(
            target, given, 1, loop, compute, cache=module.cache_states, announce=announce
        )
        ready = Run(
            objective=HeadObjective(
                ModuleNetwork(network.mtp, target.head),
                target,
                torch.arange(target.config.vocab_size),
                Unroll(module.ttt_steps, module.step_loss_decay),
                compute,
            ),
            material=material,
            settings=settings,
            coverage=1.0,
            write=lambda: write_with_module(model, output, network),
        )
        return run(ready, output, report, began)


def open_for_module(model: Path, output: Path) -> tuple[DecoderNetwork, TensorSource]:
    """A network with a module for a target, and the target's weights, of which none is read.

    Raises:
        ConfigError: the output is the target.
        CheckpointError: the target cannot be opened.
        UnsupportedError: the target cannot be trained for.
    """
    architecture = read_config(model).architecture
    if architecture not in WITH_MODULE or not model.is_dir():
        raise UnsupportedError(
            f"{model} is a {architecture}, for which no module for further tokens is trained",
            f"use a checkpoint directory of a {listed(WITH_MODULE)}",
        )
    if model.resolve() == output.resolve():
        raise ConfigError(f"{output} is the target itself", "choose another output")
    if weight_files(model)[0].name.endswith(PICKLED):
        raise UnsupportedError(
            f"{model} holds pickled weights, beside which no module is written",
            "convert them to safetensors",
        )
    return open_decoder(model, mtp=True)


@torch.no_grad()
def initialise_module(network: DecoderNetwork, seed: int) -> None:
    """Draw random weights for the MTP module alone, at half of the usual scale."""
    generator = generator_of(seed, "module")
    for _, parameter in in_drawing_order(network.mtp):
        if parameter.ndim > 1:
            parameter.normal_(std=0.5 * parameter.shape[1] ** -0.5, generator=generator)
