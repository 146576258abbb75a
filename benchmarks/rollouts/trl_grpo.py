"""TRL's ``GRPOTrainer`` in server mode, with ``sametoken serve`` where it expects ``vllm serve``.

A small random Llama learns to count (6 7 8 9 0 1 ...). The trainer gets the server's URL and
nothing else of ours. The exit status is 1 if the reward does not grow, if an update is missing, or
if the server does not say, to the bit of each log-probability, what an engine says that is built
from the trainer's last weights.

On two GPUs, with TRL 1.16, and vLLM 0.22 to 0.31 for the trainer's side of NCCL:

    python benchmarks/rollouts/trl_grpo.py --trainer-device 0 --server-device 1 --dtype bfloat16

TRL refuses to send weights from a CPU. ``--stand-in`` runs its code there all the same, with a
package named vllm that has what TRL imports, over gloo, and one argument that says "cuda".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch

# transformers notes the installed packages as it is imported: after the stand-in, in functions.

WORDS = [*map(str, range(10)), "<pad>", "<eos>"]
SIZES = {
    "vocab_size": 16,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 10,
    "eos_token_id": 11,
}
# Of server and final engine, so that neither takes what the trainer's GPU has left.
KV_BYTES = 2**26
VLLM = {
    "vllm/__init__.py": "class LLM: ...\nclass RequestOutput: ...\nclass SamplingParams: ...\n",
    "vllm/sampling_params.py": "class StructuredOutputsParams: ...\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/network_utils.py": "def get_ip(): return '127.0.0.1'\n",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/nccl_common.py": """
from types import SimpleNamespace

from sametoken.distributed.trainer_group import TrainerGroup
from sametoken.types.weight_updates import Rendezvous

def trainer_init(info):
    made = TrainerGroup(Rendezvous("gloo", info["master_address"], info["master_port"], 0,
                                   info["world_size"], 60.0, packed_bytes=2**30))
    made.group = SimpleNamespace()
    return made
""",
    "vllm/distributed/weight_transfer/packed_tensor.py": """
import torch

def packed_nccl_broadcast_producer(iterator, group, src, post_iter_func):
    flat = [post_iter_func(one).detach().contiguous().view(torch.uint8).view(-1)
            for one in iterator]
    for piece in group.pieces([one.numel() for one in flat]):
        group.broadcast(torch.cat([flat[i] for i in piece]))
""",
    "vllm-0.31.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n",
    "vllm-0.31.0.dist-info/top_level.txt": "vllm\n",
}


def write_model(directory: Path) -> str:
    """A random Llama and a tokenizer of digits, as a checkpoint."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(directory)
    ids = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(directory)
    return str(directory)


def stand_in(directory: Path) -> None:
    """Put the package named vllm on the path, and let TRL take a CPU for a GPU in one place."""
    for name, text in VLLM.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path.insert(0, str(directory))
    from trl.generation.vllm_client import VLLMClient

    joined = VLLMClient.init_communicator
    VLLMClient.init_communicator = lambda self, device: joined(self, "cuda")


@contextmanager
def served(model: str, port: int, backend: str, given: argparse.Namespace):
    """The URL of a server of the model."""
    command = [sys.executable, "-m", "sametoken", "serve", model, "--port", str(port)]
    command += ["--weight-transfer-config", json.dumps({"backend": backend})]
    command += ["--logprobs-mode", "processed_logprobs", "--dtype", given.dtype]
    command += ["--kv-cache-memory-bytes", str(KV_BYTES)]
    if given.method != "none":
        speculation = {"method": given.method, "num_speculative_tokens": 4}
        command += ["--speculative-config", json.dumps(speculation)]
    if given.stand_in:
        command += ["--device", "cpu"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": given.server_device}
    server, url = subprocess.Popen(command, env=environment), f"http://127.0.0.1:{port}"
    try:
        yield url
    finally:
        server.terminate()
        server.wait(60)


def count_on(prompts, completion_ids, **_) -> list[float]:
    """The share of tokens that are the successors of those before them."""
    rewards = []
    for prompt, answer in zip(prompts, completion_ids, strict=True):
        tokens = [int(prompt.split()[-1]), *answer]
        right = [b == (a + 1) % 10 for a, b in pairwise(tokens) if a < 10]
        rewards.append(sum(right) / max(len(answer), 1))
    return rewards


def train(model: str, url: str, given: argparse.Namespace):
    """The trainer after its last step, whose weights the server has too."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    starts = [(7 * i) % 10 for i in range(4 * given.steps)]
    prompts = [" ".join(str((start + i) % 10) for i in range(3)) for start in starts]
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            vllm_server_timeout=150.0,
            use_cpu=given.stand_in,
            bf16=False,
            per_device_train_batch_size=64,
            num_generations=16,
            max_completion_length=24,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            max_steps=given.steps,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        dataset = Dataset.from_dict({"prompt": prompts})
        trainer = GRPOTrainer(model, reward_funcs=count_on, args=config, train_dataset=dataset)
        trainer.train()
    trainer.vllm_generation.sync_weights()
    made = trainer.vllm_generation.vllm_client.communicator
    print(f"weights go through {type(made).__module__}.{type(made).__name__}")
    return trainer


def answer(url: str, body: dict | None = None) -> dict:
    """What the server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))


