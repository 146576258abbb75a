"""GGUF checkpoints: metadata as ``ModelConfig``, tensors in Hugging Face names and order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.io.files import open_regular
from sametoken.layers.rotary import DEFAULT_THETA, LONGROPE
from sametoken.models.base import ModelConfig
from sametoken.models.load.gguf_architecture import HEAD_SIZE, Architecture
from sametoken.models.load.gguf_architectures import form_of
from sametoken.models.load.gguf_file import GGUFFile
from sametoken.models.load.gguf_parts import read_model
from sametoken.models.load.gguf_settings import ATTENTION_FACTORS
from sametoken.models.load.gguf_source import (
    AGAIN,
    LONG_FACTORS,
    ROPE_FREQUENCIES,
    SHORT_FACTORS,
    GGUFSource,
    dequantized,
)
from sametoken.models.load.huggingface import model_config
from sametoken.models.load.linear_format import UNQUANTIZED, Quantization
from sametoken.models.load.settings import (
    ANOTHER,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    Settings,
    require_head_counts,
)
from sametoken.models.registry import model_class

# By general.file_type: all F32, mostly F16; other types are quantized or BF16.
_DTYPES = {"0": "float32", "1": "float16"}
#: Ends of texts, turns and messages, of which old files give the id of one. llama.cpp stops at all
#: that a vocabulary has.
_ENDS = ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")


class GGUFCheckpoint:
    """A model in a GGUF file, or in several from this one on; if ``packed`` it stays in its bits.

    Raises:
        CheckpointError: a file is corrupt, truncated or missing, or a key is missing.
        UnsupportedError: the architecture or one of its settings is not implemented.
    """

    def __init__(self, path: Path, *, packed: bool = False) -> None:
        self._file, self._packed = read_model(path), packed
        name = str(self._file.metadata.get("general.architecture"))
        self._settings = Settings(self._file.metadata, str(path), f"{name}.")
        self._architecture = form_of(name, self._settings)
        self.config = _model_config(self._file, self._settings, self._architecture)

    def formats(self, *, of_module: bool = False) -> Quantization:
        """Those of the model's matrices that stay in their bits, or of its module's."""
        return self.open_tensors().blocks(of_module=of_module) if self._packed else UNQUANTIZED

    def open_tensors(self) -> GGUFSource:
        """The tensors of the model."""
        return GGUFSource(self._file, self._architecture, self._settings, self.config)


def _model_config(file: GGUFFile, settings: Settings, architecture: Architecture) -> ModelConfig:
    """The architecture, by way of a config.json in transformers' form."""
    hidden_size = settings.integer("embedding_length")
    num_heads = settings.integer("attention.head_count")
    num_kv_heads = architecture.size(settings, "attention.head_count_kv", num_heads)
    head_dim = settings.integer(architecture.head_size, max(hidden_size // num_heads, 1))
    require_head_counts(num_heads, num_kv_heads, head_dim, settings.location)
    vocabulary = Settings(file.metadata, settings.location, "tokenizer.ggml.")
    tokens = vocabulary.get("tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else None
    vocab_size = settings.integer("vocab_size", num_tokens)
    rope = _rope(file, settings, architecture)
    config = {
        "architectures": [architecture.name],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": architecture.size(
            settings, "feed_forward_length", settings.get("expert_feed_forward_length")
        ),
        "num_hidden_layers": settings.integer("block_count", most=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": settings.positions("context_length"),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": rope,
        "partial_rotary_factor": _rotated(settings, architecture, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        "eos_token_id": _end_ids(vocabulary, vocab_size, architecture.ends),
        "bos_token_id": next(iter(vocabulary.token_ids("bos_token_id", vocab_size)), None),
        "dtype": _DTYPES.get(str(file.metadata.get("general.file_type")), "bfloat16"),
    }
    own = architecture.config(settings, file.tensors)
    return model_config(Settings(config | own, settings.location))


def _rotated(settings: Settings, architecture: Architecture, head_dim: int) -> float:
    """The part of a head that is rotated."""
    rotates_parts = model_class(architecture.name).rotates_parts
    if architecture.head_size != HEAD_SIZE:
        return 1.0
    rotated = ("rope.dimension_count",) if architecture.rotates else ()
    for key in ("attention.value_length", *rotated):
        is_part = rotates_parts and key in rotated
        if settings.integer(key, head_dim) != head_dim and not is_part:
            raise UnsupportedError(
                f"{settings.location}: {settings.prefix}{key}={settings.get(key)} differs from the "
                f"head size {head_dim}",
                ANOTHER,
            )
    return settings.integer("rope.dimension_count", head_dim) / head_dim if rotated else 1.0


def _rope(file: GGUFFile, settings: Settings, architecture: Architecture) -> dict[str, Any]:
    """Rope settings in transformers' form; Llama 3's scaling is a tensor of frequency divisors."""
    rope: dict[str, Any] = {"rope_theta": settings.number("rope.freq_base", DEFAULT_THETA)}
    # As llama.cpp reads a factor without a type.
    implied = "linear" if settings.get("rope.scaling.factor") else "none"
    scaling = settings.get("rope.scaling.type", implied)
    factors = [settings.number(key) for key in ATTENTION_FACTORS if settings.get(key)]
    if factors:
        rope["attention_factor"] = factors[0]
    if ROPE_FREQUENCIES in file.tensors:
        if scaling != "none":
            raise UnsupportedError(
                f"{file.path} has both {ROPE_FREQUENCIES} and rope scaling {scaling!r}", ANOTHER
            )
        divisors = _values(file, ROPE_FREQUENCIES)
        return rope | {"rope_type": "divided", "divisors": tuple(divisors)}
    if {LONG_FACTORS, SHORT_FACTORS} & file.tensors.keys():
        rope["long_factor"] = _values(file, LONG_FACTORS)
        rope["short_factor"] = _values(file, SHORT_FACTORS)
        return rope | {"rope_type": LONGROPE} | _original(settings)
    if scaling == "none":
        return rope | {"rope_type": "default"}
    if scaling == LONGROPE:
        raise UnsupportedError(
            f"{file.path} has rope scaling {scaling!r}, without its factors",
            "use the original checkpoint",
        )
    rope |= {"rope_type": scaling, "factor": settings.number("rope.scaling.factor")}
    if scaling == "yarn":
        rope |= _original(settings) | architecture.scaled_rope(settings)
        for key in ("beta_fast", "beta_slow"):
            if settings.get(f"rope.scaling.yarn_{key}"):
                rope[key] = settings.number(f"rope.scaling.yarn_{key}")
    return rope


def _original(settings: Settings) -> dict[str, int]:
    longest = settings.positions("context_length")
    original = settings.positions("rope.scaling.original_context_length", longest)
    return {"original_max_position_embeddings": original}


def _values(file: GGUFFile, name: str) -> list[float]:
    """Those of a small vector in the file."""
    if name not in file.tensors or math.prod(file.tensors[name].shape) > MAX_HEAD_DIM:
        raise CheckpointError(f"{file.path}: {name} is missing or too large", AGAIN)
    tensor = file.tensors[name]
    with open_regular(tensor.path) as data:
        data.seek(tensor.offset)
        raw = np.fromfile(data, np.uint8, tensor.num_rows * tensor.row_bytes)
    rows = raw.reshape(tensor.num_rows, tensor.row_bytes)
    values: list[float] = dequantized(rows, tensor, str(file.path)).flatten().tolist()
    return values


def _end_ids(vocabulary: Settings, vocab_size: int, ends: tuple[str, ...]) -> list[int]:
    """Ids that end a text, a turn or a message; llama.cpp stops at all three."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [i for key in keys for i in vocabulary.token_ids(key, vocab_size)]
    tokens = vocabulary.names("tokens")[:vocab_size]
    ids += [i for i, token in enumerate(tokens) if token in (*_ENDS, *ends)]
    return list(dict.fromkeys(ids))
