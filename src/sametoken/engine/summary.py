"""A summary of a resolved engine in plain values, to print or to send to another process."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.config import EngineConfig
from sametoken.engine.resolve import ResolvedConfig

_RESOLVED = ("dtype", "device", "max_model_len", "num_kv_blocks", "steps_in_flight")


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
    synthetic: tuple[str, ...]
    settings: tuple[Setting, ...]


def summarise(resolved: ResolvedConfig) -> EngineSummary:
    """Summarize a resolved engine."""
    config, model = resolved.config, resolved.model
    speculative = config.speculative_config
    return EngineSummary(
        model=config.model,
        model_path=str(resolved.model_path),
        max_model_len=resolved.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        device=str(resolved.device),
        dtype=str(resolved.dtype).removeprefix("torch."),
        method=speculative.label if speculative else None,
        num_speculative_tokens=config.num_speculative_tokens,
        synthetic=config.synthetic,
        settings=explanation(resolved),
    )


def explanation(resolved: ResolvedConfig) -> tuple[Setting, ...]:
    """Every setting, with the reason if the engine chose its value."""
    settings = {name: getattr(resolved.config, name) for name in EngineConfig.__slots__}
    settings |= {name: getattr(resolved, name) for name in _RESOLVED}
    memory, reasons = resolved.request_memory, dict(resolved.reasons)
    if memory.pending:
        reasons["pending_bytes_per_request"] = (
            f"raw inputs of {memory.num_drafts} drafts; a recurrent state for each would take "
            f"{memory.state_per_draft}"
        )
    settings |= {
        "synthetic": ", ".join(resolved.config.synthetic) or "nothing",
        "model": resolved.model_path,
        "architecture": resolved.model.architecture,
        "kernels": resolved.kernels,
        "weights_bytes": resolved.weights_bytes,
        "kv_bytes": resolved.kv_bytes,
        "recurrent_bytes": resolved.recurrent_bytes,
        "kv_bytes_per_token": memory.kv_per_token + memory.draft_kv_per_token,
        "recurrent_bytes_per_request": memory.recurrent_state + memory.draft_recurrent,
        "pending_bytes_per_request": memory.pending,
    }
    return tuple(
        Setting(name, str(value), reasons.get(name, "")) for name, value in settings.items()
    )
