"""``sametoken train draft``: a small Llama that drafts for a larger target."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sametoken.models.base import ModelConfig
from sametoken.models.load.huggingface import model_config
from sametoken.models.load.settings import Settings
from sametoken.train.acceptance import count_accepted
from sametoken.train.batches import Batch, DraftRows, padded_length
from sametoken.train.compute import Compute
from sametoken.train.distillation import (
    Distillation,
    DrafterResult,
    Run,
    TrainingText,
    VerifiedDrafts,
    prepare_material,
    read_text,
    run,
)
from sametoken.train.networks import DecoderNetwork
from sametoken.train.objectives import verify_rows
from sametoken.train.options import DraftOptions, LoopOptions
from sametoken.train.progress import Report, StepLoss
from sametoken.train.results import copy_file, training_in, write_decoder
from sametoken.train.states import BatchStates, Target
from sametoken.train.target import FrozenTarget, open_target

# Tokenizer files that are copied from the target.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


class DraftObjective(Distillation):
    """The cross entropy between the target's distribution and the drafter's.

    On text that the target would emit, a chain of drafts is the drafter's predictions at
    consecutive rows, so that one pass verifies chains of any length.

    Args:
        network: the drafter.
        target: the model to imitate.
        k: drafts that are verified.
        compute: the precision.
    """

    def __init__(self, network: DecoderNetwork, target: Target, k: int, compute: Compute) -> None:
        super().__init__(network, k)
        self._drafter = network
        self._head = target.head
        self._compute = compute

    def batch_loss(self, batch: Batch, states: BatchStates) -> tuple[StepLoss, VerifiedDrafts]:
        """The loss of a batch, and how its drafts were verified."""
        rows = DraftRows.of(batch)
        places = rows.flat + 1
        wanted = states.last.flatten(0, 1)[places] @ self._head.T
        following = states.greedy.flatten()[places]
        agrees = following == batch.token_ids.flatten()[places + 1]
        with self._compute.autocast():
            last = self._drafter(batch.token_ids).flatten(0, 1).index_select(0, places)
        loss, chosen = verify_rows(
            last.to(self._compute.dtype),
            self._drafter.head.to(self._compute.dtype),
            wanted.float().softmax(-1),
            torch.ones_like(agrees),
        )
        right = chosen == following
        correct = torch.zeros((self.k, right.shape[0]), dtype=torch.bool, device=right.device)
        for draft in range(self.k):
            correct[draft, : max(right.shape[0] - draft, 0)] = right[draft:]
        acceptance, num_accepted = count_accepted(correct, rows.goes_on(agrees, self.k))
        return StepLoss(loss, acceptance), VerifiedDrafts(num_accepted, rows.counts)


def train_draft(
    model: Path,
    output: Path,
    text: TrainingText,
    draft: DraftOptions,
    loop: LoopOptions,
    *,
    report: Callable[[Report], None],
    announce: Callable[[str], None],
) -> DrafterResult:
    """Train a drafter with the target's vocabulary and write it as a checkpoint.

    Args:
        model: the target, a checkpoint directory or a GGUF file.
        output: directory for the drafter, for ``{"method": "draft_model"}``.
        text: what to train on.
        draft: the drafter's sizes.
        loop: for how long and how fast.
        report: receives the progress every few steps.
        announce: receives a line before each long part.

    Raises:
        ConfigError: an option, the text or the output directory is not possible.
        CheckpointError: the target, or a checkpoint to resume from, cannot be read.
        UnsupportedError: the target cannot be trained for.
        NumericalError: the loss is not finite.
    """
    began = time.monotonic()
    settings = {"kind": "draft", "model": model.name} | asdict(draft)
    with training_in(output, loop, settings) as compute:
        files = open_target(model)
        given = read_text(text, files.config, loop, ())
        config = draft_config(files.config, draft)
        network = DecoderNetwork(model_config(Settings(config, "the drafter")))
        network.initialise(loop.seed)
        network = network.to(compute.device)
        longest = padded_length(loop.longest(files.config.max_position_embeddings))
        target = FrozenTarget(files, compute, aux_layers=(), max_positions=longest)
        material = prepare_material(
            target, given, 0, loop, compute, cache=draft.cache_states, announce=announce
        )

        def write() -> None:
            for name in _TOKENIZER_FILES if model.is_dir() else ():
                if (model / name).is_file():
                    copy_file(model / name, output / name)
            write_decoder(output, config, network)

        ready = Run(
            objective=DraftObjective(network, target, draft.verified_drafts, compute),
            material=material,
            settings=settings,
            coverage=1.0,
            write=write,
        )
        return run(ready, output, report, began)


def draft_config(target: ModelConfig, draft: DraftOptions) -> dict[str, Any]:
    """config.json of a drafter with the target's vocabulary and positions."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size or 4 * draft.hidden_size,
        "num_hidden_layers": draft.num_layers,
        "num_attention_heads": draft.num_heads,
        "num_key_value_heads": draft.num_heads,
        "head_dim": draft.hidden_size // draft.num_heads,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids),
        "dtype": "bfloat16",
    }
