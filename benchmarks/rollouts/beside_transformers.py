"""Forward and backward of an exact model beside transformers', in one process, in turns.

transformers gets one padded batch, ``ExactModel`` the same sequences packed. Times are medians.
With ``--layers``, the model is a folder with a config.json: random weights of so many layers.

    python benchmarks/rollouts/beside_transformers.py path/to/model --dtype bfloat16
        --lengths 1024,1024,1024,1024 --lengths 4096 --attention sdpa
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from sametoken.exact import ExactModel

Sequences = list[list[int]]


def timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What ``work`` gives, and its seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.monotonic()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.monotonic() - began


def plain_loss(model: torch.nn.Module, sequences: Sequences, device: torch.device) -> Tensor:
    """The mean log-probability by transformers; only of unequal lengths has it a mask."""
    longest = max(map(len, sequences))
    padded = [ids + [0] * (longest - len(ids)) for ids in sequences]
    seen = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences]
    ids, mask = torch.tensor(padded, device=device), torch.tensor(seen, device=device)
    given = {} if all(map(all, seen)) else {"attention_mask": mask}
    logits = model(ids, use_cache=False, **given).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return logprobs[mask[:, 1:].bool()].mean()


def with_random_weights(folder: str, num_layers: int, out: str) -> str:
    """Write a model of a few layers, of the sizes in a folder's config.json."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out)
    return out


def compared(
    exact: ExactModel, plain: torch.nn.Module, sequences: Sequences, repeats: int
) -> dict[str, tuple[float, float, float]]:
    """Medians of forward's and backward's seconds, and the GiB that a pass adds, by side."""
    device = next(exact.parameters()).device
    sides = {
        "exact": (exact, lambda: torch.cat(exact(sequences)).mean()),
        "transformers": (plain, lambda: plain_loss(plain, sequences, device)),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    peak = dict.fromkeys(sides, 0.0)
    for _ in range(repeats + 2):
        for name, (model, work) in sides.items():
            model.zero_grad()
            if device.type == "cuda":
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            loss, forward = timed(work)
            _, backward = timed(loss.backward)
            times[name].append((forward, backward))
            if device.type == "cuda":
                peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
            model.zero_grad()
    found = {}
    for name, pairs in times.items():
        # The first ones compile kernels.
        forward, backward = (statistics.median(part) for part in zip(*pairs[2:], strict=True))
        found[name] = (forward, backward, peak[name])
    return found


def report(found: dict[str, tuple[float, float, float]]) -> None:
    """Print a table, and the ratio of the sums."""
    print("| | forward | backward | both | memory of a pass, gradients included |")
    print("|---|---|---|---|---|")
    for name, (forward, backward, peak) in found.items():
        both = f"{1e3 * (forward + backward):.1f} ms"
        shown = f"{peak:.1f} GiB" if peak else "-"
        print(f"| {name} | {1e3 * forward:.1f} ms | {1e3 * backward:.1f} ms | {both} | {shown} |")
    ours, theirs = (sum(found[name][:2]) for name in ("exact", "transformers"))
    print(f"exact takes {ours / theirs:.2f} of transformers' time\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--attention", default="sdpa", help="transformers' attn_implementation")
    parser.add_argument("--layers", type=int, help="random weights of so many layers")
    parser.add_argument(
        "--lengths",
        type=lambda text: [int(one) for one in text.split(",")],
        action="append",
        help="of the sequences, as 256,192,128,64; may be repeated",
    )
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    sets = given.lengths or [[256, 192, 128, 64]]
    with tempfile.TemporaryDirectory() as folder:
        path = given.model
        if given.layers:
            path = with_random_weights(path, given.layers, str(Path(folder) / "model"))
        longest = max(map(max, sets))
        exact = ExactModel(path, dtype=given.dtype, device=given.device, max_model_len=longest)
        device = next(exact.parameters()).device
        plain = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, given.dtype),
            attn_implementation=given.attention,
            trust_remote_code=False,
        ).to(device)
    generator = torch.Generator().manual_seed(0)
    for lengths in sets:
        sequences = [
            torch.randint(exact.config.vocab_size, (n,), generator=generator).tolist()
            for n in lengths
        ]
        print(f"{given.dtype}, {device}, sequences of {lengths} tokens")
        report(compared(exact, plain, sequences, given.repeats))


if __name__ == "__main__":
    main()