def says_the_same(trainer, url: str, directory: Path, dtype: str) -> bool:
    """Whether the server's tokens and log-probabilities have an engine's bits.

    The engine is built from the trainer's weights, and drafts nothing.
    """
    from sametoken import LLM, SamplingParams

    trainer.save_model(str(directory))
    prompts = [[i, (i + 1) % 10] for i in range(10)]
    sampling = {"max_tokens": 24, "temperature": 1.0, "seed": 3, "logprobs": 0}
    said = []
    for prompt in prompts:
        body = {"prompt": prompt, "return_token_ids": True, **sampling}
        choice = answer(f"{url}/v1/completions", body)["choices"][0]
        said.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    device = "cpu" if trainer.args.use_cpu else "cuda"
    mode = "processed_logprobs"
    options = {"dtype": dtype, "device": device, "kv_cache_memory_bytes": KV_BYTES}
    llm = LLM(str(directory), logprobs_mode=mode, **options)
    asked = [{"prompt_token_ids": one} for one in prompts]
    expected = []
    for output in llm.generate(asked, SamplingParams(**sampling)):
        tokens, at = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        expected.append(
            (tokens, [one[token].logprob for token, one in zip(tokens, at, strict=True)])
        )
    print(f"{sum(len(tokens) for tokens, _ in said)} sampled tokens compared, by bits")
    return said == expected


def report(history: list[dict], seconds: float) -> bool:
    """Print what the trainer logged; whether the reward grew."""
    steps = [one for one in history if "reward" in one]
    rewards = [one["reward"] for one in steps]
    differ = max(one["sampling/sampling_logp_difference/max"] for one in steps)
    print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}; {len(steps)} steps in {seconds:.0f} s")
    print(f"largest difference of a log-probability between trainer and server {differ:.1e}")
    ratio = "sampling/importance_sampling_ratio"
    low, high = min(x[f"{ratio}/min"] for x in steps), max(x[f"{ratio}/max"] for x in steps)
    print(f"importance ratios, as TRL reports them, {low:.6f} to {high:.6f}")
    return rewards[-1] > rewards[0] + 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--method", default="ngram", choices=("none", "ngram", "suffix"))
    parser.add_argument("--port", type=int, default=8321)
    parser.add_argument("--trainer-device", default="0", help="the trainer's GPU")
    parser.add_argument("--server-device", default="1", help="the server's GPU")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--stand-in", action="store_true", help="on a CPU; not TRL unpatched")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, began = Path(name), time.monotonic()
        if given.stand_in:
            stand_in(directory / "packages")
        # With several GPUs in sight transformers' trainer copies the model to each.
        os.environ["CUDA_VISIBLE_DEVICES"] = "" if given.stand_in else given.trainer_device
        model = write_model(directory / "model")
        with served(model, given.port, "gloo" if given.stand_in else "nccl", given) as url:
            trainer = train(model, url, given)
            grew = report(trainer.state.log_history, time.monotonic() - began)
            version = int(answer(f"{url}/weight_info")["weight_version"])
            print(f"the server has taken {version} updates")
            same = says_the_same(trainer, url, directory / "trained", given.dtype)
    print("the server says what the trained weights say" if same else "TOKENS OR BITS DIFFER")
    # One before each step's answers, and one after the last step.
    return 0 if same and grew and version == given.steps + 1 else 1


if __name__ == "__main__":
    sys.exit(main())
