"""LoRA adapters in PEFT's format: adapter_config.json and the file of their low-rank factors.

What would change the result and is not implemented is refused by the config, before the tensors
are read. Settings of a training that leave no trace in how its factors are applied are ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError, WeightUpdateError, shown
from sametoken.io.files import copied
from sametoken.models.adapter_factors import Adapter, StackedFactors, experts_of, module_name
from sametoken.models.load.expert_stacks import parameters_of, stack_of
from sametoken.models.load.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PICKLED,
    choose_adapter_weights,
    read_json_object,
    unreadable,
)
from sametoken.models.load.huggingface import SafetensorsSource
from sametoken.models.load.pickled import PickledSource
from sametoken.models.load.sent import SentTensors
from sametoken.models.load.settings import Settings, compiled, require_known, unsupported
from sametoken.models.load.sources import TensorSource, require_finite
from sametoken.ops.model.low_rank import Factors

MAX_RANK = 512
#: Products with factors of any usual size stay finite.
MAX_ALPHA = 2**20
#: Of r and of lora_alpha.
_DEFAULT = 8
_USED = (
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
    "target_parameters",
)
_ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (True,),
}
#: Where and how an adapter was trained; which modules it has is seen from its tensors.
_UNUSED = (
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "merge_weights",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
)
#: The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) also change the weights that are adapted.
_INITS = (None, False, True, "gaussian", "eva", "orthogonal", "mica")
#: A factor's name. The decoder is at the top, or named as in one of the models with a head.
_NAME = re.compile(
    r"base_model\.model\.(?P<name>"
    r"(?:(?:model|backbone|language_model|model\.language_model|language_model\.model)\.)?"
    r"(?P<module>layers\.\d+(?:\.\w+)+))\.lora_(?P<factor>[AB])(?:\.default)?\.weight",
    re.ASCII,
)
_MERGE = "merge it into its model with PEFT's merge_and_unload, or use another adapter"
_CONVERT = f"save it with path_initial_model_for_weight_conversion, {_MERGE}"
#: Of an adapter's files: they differ once one of them is written; None: it is not there.
Stamps = tuple[tuple[int, int, int] | None, ...]
#: Cause and remedy where a trainer gives something else.
NOT_AN_ADAPTER = (
    "an adapter is a mapping of tensors, and one of its settings",
    "give get_peft_model_state_dict(model) and LoraConfig.to_dict()",
)
#: Where an adapter is that has no directory.
SENT = "of the trainer"
_AGAIN = "save the adapter again, with all shards of its tensors gathered, or download it again"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What adapter_config.json says of the factors.

    Attributes:
        rank: of modules that no pattern of ``ranks`` matches.
        alpha: of modules that no pattern of ``alphas`` matches.
        by_root: whether alpha is divided by the root of the rank.
        parameters: ends of the names of parameters that were trained without their modules.
    """

    rank: int
    alpha: float
    ranks: tuple[tuple[re.Pattern[str], int], ...]
    alphas: tuple[tuple[re.Pattern[str], float], ...]
    by_root: bool
    parameters: tuple[str, ...] = ()

    def trains(self, parameter: str) -> bool:
        """Whether it trains a parameter of a name below PEFT's own prefix."""
        return any(f".{parameter}".endswith(f".{one}") for one in self.parameters)

    def rank_of(self, module: str) -> int:
        """The rank of a module, whose name begins below PEFT's own prefix."""
        name = self._known_as(module)
        return next((rank for one, rank in self.ranks if one.match(name)), self.rank)

    def scale_of(self, module: str) -> float:
        """The scale of a module's update, likewise."""
        name, rank = self._known_as(module), self.rank_of(module)
        alpha = next((alpha for one, alpha in self.alphas if one.match(name)), self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def _known_as(self, module: str) -> str:
        """As patterns have it: of a module whose weight is a trained parameter, the weight."""
        weight = f"{module}.weight"
        return weight if self.trains(weight) else module


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as PEFT has it.

    Attributes:
        location: its directory, for messages; or what came from a trainer.
        config: of its factors.
        tensors: by PEFT's names.
        stamps: of its files as they were read; (): it has none.
    """

    location: str
    config: AdapterConfig
    tensors: TensorSource
    stamps: Stamps = ()

    def read(self) -> Adapter:
        """The adapter, in memory of its own.

        Raises:
            CheckpointError: a factor lacks its other half, has another shape than the config gives
                it, or is not finite.
            UnsupportedError: a tensor is not implemented.
        """
        source, config = self.tensors, self.config
        modules = _modules(source)
        stacked = parameters_of(modules, config.trains, source.location)
        for name, tensors in modules.items():
            rank = config.rank_of(stacked.get(name, name))
            _require_rank(source, tensors, rank, stacked=name in stacked)
        singles, stacks = dict[str, Factors](), dict[str, StackedFactors]()
        for name, tensors in modules.items():
            known_as = stacked.get(name, name)
            own = Factors(
                _read(source, tensors["A"]), _read(source, tensors["B"]), config.scale_of(known_as)
            )
            at = module_name(known_as)
            if at in singles or at in stacks:
                raise _two_ways(source, at)
            if name in stacked:
                stacks[at] = stack_of(own, config.rank_of(known_as))
            else:
                singles[at] = own
        for twice in {experts_of(at) for at in stacks} & {experts_of(at) for at in singles}:
            raise _two_ways(source, twice)
        return Adapter(self.location, singles, stacks)


def open_adapter(path: Path) -> StoredAdapter:
    """An adapter whose files were read once, from their directory.

    Raises:
        CheckpointError: a file is missing, corrupt, or written meanwhile, or a setting is
            impossible.
        UnsupportedError: a setting is not implemented.
    """
    stamps = _stamps(path)
    try:
        names = [file.name for file in path.iterdir()] if path.is_dir() else []
        weights = path / choose_adapter_weights(names, path)
        config = read_adapter_config(path)
        return StoredAdapter(str(path), config, _whole(weights), stamps)
    finally:
        if _stamps(path) != stamps:
            raise changed(path)


def sent_adapter(
    tensors: Mapping[str, Tensor] | None, config: Mapping[str, Any] | None
) -> StoredAdapter:
    """An adapter in a trainer's memory, which stays as it is until it is read.

    Args:
        tensors: as PEFT's ``get_peft_model_state_dict`` returns them.
        config: as ``LoraConfig.to_dict`` returns it.

    Raises:
        CheckpointError: a setting is impossible.
        UnsupportedError: a setting is not implemented.
        WeightUpdateError: one of them is no such object.
    """
    if not isinstance(config, Mapping) or not isinstance(tensors, Mapping):
        raise WeightUpdateError(*NOT_AN_ADAPTER)
    return StoredAdapter(SENT, adapter_config(config), SentTensors(tensors.items()))


def config_text(config: Mapping[str, Any]) -> str:
    """What adapter_config.json holds of ``LoraConfig.to_dict``, whose modules are a set.

    Raises:
        TypeError, ValueError: it is no such object.
    """
    return json.dumps(dict(config), default=list)


def changed(path: object) -> CheckpointError:
    """The error of files that were written while they were read."""
    return CheckpointError(
        f"the adapter in {path} was written while it was read",
        "write each adapter to a directory of its own, and load it when it is whole",
    )


def _stamps(path: Path) -> Stamps:
    return tuple(_stamp(path / name) for name in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS))


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _whole(file: Path) -> TensorSource:
    """All tensors of a file.

    Read from a copy: a file that is cut short while it is mapped ends the process.
    """
    kind = PickledSource if file.suffix in PICKLED else SafetensorsSource
    try:
        with copied(file) as copy:
            try:
                source = kind(str(file), [copy])
                tensors = {name: _copy(source, name) for name in source.names()}
            except (CheckpointError, UnsupportedError) as error:
                cause = error.cause.replace(str(copy), str(file))
                raise type(error)(cause, error.remedy) from error
    except OSError as error:
        raise unreadable(file, "cannot be read", error, _AGAIN) from error
    return SentTensors(tensors.items(), str(file))


def read_adapter_config(path: Path) -> AdapterConfig:
    """The config in an adapter's directory, if all that changes the result is implemented.

    Raises:
        CheckpointError: the file is missing or malformed, or a setting is impossible.
        UnsupportedError: a setting is not implemented.
    """
    file = path / ADAPTER_CONFIG
    if not file.exists():
        raise CheckpointError(
            f"{path} holds no {ADAPTER_CONFIG}", "give the directory of an adapter in PEFT's format"
        )
    return adapter_config(read_json_object(file), str(file))


def adapter_config(read: Mapping[str, Any], location: str = "config") -> AdapterConfig:
    """A config, from a place that messages name; errors as ``read_adapter_config``."""
    # Each version of PEFT writes new switches, which are off. In memory lists may be sets.
    values = {
        key: list(value) if isinstance(value, set) else value
        for key, value in read.items()
        if key in _USED or value is not False
    }
    config = Settings(values, location)
    if not config.get("peft_type"):
        raise CheckpointError(f"{location} names no peft_type", "give an adapter in PEFT's format")
    require_known(config, used=_USED, only=_ONLY, unused=_UNUSED, remedy=_MERGE)
    if config.get("init_lora_weights") not in _INITS:
        raise unsupported(config, "init_lora_weights", _CONVERT)
    ranks, alphas = (
        Settings(config.nested(key), f"{location}: {key}")
        for key in ("rank_pattern", "alpha_pattern")
    )
    return AdapterConfig(
        _rank(config, "r", _DEFAULT),
        _alpha(config, "lora_alpha", _DEFAULT),
        tuple((_pattern(ranks, key), _rank(ranks, key)) for key in ranks.values),
        tuple((_pattern(alphas, key), _alpha(alphas, key)) for key in alphas.values),
        config.switch("use_rslora"),
        config.names("target_parameters"),
    )


def _pattern(given: Settings, key: str) -> re.Pattern[str]:
    """Matches a module's whole name, or its end from a dot on, as PEFT does."""
    return compiled(given, rf"(.*\.)?({key})$")


def _rank(given: Settings, key: str, default: int | None = None) -> int:
    rank = given.integer(key, default)
    if rank > MAX_RANK:
        raise unsupported(given, key, f"train with a rank of at most {MAX_RANK}, {_MERGE}")
    return rank


def _alpha(given: Settings, key: str, default: float | None = None) -> float:
    alpha = given.number(key, default)
    if alpha > MAX_ALPHA:
        raise unsupported(given, key, f"use at most {MAX_ALPHA}")
    return alpha


def _modules(source: TensorSource) -> dict[str, dict[str, str]]:
    """The modules of a file that holds both factors of each, and nothing else.

    Returns:
        By their names below PEFT's prefix, the names of their tensors by factor, "A" and "B".
    """
    modules: dict[str, dict[str, str]] = {}
    names: dict[str, str] = {}
    for name in source.names():
        match = _NAME.fullmatch(name)
        if match is None:
            raise UnsupportedError(
                f"tensor {shown(name)} of {source.location} is no LoRA factor of a decoder layer",
                _MERGE,
            )
        tensors = modules.setdefault(match["name"], {})
        known_as = names.setdefault(match["module"], match["name"])
        if match["factor"] in tensors or known_as != match["name"]:
            raise _two_ways(source, match["module"])
        tensors[match["factor"]] = name
    if not modules:
        raise CheckpointError(f"{source.location} holds no tensors", _AGAIN)
    for tensors in modules.values():
        if len(tensors) < 2:
            (only,) = tensors.values()
            raise CheckpointError(f"{source.location} holds {only} without its pair", _AGAIN)
    return modules


def _two_ways(source: TensorSource, module: str) -> CheckpointError:
    return CheckpointError(f"{source.location} names {module} in two ways", _AGAIN)


def _require_rank(
    source: TensorSource, tensors: Mapping[str, str], rank: int, *, stacked: bool
) -> None:
    """Refuse factors of another shape than a module's rank gives them, of one or of E experts."""
    if stacked:
        # As many experts as the first factor has.
        rows, *_ = source.shape(tensors["A"]) or (0,)
        rank *= max(1, rows // rank)
    for factor, axis, wanted in (("A", 0, "r, in_features"), ("B", 1, "out_features, r")):
        name = tensors[factor]
        shape = source.shape(name)
        if len(shape) != 2 or 0 in shape or shape[axis] != rank:
            raise CheckpointError(
                f"tensor {name} of {source.location} has shape {list(shape)}, not [{wanted}] with "
                f"the r of {rank} that {ADAPTER_CONFIG} gives it",
                _AGAIN,
            )


def _read(source: TensorSource, name: str) -> Tensor:
    """A finite tensor, which a trainer's next step does not change."""
    tensor = _copy(source, name)
    require_finite(tensor, name, source)
    return tensor


def _copy(source: TensorSource, name: str) -> Tensor:
    """A copy of a tensor, on the host."""
    own = [chunk.cpu() for chunk in source.chunks(name)]
    return torch.cat(own) if own else torch.empty(source.shape(name), dtype=torch.float32)
