"""Our models beside those of transformers that wrote their checkpoints."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import Phase, settings
from transformers.utils import logging as transformers_logging

from helpers.forward import CPU, Bench, load
from helpers.thread_ranks import run_ranks
from sametoken.ops.dispatch import select_kernels
from sametoken.ops.reference import ReferenceKernels

transformers_logging.disable_progress_bar()
BACKENDS = [ReferenceKernels(), select_kernels(CPU)]
NUM_GREEDY = 5


def drawn_models(max_examples: int) -> settings:
    """The same random models in every run; none is shrunk."""
    return settings(
        max_examples=max_examples, derandomize=True, phases=(Phase.explicit, Phase.generate)
    )


def saved_and_loaded(theirs, kernels, edit: Callable[[Path], None] | None = None, **options):
    """Our model of theirs; ``edit`` may rewrite the checkpoint before it is read."""
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory, **options)
        if edit is not None:
            edit(Path(directory))
        return load(directory, kernels)


@torch.inference_mode()
def their_logits(theirs, prompt: list[int]) -> torch.Tensor:
    return theirs(torch.tensor([prompt])).logits[0]


def require_logits(ours, theirs, prompt: list[int], chunks: list[int]) -> None:
    found = Bench(ours).logits(prompt, chunks)
    assert (found - their_logits(theirs, prompt)).abs().max() < 1e-4


def require_greedy(bench: Bench, theirs, prompt: list[int]) -> torch.Tensor:
    """Each of our next tokens is the likeliest to theirs, whose logits of the prompt these are."""
    said = bench.continue_greedily(prompt, NUM_GREEDY)
    logits = their_logits(theirs, [*prompt, *said])
    assert said == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return logits[: len(prompt)]


def require_logits_of_edited(
    directory: Path, theirs, changes: dict, prompt: list[int], chunks: list[int]
) -> None:
    """The same logits where both read the (text) config with ``changes``."""
    theirs.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config).update(changes)
    path.write_text(json.dumps(config))
    edited = type(theirs).from_pretrained(
        directory, attn_implementation="eager", trust_remote_code=False
    )
    require_logits(load(directory), edited.eval(), prompt, chunks)


def require_kept_rows(model, prompt: list[int]) -> None:
    """Rows that are kept have the states of a pass that keeps all, and so have those after it."""
    whole = Bench(model)
    states, following = whole.run(prompt, 0).last, whole.run([1], len(prompt)).last
    for kept in ([], [2, 0, len(prompt) - 1]):
        bench = Bench(model)
        torch.testing.assert_close(bench.run(prompt, 0, kept=kept).last, states[kept])
        torch.testing.assert_close(bench.run([1], len(prompt)).last, following)


def require_parity(ours, theirs, prompt: list[int], chunks: list[int]) -> None:
    """The same logits, and the same greedy continuation."""
    # More rows than one of the reference's products has.
    require_kept_rows(ours, prompt[:13])
    expected = require_greedy(Bench(ours), theirs, prompt)
    assert (Bench(ours).logits(prompt, chunks) - expected).abs().max() < 1e-4


def require_parity_of_ranks(path, prompt: list[int], size: int = 2) -> None:
    """Ranks have the same bits, near those of one."""
    whole = Bench(load(path)).logits(prompt, [])
    first, *others = run_ranks(
        size, lambda parallel: Bench(load(path, parallel=parallel)).logits(prompt, [7])
    )
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-4)
