"""Definition of a sweep: its axes and the cells of their product."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sametoken.bench.datasets import RANDOM, require_dataset, require_named
from sametoken.bench.workload import Workload
from sametoken.config import EngineConfig
from sametoken.errors import ConfigError, shown
from sametoken.io.json_text import parse_json
from sametoken.types.option_values import listed, require_least
from sametoken.types.speculative_config import cascade_label

NO_DRAFTER = "none"
_K = "num_speculative_tokens"
#: Options of the engine that are axes, with their names there.
_AXIS_OF = {
    "model": "model",
    "speculative_config": "drafter",
    "tensor_parallel_size": "tensor_parallel_size",
}


def drafter_name(spec: Mapping[str, Any]) -> str:
    """The method of a speculative config, or the model where the checkpoint tells the method.

    A cascade's has the lookup that goes first.
    """
    own = str(spec.get("method") or Path(str(spec.get("model"))).name)
    return cascade_label(spec.get("cascade"), own)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement.

    Attributes:
        model: as ``EngineConfig.model``.
        speculative_config: as ``EngineConfig.speculative_config``.
        tensor_parallel_size: GPUs that share the model.
        input_len, output_len, concurrency, temperature, seed: as in ``Workload``.
        num_iters, warmup: measured batches, and short batches before them.
        dataset, path: arguments of ``load_dataset``; random prompts have ``input_len`` tokens.
        engine: the engine's other options, only those that are not at their default.
    """

    model: str
    speculative_config: Mapping[str, Any] | None
    tensor_parallel_size: int
    input_len: int
    output_len: int
    concurrency: int
    temperature: float
    seed: int
    num_iters: int
    warmup: int
    dataset: str
    path: str | None
    engine: Mapping[str, Any]

    @property
    def name(self) -> str:
        """A readable, unique name."""
        spec = self.speculative_config
        drafts = f"{drafter_name(spec)}-k{spec.get(_K, 0)}" if spec else "plain"
        parts = (
            *(re.sub(r"[^\w.]+", "-", text) for text in (Path(self.model).name, drafts)),
            f"tp{self.tensor_parallel_size}",
            f"in{self.input_len}" if self.dataset == RANDOM else self.dataset,
            f"out{self.output_len}",
            f"c{self.concurrency}",
            f"t{self.temperature:g}",
        )
        return f"{'-'.join(parts)}-{_digest(dataclasses.asdict(self))}"

    @property
    def workload(self) -> Workload:
        """The requests of the cell.

        Raises:
            ConfigError: a number is impossible.
        """
        return Workload(
            self.input_len, self.output_len, (self.concurrency,), self.temperature, self.seed
        )

    def engine_options(self) -> dict[str, Any]:
        """Return the arguments of ``EngineConfig.from_options``."""
        options: dict[str, Any] = {"enable_prefix_caching": False, **self.engine}
        options |= {"model": self.model, "speculative_config": self.speculative_config}
        if self.tensor_parallel_size != 1:
            options["tensor_parallel_size"] = self.tensor_parallel_size
        return options


@dataclass(frozen=True, slots=True)
class Sweep:
    """Axes of a sweep; every combination is a cell.

    Attributes:
        model: checkpoints.
        drafter: speculative configs; one without ``num_speculative_tokens`` is combined with
            that axis. None is plain decoding.
        num_speculative_tokens, tensor_parallel_size: further axes of the engine.
        input_len, output_len, concurrency, temperature: axes of the workload.
        num_iters, warmup, seed, dataset, path: shared by all cells.
        engine: other options of all engines.

    Raises:
        ConfigError: an axis is empty, an option or a drafter is invalid, or two cells are equal.
    """

    model: tuple[str, ...] = ()
    drafter: tuple[Mapping[str, Any] | None, ...] = (None,)
    num_speculative_tokens: tuple[int, ...] = (3,)
    tensor_parallel_size: tuple[int, ...] = (1,)
    input_len: tuple[int, ...] = (512,)
    output_len: tuple[int, ...] = (128,)
    concurrency: tuple[int, ...] = (1,)
    temperature: tuple[float, ...] = (0.0,)
    num_iters: int = 3
    warmup: int = 1
    seed: int = 0
    dataset: str = RANDOM
    path: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in dataclasses.asdict(self).items():
            if isinstance(values, tuple) and not values:
                raise ConfigError(
                    f"the sweep has no {name}", f"give one by --{name.replace('_', '-')}"
                )
        require_least(self, num_iters=1, warmup=0)
        path = Path(self.path) if self.path else None
        require_named(self.dataset, path)
        require_dataset(self.dataset, path)
        if self.dataset != RANDOM and len(self.input_len) > 1:
            raise ConfigError(
                f"prompts of {self.dataset} have lengths of their own", "leave input_len out"
            )
        for name, axis in _AXIS_OF.items():
            if name in self.engine:
                raise ConfigError(
                    f"the sweep's engine has the option {name}", f"give it as the axis {axis}"
                )
        self._require_cells()

    def _require_cells(self) -> None:
        """What options alone show to be impossible is no failed cell."""
        names: set[str] = set()
        for cells in self.engines():
            config = EngineConfig.from_options(**cells[0].engine_options())
            for cell in cells:
                # 0 is chosen for the device.
                cell.workload.require_slots(config.max_num_seqs or cell.concurrency)
                if cell.name in names:
                    raise ConfigError(
                        f"the sweep has {cell.name} twice", "give each value of an axis once"
                    )
                names.add(cell.name)

    def engines(self) -> Iterator[list[Cell]]:
        """Yield the cells of each engine."""
        shared: dict[str, Any] = {
            name: getattr(self, name) for name in ("seed", "num_iters", "warmup", "dataset", "path")
        }
        shared["engine"] = {"max_num_seqs": max(self.concurrency)} | dict(self.engine)
        for model, spec, parallel in itertools.product(
            self.model, self._speculative_configs(), self.tensor_parallel_size
        ):
            workloads = itertools.product(
                self.input_len, self.output_len, self.concurrency, self.temperature
            )
            yield [Cell(model, spec, parallel, *one, **shared) for one in workloads]

    def _speculative_configs(self) -> list[Mapping[str, Any] | None]:
        configs: list[Mapping[str, Any] | None] = []
        for drafter in self.drafter:
            if drafter is None or _K in drafter:
                configs.append(drafter)
            else:
                configs += [{**drafter, _K: k} for k in self.num_speculative_tokens]
        return configs


