"""Checkpoints of the families that have gradients, and rollouts as a trainer reads them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from helpers.families import EXPERTS, FAMILIES, SIZES, fixed_config, random_model
from sametoken import LLM, SamplingParams
from sametoken.exact import ExactModel

CPU = torch.device("cpu")
#: Families with layers that have no gradients.
REFUSED = ("gpt_oss",)
HYBRID = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}
NEMOTRON = {
    "head_dim": 16,
    "layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 20,
}
#: Families whose models every test of ``sametoken.exact`` runs.
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=6),
    "qwen3_5": lambda: Qwen3_5TextConfig(**SIZES, **HYBRID),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SIZES, **HYBRID, **EXPERTS, shared_expert_intermediate_size=20
    ),
    "nemotron_h": lambda: NemotronHConfig(**SIZES | {"num_hidden_layers": 5}, **NEMOTRON),
    **{name: lambda name=name: fixed_config(name) for name in FAMILIES if name not in REFUSED},
}
#: Of these, families with Gated DeltaNet.
HYBRIDS = ("qwen3_5", "qwen3_next")
#: The routers of these choose others where a number is rounded, so gradients may jump.
WITH_EXPERTS = (
    "ernie4_5_moe",
    "gemma4",
    "glm4_moe",
    "granite_hybrid",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
)


def write_exact(directory: Path, name: str) -> Path:
    random_model(CONFIGS[name](), 0).save_pretrained(directory)
    return directory


def rollout(llm: LLM, prompts, params: SamplingParams):
    """Prompts with their answers, prompt lengths, and the answers' log-probabilities."""
    outputs = llm.generate(prompts, params)
    answers = [(out.prompt_token_ids, one) for out in outputs for one in out.outputs]
    sequences = [[*prompt, *answer.token_ids] for prompt, answer in answers]
    logprobs = [_chosen(answer) for _, answer in answers]
    return sequences, [len(prompt) for prompt, _ in answers], logprobs


def _chosen(answer) -> torch.Tensor:
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return torch.tensor([entry[token].logprob for token, entry in pairs])


@dataclass(frozen=True)
class Scene:
    """Packed sequences of these lengths, and a weight for each of their log-probabilities."""

    vocab_size: int
    lengths: tuple[int, ...]

    def on(self, device: torch.device) -> tuple[list[list[int]], torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        sequences = [
            torch.randint(self.vocab_size, (n,), generator=generator, device=CPU).tolist()
            for n in self.lengths
        ]
        count = sum(self.lengths) - len(self.lengths)
        return sequences, torch.randn(count, generator=generator, device=CPU).to(device)

    def exact_gradients(self, model: ExactModel) -> dict[str, torch.Tensor]:
        sequences, weights = self.on(next(model.parameters()).device)
        model.zero_grad()
        (torch.cat(model(sequences)) * weights).sum().backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    def plain_gradients(
        self, path, dtype: torch.dtype, device: torch.device = CPU, *, rounded: bool = False
    ) -> dict[str, torch.Tensor]:
        """Of transformers' model; ``rounded``: with parameters that are bf16 numbers in fp32."""
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
        if rounded:
            model.bfloat16().float()
        model.to(device)
        sequences, weights = self.on(device)
        logprobs = []
        for ids in sequences:
            logits = model(torch.tensor([ids], device=device)).logits[0, :-1].float()
            chosen = torch.tensor(ids[1:], device=device)[:, None]
            logprobs.append(logits.log_softmax(-1).gather(1, chosen)[:, 0])
        (torch.cat(logprobs) * weights).sum().backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def all_equal(ours, theirs) -> bool:
    """Whether tensors are equal one by one, to the bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


#: transformers' names of Granite's experts, and those of its checkpoints.
_GRANITE = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}


def as_stored(found: dict, names: Collection[str]) -> dict:
    """transformers keeps experts in one tensor; most checkpoints have one tensor for each."""
    split = {}
    for name, tensor in found.items():
        # Nemotron-H's decoder has another name in its checkpoints, and so have Mixtral's experts.
        stored = name.replace("model.", "backbone.") if "model.embeddings.weight" in found else name
        for theirs, own in _GRANITE.items():
            stored = stored.replace(theirs, own)
        mixtral = any(".block_sparse_moe.experts." in each for each in names)
        stored = stored.replace(".mlp.", ".block_sparse_moe.") if mixtral else stored
        prefix, _, kind = stored.rpartition(".")
        if stored in names or not prefix.endswith(".experts"):
            split[stored] = tensor
            continue
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", kind)
        named = (gate, up) if kind == "gate_up_proj" else (down,)
        for index, matrix in enumerate(tensor):
            for part, rows in zip(named, matrix.chunk(len(named)), strict=True):
                split[f"{prefix}.{index}.{part}.weight"] = rows
    return split
