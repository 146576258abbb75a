"""GGUF checkpoints: metadata as ``ModelConfig``, tensors in Hugging Face names and order."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.io.files import open_regular
from sametoken.layers.rotary import DEFAULT_THETA, LONGROPE
from sametoken.models.base import ModelConfig
from sametoken.models.load.gguf_blocks import Blocks
from sametoken.models.load.gguf_file import GGUFFile, GGUFTensor, read_gguf
from sametoken.models.load.settings import (
    ANOTHER,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    Settings,
    require_head_counts,
)
from sametoken.models.load.sources import rows_per_chunk

ROPE_FREQUENCIES = "rope_freqs.weight"
AGAIN = "download or convert the file again"
#: Elements dequantized at once: few calls, and temporaries that stay in a core's cache.
_AT_ONCE = 1 << 17


@dataclass(frozen=True, slots=True)
class _Architecture:
    """A GGUF architecture's Hugging Face class, and whether q and k rows are interleaved.

    llama.cpp rotates element 2j with 2j + 1 in llama files, so its converter reorders the rows
    of q and k; our kernels rotate j with j + head_dim / 2.
    """

    name: str
    interleaved: bool


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", interleaved=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", interleaved=False),
    "qwen3": _Architecture("Qwen3ForCausalLM", interleaved=False),
}
_HUGGING_FACE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<ending>weight|bias)")
_INTERLEAVED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")

# Metadata for operations that are not implemented; a file that sets one is refused by name.
_REFUSED = (
    "attention.sliding_window",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "expert_count",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
)
#: Ends of texts, turns and messages, of which old files give the id of one. llama.cpp stops at all
#: that a vocabulary has.
_ENDS = ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")
# By general.file_type: all F32, mostly F16; other types are quantized or BF16.
_DTYPES = {"0": torch.float32, "1": torch.float16}


def require_architecture(name: str, location: object) -> None:
    """Refuse a file of another architecture.

    Args:
        name: of the architecture, in GGUF's words.
        location: the file or its repository, for messages.

    Raises:
        UnsupportedError: it is not implemented.
    """
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{location} has GGUF architecture {short(name)}", f"known: {', '.join(_ARCHITECTURES)}"
        )


class GGUFCheckpoint:
    """One GGUF file.

    Raises:
        CheckpointError: the file is corrupt or truncated, or a key is missing.
        UnsupportedError: the architecture or one of its settings is not implemented.
    """

    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)
        num_files = self._file.metadata.get("split.count", 1)
        # llama-gguf-split --merge leaves 0.
        if num_files not in (0, 1):
            raise UnsupportedError(
                f"{path} is one of {short(num_files)} files of a split model",
                "merge them with llama-gguf-split --merge",
            )
        name = str(self._file.metadata.get("general.architecture"))
        require_architecture(name, path)
        self._architecture = _ARCHITECTURES[name]
        settings = Settings(self._file.metadata, str(path), f"{name}.")
        for key in _REFUSED:
            if value := settings.get(key):
                raise UnsupportedError(
                    f"{path} sets {name}.{key}={short(value)}, which is not implemented", ANOTHER
                )
        self.config = _model_config(self._file, settings, self._architecture.name)

    def blocks(self) -> Blocks:
        """The formats of matrices that stay in their bits."""
        tensors = self._file.tensors.items()
        return Blocks({_hugging_face_name(name): tensor.type for name, tensor in tensors})

    def open_tensors(self) -> GGUFSource:
        """The tensors of the file."""
        head_dim = self.config.head_dim if self._architecture.interleaved else None
        return GGUFSource(self._file, head_dim)


def _model_config(file: GGUFFile, settings: Settings, architecture: str) -> ModelConfig:
    hidden_size = settings.integer("embedding_length")
    num_heads = settings.integer("attention.head_count")
    num_kv_heads = settings.integer("attention.head_count_kv", num_heads)
    head_dim = settings.integer("attention.key_length", max(hidden_size // num_heads, 1))
    require_head_counts(num_heads, num_kv_heads, head_dim, settings.location)
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.integer(key, head_dim) != head_dim:
            raise UnsupportedError(
                f"{file.path}: {settings.prefix}{key}={settings.get(key)} differs from the head "
                f"size {head_dim}",
                ANOTHER,
            )
    vocabulary = Settings(file.metadata, settings.location, "tokenizer.ggml.")
    tokens = vocabulary.get("tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else None
    vocab_size = settings.integer("vocab_size", num_tokens)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=settings.integer("feed_forward_length"),
        num_layers=settings.integer("block_count", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=settings.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=settings.positions("context_length"),
        rope=_rope(file, settings),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        eos_token_ids=_end_ids(vocabulary, vocab_size),
        bos_token_id=next(iter(vocabulary.token_ids("bos_token_id", vocab_size)), None),
        dtype=_DTYPES.get(str(file.metadata.get("general.file_type")), torch.bfloat16),
        extra={},
    )


def _rope(file: GGUFFile, settings: Settings) -> dict[str, Any]:
    """Rope settings in transformers' form; Llama 3's scaling is a tensor of frequency divisors."""
    rope: dict[str, Any] = {"rope_theta": settings.number("rope.freq_base", DEFAULT_THETA)}
    # As llama.cpp reads a factor without a type.
    implied = "linear" if settings.get("rope.scaling.factor") else "none"
    scaling = settings.get("rope.scaling.type", implied)
    if ROPE_FREQUENCIES in file.tensors:
        if scaling != "none":
            raise UnsupportedError(
                f"{file.path} has both {ROPE_FREQUENCIES} and rope scaling {scaling!r}", ANOTHER
            )
        if math.prod(file.tensors[ROPE_FREQUENCIES].shape) > MAX_HEAD_DIM:
            raise CheckpointError(f"{file.path}: {ROPE_FREQUENCIES} is too large", AGAIN)
        divisors = torch.cat(list(GGUFSource(file, None).chunks(ROPE_FREQUENCIES)))
        return rope | {"rope_type": "divided", "divisors": tuple(divisors.flatten().tolist())}
    if scaling == "none":
        return rope | {"rope_type": "default"}
    if scaling == LONGROPE:
        raise UnsupportedError(
            f"{file.path} has rope scaling {scaling!r}", "use the original checkpoint"
        )
    rope |= {"rope_type": scaling, "factor": settings.number("rope.scaling.factor")}
    if scaling == "yarn":
        longest = settings.positions("context_length")
        original = settings.positions("rope.scaling.original_context_length", longest)
        rope["original_max_position_embeddings"] = original
        for key in ("beta_fast", "beta_slow"):
            if settings.get(f"rope.scaling.yarn_{key}"):
                rope[key] = settings.number(f"rope.scaling.yarn_{key}")
    return rope


def _end_ids(vocabulary: Settings, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a text, a turn or a message; llama.cpp stops at all three."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [i for key in keys for i in vocabulary.token_ids(key, vocab_size)]
    tokens = vocabulary.names("tokens")[:vocab_size]
    ids += [i for i, token in enumerate(tokens) if token in _ENDS]
    return tuple(dict.fromkeys(ids))


class GGUFSource:
    """Tensors of a GGUF file under Hugging Face names.

    Args:
        file: the parsed header.
        interleaved_head_dim: head size if rows of q and k are stored interleaved.
    """

    def __init__(self, file: GGUFFile, interleaved_head_dim: int | None) -> None:
        self.location = str(file.path)
        self._path = file.path
        self._tensors = {_hugging_face_name(name): t for name, t in file.tensors.items()}
        self._interleaved_head_dim = interleaved_head_dim

    def names(self) -> Collection[str]:
        """Hugging Face names; tensors without one keep the file's names."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in PyTorch's order."""
        return self._tensors[name].shape

    def chunks(self, name: str) -> Iterator[Tensor]:
        """fp32 rows in Hugging Face order."""
        tensor = self._tensors[name]
        for raw in self._rows(tensor):
            values = _dequantized(raw, tensor, self.location)
            yield self._in_order(values.flatten() if len(tensor.shape) == 1 else values, tensor)

    def stored_dtype(self, name: str) -> torch.dtype:
        """Bytes of blocks."""
        return torch.uint8

    def stored_chunks(self, name: str) -> Iterator[Tensor]:
        """Rows of a matrix in Hugging Face order, as bytes."""
        tensor = self._tensors[name]
        for raw in self._rows(tensor):
            yield self._in_order(torch.from_numpy(raw), tensor)

    def _in_order(self, rows: Tensor, tensor: GGUFTensor) -> Tensor:
        head_dim = self._head_dim_of(tensor)
        return rows if head_dim is None else _half_split(rows, head_dim)

    def _head_dim_of(self, tensor: GGUFTensor) -> int | None:
        """The head size of a tensor whose rows are interleaved."""
        return self._interleaved_head_dim if _INTERLEAVED.fullmatch(tensor.name) else None

    def _rows(self, tensor: GGUFTensor) -> Iterator[np.ndarray]:
        """Bytes of whole rows or heads; read, not mapped, as mapped pages count as memory."""
        step = rows_per_chunk(tensor.shape[-1], self._head_dim_of(tensor) or 1)
        with open_regular(self._path) as file:
            file.seek(tensor.offset)
            for first in range(0, tensor.num_rows, step):
                rows = min(step, tensor.num_rows - first)
                raw = np.fromfile(file, np.uint8, rows * tensor.row_bytes)
                if raw.size < rows * tensor.row_bytes:
                    raise CheckpointError(
                        f"{self.location} ends inside tensor {tensor.name}", AGAIN
                    )
                yield raw.reshape(rows, tensor.row_bytes)


def _dequantized(raw: np.ndarray, tensor: GGUFTensor, location: str) -> Tensor:
    try:
        with np.errstate(all="ignore"):
            groups = np.array_split(raw, max(len(raw) * tensor.shape[-1] // _AT_ONCE, 1))
            # gguf takes 16 rows at once, however short they are: here it sees one.
            values = [dequantize(group.reshape(1, -1), tensor.type) for group in groups]
            return torch.from_numpy(np.concatenate(values, axis=1).reshape(len(raw), -1))
    except NotImplementedError as error:
        raise UnsupportedError(
            f"tensor {tensor.name} of {location} has type {tensor.type.name}",
            "use a file of another quantization, such as Q8_0 or Q4_K",
        ) from error


def _half_split(rows: Tensor, head_dim: int) -> Tensor:
    """De-interleave [n * head_dim, ...] rows: per head, rows 0 2 4 .., then 1 3 5 .."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _hugging_face_name(name: str) -> str:
    match = _NAME.fullmatch(name)
    stem = _HUGGING_FACE_NAMES.get(match["stem"]) if match else None
    if match is None or stem is None:
        return name
    layer = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{layer}{stem}.{match['ending']}"
