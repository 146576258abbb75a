"""A trainer's loop over HTTP, complete: GRPO against ``sametoken serve``, exact in every token.

A small random Llama learns to count (6 7 8 9 0 1 ...). The server answers OpenAI's requests with
token ids and log-probabilities; weights go back over a process group. Gradients come from
``sametoken.exact``, so every log-probability equals the server's. The exit status is 1 if one does
not, or if an answer mixes weights.

    python benchmarks/rollouts/grpo_http.py --steps 40 --method ngram
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sametoken.exact import ExactModel
from sametoken.serving.weight_sender import WeightSender

DIGITS, PROMPTS, GROUP, MAX_TOKENS, CLIP = 10, 4, 16, 24, 0.2
SIZES = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "initializer_range": 0.1,
}


def write_model(directory: str) -> None:
    """A random Llama and a tokenizer, which a server needs, as a checkpoint."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(directory)
    words = models.WordLevel({f"{i:x}": i for i in range(SIZES["vocab_size"])}, unk_token="f")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(directory)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def served(model: Path, method: str) -> Iterator[str]:
    """The URL of a server of the model whose weights may change."""
    port = free_port()
    command = [sys.executable, "-m", "sametoken", "serve", str(model), "--port", str(port)]
    command += ["--weight-transfer-config", '{"backend": "gloo"}']
    command += ["--device", "cpu", "--dtype", "float32", "--disable-uvicorn-access-log"]
    if method != "none":
        speculation = {"method": method, "num_speculative_tokens": 4}
        command += ["--speculative-config", json.dumps(speculation)]
    server, url = subprocess.Popen(command), f"http://127.0.0.1:{port}"
    try:
        while not is_ready(url):
            if server.poll() is not None:
                raise SystemExit("the server ended")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready"):
            return True
    except OSError:
        return False


def rollout(url: str, step: int) -> list[dict]:
    """``GROUP`` sampled answers to each prompt, as choices, those of one prompt together."""
    starts = [(step * PROMPTS + i) * 7 for i in range(PROMPTS)]
    body = {
        "prompt": [[(start + i) % DIGITS for i in range(3)] for start in starts],
        "n": GROUP,
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": step,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"]


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The share of tokens that are the successors of those before them."""
    tokens = [prompt[-1], *answer]
    right = [b == (a + 1) % DIGITS for a, b in pairwise(tokens) if a < DIGITS]
    return sum(right) / len(answer)


def loss_of(choices: list[dict], rewards: Tensor, old: list[Tensor], new: Sequence[Tensor]):
    """PPO's clipped loss, with rewards normed within each group."""
    groups = rewards.view(-1, GROUP)
    normed = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    loss = torch.zeros(())
    for before, after, advantage in zip(old, new, normed.flatten(), strict=True):
        ratio = (after - before).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = loss - torch.minimum(ratio * advantage, clipped * advantage).mean()
    return loss / len(choices)


def train(model: ExactModel, url: str, steps: int) -> tuple[list[float], int]:
    """Mean rewards by step, and how many tokens' log-probabilities differ from the server's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    sender = WeightSender([url], port=free_port())
    mean_rewards, unequal = [], 0
    for step in range(steps):
        choices = rollout(url, step)
        if any(one["weight_versions"] != [step, step] for one in choices):
            raise SystemExit("an answer is of other weights")
        pairs = [(one["prompt_token_ids"], one["token_ids"]) for one in choices]
        old = [torch.tensor(one["logprobs"]["token_logprobs"]) for one in choices]
        new = model([[*prompt, *answer] for prompt, answer in pairs], [3] * len(pairs))
        unequal += sum(int((a != b).sum()) for a, b in zip(old, new, strict=True))
        rewards = torch.tensor([reward(*pair) for pair in pairs])
        optimizer.zero_grad()
        loss_of(choices, rewards, old, new).backward()
        optimizer.step()
        sender.send(model.state_dict().items(), version=step + 1)
        mean_rewards.append(rewards.mean().item())
    return mean_rewards, unequal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--method", default="ngram", choices=("none", "ngram", "suffix"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_model(name)
        model = ExactModel(name, dtype="float32", device="cpu").float()
        with served(Path(name), given.method) as url:
            rewards, unequal = train(model, url, given.steps)
    tokens = given.steps * PROMPTS * GROUP * MAX_TOKENS
    print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}; {unequal} of {tokens} tokens differ")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
