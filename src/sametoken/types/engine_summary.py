"""A summary of a resolved engine in plain values, to print or to send to another process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting; ``reason`` is empty if the user set it."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """The engine's settings that a server needs.

    Attributes:
        model: the model as the user named it.
        model_path: the checkpoint's directory or file.
        max_model_len: maximum length of prompt and output together, in tokens.
        vocab_size: token ids are below this.
        eos_token_ids: the model's; a tokenizer may add one.
        device, dtype: as text, for example "cuda" and "bfloat16".
        method: the speculative method's label; None without speculation.
        num_speculative_tokens: k; 0 without speculation.
        block_size: tokens of a KV block.
        num_kv_blocks: KV blocks that requests share.
        world_size: ranks that share the model.
        logprobs_mode: of which distribution log-probabilities are.
        max_loras: adapters that may be there at once, if any may come; else 0.
        max_lora_rank: of one that comes.
        synthetic: labels of synthetic parts, to show beside every result.
        settings: every setting with its reason.
    """

    model: str
    model_path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    method: str | None
    num_speculative_tokens: int
    block_size: int
    num_kv_blocks: int
    world_size: int
    logprobs_mode: str
    max_loras: int
    max_lora_rank: int
    synthetic: tuple[str, ...]
    settings: tuple[Setting, ...]
