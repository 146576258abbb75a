"""``sametoken train eagle3``: from a target and text to an EAGLE-3 head."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from sametoken.errors import ConfigError
from sametoken.layers.rotary import rotary_table
from sametoken.models.base import ModelConfig
from sametoken.models.loader import read_config
from sametoken.train.batches import DraftRows, padded_length
from sametoken.train.devices import Compute, choose_compute
from sametoken.train.distillation import (
    DrafterResult,
    Material,
    Run,
    TrainingText,
    read_material,
    run,
)
from sametoken.train.eagle3_network import Eagle3Network
from sametoken.train.head_objective import HeadObjective, Unroll
from sametoken.train.loop import Report
from sametoken.train.options import Eagle3Options, LoopOptions
from sametoken.train.results import output_directory
from sametoken.train.seeds import generator_of
from sametoken.train.speculators import HeadLayout, write_head
from sametoken.train.target import FrozenTarget
from sametoken.train.vocabulary import coverage, frequent_tokens, membership, offsets_of

# Batches from which the size of the target's states is taken.
_SCALE_BATCHES = 4
# Drafts that a head is meant for, as engines choose without being told.
_SERVED_DRAFTS = 4


def train_eagle3(
    model: Path,
    output: Path,
    text: TrainingText,
    head: Eagle3Options,
    loop: LoopOptions,
    *,
    report: Callable[[Report], None],
    announce: Callable[[str], None],
) -> DrafterResult:
    """Train a head and write it, with ``training.json``, to a directory.

    Args:
        model: the target, a checkpoint directory or a GGUF file.
        output: directory for the head, in the ``speculators`` layout, and its checkpoint.
        text: what to train on.
        head: the head's sizes, and how far to unroll it.
        loop: for how long and how fast.
        report: told every few steps how it goes.
        announce: told in a line of what takes long.

    Raises:
        ConfigError: an option, the text or the output directory is not possible.
        CheckpointError: the target, or a checkpoint to resume from, cannot be read.
        UnsupportedError: the target cannot be trained for.
        NumericalError: the loss is not finite.
    """
    began = time.monotonic()
    with output_directory(output):
        compute = choose_compute(loop)
        config = read_config(model)
        layers, layer = head.layer_ids(config.num_layers), _layer_config(config, head)
        target = FrozenTarget(
            model,
            aux_layers=layers,
            max_positions=padded_length(loop.max_length),
            dtype=compute.dtype,
            device=compute.device,
        )
        material = read_material(
            target, text, layers, loop, compute, cache=head.cache_states, announce=announce
        )
        token_ids = frequent_tokens(material.counts, head.draft_vocab_size)
        covered = coverage(material.counts, token_ids)
        announce(f"{token_ids.shape[0]} draft tokens cover {100 * covered:.2f} % of the answers")
        network = _network(target, layer, token_ids, head, loop)
        _set_state_scale(network, material)
        layout = _layout(layer, token_ids, layers, head, model.name)
        ready = Run(
            objective=_objective(network, target, token_ids, head, compute),
            material=material,
            settings={"kind": "eagle3", "model": model.name} | asdict(head),
            k=head.ttt_steps,
            coverage=covered,
            write=lambda: _write(network, token_ids, layout, output),
        )
        return run(ready, output, report, began)


def _layout(
    layer: ModelConfig,
    token_ids: Tensor,
    aux_layers: tuple[int, ...],
    head: Eagle3Options,
    verifier: str,
) -> HeadLayout:
    return HeadLayout(
        layer=layer,
        draft_vocab_size=token_ids.shape[0],
        aux_layers=aux_layers,
        norm_before_residual=head.norm_before_residual,
        num_speculative_tokens=_SERVED_DRAFTS,
        verifier=verifier,
    )


def _objective(
    network: Eagle3Network,
    target: FrozenTarget,
    token_ids: Tensor,
    head: Eagle3Options,
    compute: Compute,
) -> HeadObjective:
    unroll = Unroll(head.ttt_steps, head.step_loss_decay)
    return HeadObjective(network, target, token_ids, unroll, compute)


def _write(network: Eagle3Network, token_ids: Tensor, layout: HeadLayout, output: Path) -> None:
    """The head in bf16, which the network is itself from here on."""
    tensors = network.export_tensors(torch.bfloat16)
    network.take(tensors)
    tensors["d2t"] = offsets_of(token_ids)
    tensors["t2d"] = membership(token_ids, layout.layer.vocab_size)
    write_head(output, layout, tensors)


def _layer_config(config: ModelConfig, head: Eagle3Options) -> ModelConfig:
    num_kv_heads = head.num_kv_heads or config.num_kv_heads
    if config.num_heads % num_kv_heads:
        raise ConfigError(
            f"{config.num_heads} heads cannot share {num_kv_heads} key-value heads",
            f"set num_kv_heads to a divisor of {config.num_heads}",
        )
    return replace(
        config,
        intermediate_size=head.intermediate_size or config.intermediate_size,
        num_kv_heads=num_kv_heads,
    )


def _network(
    target: FrozenTarget,
    config: ModelConfig,
    token_ids: Tensor,
    head: Eagle3Options,
    loop: LoopOptions,
) -> Eagle3Network:
    """A head of random weights, but for those that make its logits: they are the target's."""
    device = target.embedding.device
    network = Eagle3Network(
        config,
        draft_vocab_size=token_ids.shape[0],
        num_aux=3,
        norm_before_residual=head.norm_before_residual,
        rotary=rotary_table(
            config.rope,
            head_dim=config.head_dim,
            max_positions=padded_length(loop.max_length) + head.ttt_steps,
            device=device,
        ),
    )
    generator = generator_of(loop.seed, "weights")
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        network.lm_head.weight.copy_(target.head[token_ids.to(device)])
        network.norm.weight.copy_(target.final_norm)
    return network.to(device)


@torch.no_grad()
def _set_state_scale(network: Eagle3Network, material: Material) -> None:
    """Give every channel of the target's states the size 1 in the rows that are trained."""
    batches = material.training_batches()
    total, count = torch.zeros_like(network.state_scale), 0
    for step in range(min(len(batches), _SCALE_BATCHES)):
        batch = batches.at(step)
        rows = DraftRows.of(batch).flat
        states = material.states.of(batch).auxiliary.flatten(0, 1)[rows].float()
        total += states.square().sum(0).to(total.device)
        count += rows.shape[0]
    network.state_scale.copy_((total / max(count, 1)).clamp(min=1e-6).rsqrt())
