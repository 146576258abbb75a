"""Forward and backward of an exact model beside transformers', in one process, in turns.

transformers gets one padded batch, ``ExactModel`` the same sequences packed. Times are medians.

    python benchmarks/rollouts/beside_transformers.py path/to/model --device cpu --dtype bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sametoken.exact import ExactModel


def timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What ``work`` gives, and its seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.monotonic()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.monotonic() - began


def plain_loss(model: torch.nn.Module, sequences: list[list[int]], device: torch.device) -> Tensor:
    """The mean log-probability by transformers."""
    longest = max(map(len, sequences))
    padded = [ids + [0] * (longest - len(ids)) for ids in sequences]
    seen = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences]
    ids, mask = torch.tensor(padded, device=device), torch.tensor(seen, device=device)
    logits = model(ids, attention_mask=mask).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return logprobs[mask[:, 1:].bool()].mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--attention", default="sdpa", help="transformers' attn_implementation")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 192, 128, 64])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    exact = ExactModel(given.model, dtype=given.dtype, device=given.device)
    device = next(exact.parameters()).device
    plain = AutoModelForCausalLM.from_pretrained(
        given.model,
        dtype=getattr(torch, given.dtype),
        attn_implementation=given.attention,
        trust_remote_code=False,
    ).to(device)
    generator = torch.Generator().manual_seed(0)
    vocabulary = exact.config.vocab_size
    sequences = [
        torch.randint(vocabulary, (n,), generator=generator).tolist() for n in given.lengths
    ]
    sides = {
        "exact": (exact, lambda: torch.cat(exact(sequences)).mean()),
        "transformers": (plain, lambda: plain_loss(plain, sequences, device)),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(given.repeats + 1):
        for name, (model, work) in sides.items():
            model.zero_grad()
            loss, forward = timed(work)
            _, backward = timed(loss.backward)
            times[name].append((forward, backward))
    print(f"{given.dtype}, {device}, sequences of {given.lengths} tokens")
    print("| | forward | backward | both |")
    print("|---|---|---|---|")
    for name, found in times.items():
        forward, backward = (statistics.median(column) for column in zip(*found[1:], strict=True))
        print(f"| {name} | {forward:.3f} s | {backward:.3f} s | {forward + backward:.3f} s |")


if __name__ == "__main__":
    main()
