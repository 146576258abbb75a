"""Engines for processes of their own: a tiny model with text, and engines that fail."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import write_llama
from sametoken.engine.build import build_engine
from sametoken.models.decoder import Decoder
from sametoken.runner.step import Step

#: A prompt that starts with this token id makes a faulty engine fail.
FATAL_TOKEN = 3
#: One that starts with this token id makes it hang.
HANGING_TOKEN = 4

SIZES = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "prefill_chunk_size": 16,
    "block_size": 8,
    "num_kv_blocks": 200,
    "device": "cpu",
}


def write_model(directory: Path, backend) -> Path:
    """A random Llama over the vocabulary of a tokenizer that is saved beside it."""
    write_llama(
        directory, vocab_size=backend.get_vocab_size(), max_position_embeddings=256, eos_token_id=0
    )
    backend.save(str(directory / "tokenizer.json"))
    return directory


class FaultyRunner:
    """Runs plans until one admits a prompt that is fatal, or that hangs."""

    def __init__(self, runner) -> None:
        self._runner = runner

    def submit(self, plan):
        first = {one.prompt_token_ids[0] for one in plan.admissions}
        if FATAL_TOKEN in first:
            raise RuntimeError("a kernel failed")
        if HANGING_TOKEN in first:
            time.sleep(600)
        return self._runner.submit(plan)


def build_faulty(config, announce):
    engine = build_engine(config, announce)
    engine._runner = FaultyRunner(engine._runner)
    return engine


def build_never(config, announce):
    os._exit(7)


def build_wrongly(config, announce):
    raise ZeroDivisionError("a defect")


def build_slowly(config, announce):
    """Announces its process, and never gets done."""
    announce(f"pid {os.getpid()}")
    time.sleep(600)


def build_once(config, announce):
    """Works for the first process that comes, and for no other."""
    marker = Path(config.model) / "built"
    if marker.exists():
        raise ZeroDivisionError("only once")
    marker.touch()
    return build_engine(config, announce)


def build_corrupt(config, announce):
    accept_one_more(pytest.MonkeyPatch())
    return build_engine(config, announce)


def accept_one_more(patch: pytest.MonkeyPatch) -> None:
    """The first wrong draft of each window."""
    verify = Step._verify

    def mutant(self, computed):
        verified = verify(self, computed)
        more = torch.minimum(verified.num_accepted + 1, computed.x.num_drafts)
        return replace(verified, num_accepted=more)

    patch.setattr(Step, "_verify", mutant)


def build_noisy(config, announce):
    """Rounds otherwise every time, as kernels do whose sums follow the load."""
    compute_logits = Decoder.compute_logits
    generator = torch.Generator()
    generator.manual_seed(0)

    def mutant(self, hidden):
        logits = compute_logits(self, hidden)
        return logits + 0.06 * torch.rand(logits.shape, generator=generator)

    pytest.MonkeyPatch().setattr(Decoder, "compute_logits", mutant)
    return build_engine(config, announce)
