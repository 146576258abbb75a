"""Hugging Face checkpoints: config.json, generation_config.json and the files of the weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.io.files import open_regular
from sametoken.layers.rotary import DEFAULT_THETA, LONGROPE, PROPORTIONAL
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.layer_types import FULL, SLIDING
from sametoken.models.load.dtypes import DTYPE_KEYS, config_dtype, names_dtype, stored_dtype
from sametoken.models.load.files import (
    AGAIN,
    PICKLED,
    read_generation_config,
    read_settings,
    unreadable,
    weight_files,
)
from sametoken.models.load.linear_format import Quantization
from sametoken.models.load.pickled import PickledSource
from sametoken.models.load.quantization import read_quantization
from sametoken.models.load.quantization_files import quantization_of_another_file
from sametoken.models.load.settings import (
    COMPARE,
    MAX_COUNT,
    MAX_LAYERS,
    NO_SETTINGS,
    QUANTIZATION_KEYS,
    Settings,
    require_head_counts,
    require_values,
)
from sametoken.models.load.sources import rows_per_chunk
from sametoken.models.registry import ARCHITECTURES, model_class

_TYING = "tie_word_embeddings"
#: Beginnings of the names of a head's tensors.
_HEADS = ("lm_head.", "language_model.lm_head.")
# Top-level keys of a vision-language config that apply to its text decoder too.
_COMMON = ("architectures", "eos_token_id", _TYING, *DTYPE_KEYS, *QUANTIZATION_KEYS)
_FLOATING = ("F64", "F32", "F16", "BF16")
#: torch has no dtype for these.
_NOT_IN_TORCH = ("F4", "F6_E2M3", "F6_E3M2")


class HuggingFaceCheckpoint:
    """A directory with config.json and files of weights.

    With the load format "safetensors" pickled ones are refused.

    Raises:
        CheckpointError: no config.json, malformed JSON, or a key is missing or impossible.
        UnsupportedError: the architecture, its quantization or a setting is not implemented.
    """

    def __init__(self, directory: Path, load_format: str = "auto") -> None:
        self._directory, self._load_format = directory, load_format
        config = read_settings(directory / "config.json")
        # First: other architectures may name their sizes otherwise.
        family = model_class(_architecture(config))
        told = quantization_of_another_file(directory, config)
        if not names_dtype(config):
            # Without weights, as for dummy ones, none is told; faults of theirs are said later.
            with suppress(CheckpointError, UnsupportedError):
                embedding = f"{family.embedding_name}.weight"
                told["dtype"] = stored_dtype(open_weights(directory), embedding)
        told |= _stored_tying(directory, config, family)
        config = replace(config, values={**config.values, **told})
        self.config = model_config(config, read_generation_config(directory))

    def open_tensors(self) -> SafetensorsSource | PickledSource:
        """The tensors of the directory.

        Raises:
            UnsupportedError: they are pickled, which ``load_format`` excludes.
        """
        source = open_weights(self._directory)
        if self._load_format == "safetensors" and isinstance(source, PickledSource):
            raise UnsupportedError(
                f"{self._directory} holds pickled weights only", "use load_format 'auto'"
            )
        return source

    def formats(self, *, of_module: bool = False) -> Quantization:
        """Those of all linears, of a module too."""
        return read_quantization(self.config.extra, str(self._directory))


def _stored_tying(directory: Path, config: Settings, family: type[Decoder]) -> dict[str, bool]:
    """Whether embedding and head are tied, where a config says both; it is seen from the weights.

    transformers 5 has and writes its own default for Mistral 3, whatever the text decoder says
    (vllm#51063).
    """
    whole, text = config.get(_TYING), config.nested("text_config").get(_TYING)
    is_implied = whole is None and family.ties_by_default
    if not is_implied and (text is None or whole in (None, text)):
        return {}
    # Without weights, as for dummy ones, the top decides.
    with suppress(CheckpointError, UnsupportedError):
        names = open_weights(directory).names()
        return {_TYING: not any(name.startswith(_HEADS) for name in names)}
    return {}


def model_config(
    given: Settings, generation: Settings = NO_SETTINGS, *, rotates_parts: bool = False
) -> ModelConfig:
    """The architecture of a config.json in transformers' form.

    Args:
        given: the config.
        generation: generation_config.json, empty if there is none.
        rotates_parts: whether it may rotate a part of each head, whatever its class.

    Raises:
        CheckpointError: a key is missing or impossible.
        UnsupportedError: the quantization or another setting is not implemented.
    """
    config, location = given.values, given.location
    architecture = _architecture(given)
    text = config.get("text_config")
    if isinstance(text, dict):
        config = text | {key: config[key] for key in _COMMON if config.get(key) is not None}
    read_quantization(config, location)
    # A draft head names an architecture of its own.
    family = ARCHITECTURES.get(architecture, Decoder)
    own = {key: value for key, value in config.items() if key not in family.ignored}
    named = _by_own_names(own, family.aliases, location)
    # A number may be null for none, as sliding_window; a switch that is null is as good as absent.
    unset = {
        key: on
        for key, on in family.implied.items()
        if isinstance(on, bool) and named.get(key) is None
    }
    settings = Settings({**family.implied, **named, **unset}, location)
    settings = replace(settings, values={**settings.values, **family.renamed(settings)})
    vocab_size = settings.integer("vocab_size")
    hidden_size = settings.integer("hidden_size")
    num_heads = settings.integer("num_attention_heads")
    num_kv_heads = settings.integer("num_key_value_heads", num_heads)
    head_dim = settings.integer("head_dim", max(hidden_size // num_heads, 1))
    require_head_counts(num_heads, num_kv_heads, head_dim, location)
    end_ids = generation.token_ids("eos_token_id", vocab_size)
    rotates_parts = rotates_parts or family.rotates_parts
    rope, local_rope = _ropes(settings, family.local_theta, rotates_parts=rotates_parts)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=settings.integer(
            "intermediate_size", settings.get("moe_intermediate_size")
        ),
        num_layers=settings.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        max_position_embeddings=_positions(settings, rope, local_rope),
        rope=rope,
        tie_word_embeddings=settings.switch(_TYING),
        attention_bias=settings.switch("attention_bias"),
        eos_token_ids=end_ids or settings.token_ids("eos_token_id", vocab_size),
        bos_token_id=next(iter(settings.token_ids("bos_token_id", vocab_size)), None),
        dtype=config_dtype(settings),
        extra=dict(settings.values),
        local_rope=local_rope,
    )


def _architecture(given: Settings) -> str:
    architectures = given.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(f"{given.location} names no architecture", 'set "architectures"')
    return str(architectures[0])


def _by_own_names(
    own: Mapping[str, Any], aliases: Mapping[str, str], location: str
) -> dict[str, Any]:
    """A config's settings by the names that are read here.

    Raises:
        CheckpointError: two names of one have different values.
    """
    named: dict[str, Any] = {}
    for key, value in own.items():
        name = aliases.get(key, key)
        if value is not None and named.get(name, value) not in (None, value):
            raise CheckpointError(
                f"{location}: {key}={short(value)}, and {short(named[name])} by another name",
                COMPARE,
            )
        named[name] = named.get(name) if value is None else value
    return named


def _ropes(
    settings: Settings, local_theta: float | None, *, rotates_parts: bool
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Rope settings of all layers, or of those that see all, and of those with a window.

    Raises:
        UnsupportedError: those by layer type have YaRN's borders not rounded, which transformers
            passes over there.
    """
    if local_theta is None:
        return _rope(settings, rotates_parts=rotates_parts), None
    by_type = settings.nested("rope_parameters")
    theta = settings.number("rope_local_base_freq", local_theta)
    values = {key: value for key, value in settings.values.items() if key != "rope_scaling"}
    own = {"rope_theta": theta, "rope_parameters": by_type.get(SLIDING)}
    local = _rope(Settings(values | own, settings.location), rotates_parts=rotates_parts)
    of_full = Settings(by_type, settings.location).nested(FULL) | settings.nested("rope_scaling")
    given = Settings({**values, "rope_parameters": of_full}, settings.location)
    full = _rope(given, rotates_parts=rotates_parts)
    for rope in (full, local):
        require_values(Settings(rope, settings.location), {"truncate": (True,)})
    return full, local


def _rope(settings: Settings, *, rotates_parts: bool) -> dict[str, Any]:
    """Rope settings from ``rope_scaling`` and ``rope_theta``, or from ``rope_parameters``."""
    # In transformers' order: who extends a context adds the old key to a file that has the new.
    given = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{settings.location}: the rope settings are not an object", AGAIN)
    types = [short(name) for name, value in given.items() if isinstance(value, dict)]
    if types:
        raise UnsupportedError(
            f"{settings.location} has rope settings per layer type ({', '.join(types)}), "
            "which are not supported",
            "use a checkpoint whose layers share one",
        )
    if given.get("truncate", True) is None:
        # By default YaRN's borders are rounded, by a null not.
        given = {**given, "truncate": False}
    given = {key: value for key, value in given.items() if value is not None}
    own = Settings(given, settings.location)
    whole = settings.number("partial_rotary_factor", 1.0)
    partial = own.number("partial_rotary_factor", whole)
    if partial > 1.0:
        raise CheckpointError(
            f"{settings.location}: partial_rotary_factor={partial!r} rotates more than a head",
            AGAIN,
        )
    rope_type = own.get("rope_type") or own.get("type") or "default"
    if partial != 1.0 and not (rotates_parts or rope_type == PROPORTIONAL):
        raise UnsupportedError(
            f"{settings.location}: partial_rotary_factor={partial!r} is not supported",
            "use a checkpoint that rotates whole heads",
        )
    if partial != 1.0:
        given = {**given, "partial_rotary_factor": partial}
    if rope_type == "mrope":
        # Of text the three positions of a token are equal.
        rope_type = "default"
    if rope_type in ("su", "yarn") and "long_factor" in given:
        # As the first checkpoints of Phi-3 call it.
        rope_type = LONGROPE
    theta = own.number("rope_theta", settings.number("rope_theta", DEFAULT_THETA))
    rope = {**given, "rope_type": rope_type, "rope_theta": theta}
    if rope_type in ("llama3", "yarn", LONGROPE):
        longest = settings.positions("max_position_embeddings")
        original = own.positions("original_max_position_embeddings", longest)
        original = settings.positions("original_max_position_embeddings", original)
        rope["original_max_position_embeddings"] = original
        rope["factor"] = own.number("factor", longest / original)
    return rope


def _positions(
    settings: Settings, rope: Mapping[str, Any], local_rope: Mapping[str, Any] | None
) -> int:
    """The number of positions, scaled ones included.

    A config with YaRN or linear scaling may still name the length before it, as vLLM reads it. One
    with llama3's names the whole length, as does Gemma 3's, whose windows have a rope of their own.
    """
    declared = settings.positions("max_position_embeddings")
    factor = rope.get("factor")
    if local_rope is not None or rope["rope_type"] not in ("linear", "yarn"):
        return declared
    if not (isinstance(factor, int | float) and 1 < factor <= MAX_COUNT):
        return declared
    return max(declared, int(rope.get("original_max_position_embeddings", declared) * factor))


def open_weights(directory: Path) -> SafetensorsSource | PickledSource:
    """The tensors of a directory, from single or sharded files.

    Raises:
        CheckpointError: no weights, a shard missing, or a file truncated.
        UnsupportedError: pickled files with other things than tensors.
    """
    files = weight_files(directory)
    kind = PickledSource if files[0].name.endswith(PICKLED) else SafetensorsSource
    return kind(str(directory), files)


#: Elements that are read before a file is mapped anew.
_MAPPED_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor is, and what its file's header says of it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class SafetensorsSource:
    """The tensors of safetensors files, as a ``TensorSource``.

    Raises:
        CheckpointError: a file is truncated, or two hold one tensor.
    """

    def __init__(self, location: str, files: Sequence[Path]) -> None:
        self.location = location
        self._stored: dict[str, _Stored] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._kept = _KeptFile()
        for path in files:
            with _named(path), _opened(path) as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                stored = {
                    name: _Stored(path, one.get_dtype(), tuple(one.get_shape()))
                    for name, one in slices.items()
                }
            for name in stored.keys() & self._stored.keys():
                raise CheckpointError(
                    f"tensor {name} is in {self._stored[name].path} and in {path.name}", AGAIN
                )
            self._stored |= stored

    def names(self) -> Collection[str]:
        """Names in the files."""
        return self._stored.keys()

    def names_in(self, file: Path) -> list[str]:
        """Names in one file."""
        return [name for name, one in self._stored.items() if one.path == file]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in the file's header."""
        return self._stored[name].shape

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Rows of the tensor."""
        stored = self._stored[name]
        if stored.dtype not in _FLOATING:
            raise UnsupportedError(
                f"tensor {name} of {stored.path} has dtype {stored.dtype}",
                f"use a checkpoint of unquantized weights ({', '.join(_FLOATING)}), or one whose "
                "quantization_config covers the tensor",
            )
        return self.stored_chunks(name)

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype in the file's header; of each kind one tensor is asked."""
        stored = self._known(name)
        if stored.dtype not in self._dtypes:
            with self._kept.reading(stored) as file:
                tensor = file.get_slice(name)
                rows: Tensor = tensor[:0] if stored.shape else file.get_tensor(name)
            self._dtypes[stored.dtype] = rows.dtype
        return self._dtypes[stored.dtype]

    def stored_chunks(self, name: str) -> Iterator[Tensor]:
        """As ``chunks``, of any dtype; a scalar is one row."""
        with self._kept.reading(self._known(name)) as file:
            tensor = file.get_slice(name)
            shape = tensor.get_shape()
            if not shape:
                yield file.get_tensor(name)[None]
                return
            step = rows_per_chunk(math.prod(shape[1:]))
            for first in range(0, shape[0], step):
                yield tensor[first : first + step]

    def _known(self, name: str) -> _Stored:
        stored = self._stored[name]
        if stored.dtype in _NOT_IN_TORCH:
            raise CheckpointError(
                f"tensor {name} of {stored.path} has dtype {stored.dtype}, which torch lacks",
                "use a checkpoint that packs such numbers into bytes (U8), or an unquantized one",
            )
        return stored


class _KeptFile:
    """The file that was read last. To open one costs more than most tensors: its whole header is
    read. It is opened again after ``_MAPPED_ELEMENTS``, as mapped pages count as memory.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._left = 0
        self._file: Any = None

    @contextmanager
    def reading(self, stored: _Stored) -> Iterator[Any]:
        """The tensor's file; errors name it."""
        with _named(stored.path):
            if self._path != stored.path or self._left <= 0:
                self._file = _opened(stored.path)
                self._path, self._left = stored.path, _MAPPED_ELEMENTS
            self._left -= math.prod(stored.shape)
            yield self._file


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let errors of a safetensors file name it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise unreadable(path, "is truncated or corrupt", error) from error


def _opened(path: Path) -> Any:
    open_regular(path).close()
    return safe_open(path, framework="pt")