#: Axes by name, without models and drafters. "vllm-38311" is the grid that shows that issue's
#: loss of acceptance; "peer" is the workload that other engines were measured with.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "vllm-38311": {
        "num_speculative_tokens": (3,),
        "temperature": (0.0,),
        "output_len": (1, 1024),
        "concurrency": (1, 8, 64),
    },
    "peer": {"input_len": (512,), "output_len": (256,), "concurrency": (1, 8, 64)},
}


def make_sweep(
    preset: str | None, file: Mapping[str, Any] | None, given: Mapping[str, Any]
) -> Sweep:
    """Build a sweep; flags override the file's values, which override the preset's.

    Options of ``engine`` override one by one. Names may have hyphens.

    Raises:
        ConfigError: a name is unknown, or a value has the wrong type.
    """
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"preset {preset!r} is not known", f"use {listed(PRESETS)}")
    values = dict(PRESETS[preset]) if preset else {}
    for axes in (file or {}, given):
        for name, value in _underscored(axes).items():
            checked = _checked(name, value)
            values[name] = values.get(name, {}) | checked if name == "engine" else checked
    return Sweep(**values)


def drafter_of(value: Any) -> Mapping[str, Any] | None:
    """The speculative config that an object, JSON text or a method's name is; None for none.

    Raises:
        ConfigError: it is nothing of the kind.
    """
    if value is None or value == NO_DRAFTER:
        return None
    config = value
    if isinstance(value, str):
        try:
            config = {"method": value} if value.isidentifier() else parse_json(value)
        except ValueError:
            config = None
    if not isinstance(config, dict):
        raise ConfigError(
            f"drafter {shown(value)} is no JSON object",
            f"give one, a method's name, or {NO_DRAFTER}",
        )
    return config


def changed_engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Select options that are not at their default; new options then change no cell's name."""
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    return {
        name: value
        for name, value in options.items()
        if name not in defaults or _listed(value) != _listed(defaults[name])
    }


class _Kind(NamedTuple):
    """Types of a value, and what to write for one."""

    types: tuple[type[Any], ...]
    words: str


_TEXT, _INTEGER = _Kind((str,), "a text"), _Kind((int,), "an integer")
_NUMBER, _OBJECT = _Kind((int, float), "a number"), _Kind((dict,), "a JSON object")
_DRAFTER = "drafter"
#: Axes; those of ``_DRAFTER`` are read by ``drafter_of``.
_AXES: Mapping[str, _Kind] = {
    "model": _TEXT,
    _DRAFTER: _OBJECT,
    "num_speculative_tokens": _INTEGER,
    "tensor_parallel_size": _INTEGER,
    "input_len": _INTEGER,
    "output_len": _INTEGER,
    "concurrency": _INTEGER,
    "temperature": _NUMBER,
}
_SINGLE: Mapping[str, _Kind] = {
    "num_iters": _INTEGER,
    "warmup": _INTEGER,
    "seed": _INTEGER,
    "dataset": _TEXT,
    "path": _TEXT,
    "engine": _OBJECT,
}


def _checked(name: str, value: Any) -> Any:
    """Check a value's type; a single value of an axis becomes a tuple of one."""
    if name in _SINGLE:
        _require_kind(name, value, _SINGLE[name], "")
        return _underscored(value) if name == "engine" else value
    if name not in _AXES:
        known = (*_AXES, *_SINGLE)
        raise ConfigError(f"a sweep has no {name!r}", f"use {', '.join(known)}")
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if name == _DRAFTER:
        return tuple(map(drafter_of, values))
    for one in values:
        _require_kind(name, one, _AXES[name], ", or a list with one for each engine or workload")
    return values


def _require_kind(name: str, value: Any, kind: _Kind, alternative: str) -> None:
    if not isinstance(value, kind.types) or isinstance(value, bool):
        raise ConfigError(
            f"{name}={shown(value)} is not possible in a sweep", f"give {kind.words}{alternative}"
        )


def _underscored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, where names may be spelled as options of the command line."""
    return {name.replace("-", "_"): value for name, value in values.items()}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
