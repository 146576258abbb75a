"""How weights are quantized where config.json does not say so: Model Optimizer's own file.

Until 2025 it wrote ``hf_quant_config.json`` alone, and since then the same in config.json too.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from sametoken.errors import UnsupportedError
from sametoken.io.files import is_there
from sametoken.models.load.files import OF_MODELOPT, QUANTIZATION_FILES, read_settings
from sametoken.models.load.nvfp4_linear import GROUP
from sametoken.models.load.settings import KV_SCHEME, QUANTIZATION_KEYS, Settings

_FLOAT8 = {"num_bits": 8, "type": "float"}
_NVFP4 = {"num_bits": 4, "type": "float", "group_size": GROUP}
#: Groups by the names of algorithms.
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "FP8": {"weights": _FLOAT8, "input_activations": _FLOAT8},
    "FP8_PER_CHANNEL_PER_TOKEN": {
        "weights": _FLOAT8 | {"strategy": "channel"},
        "input_activations": _FLOAT8,
    },
    "NVFP4": {"weights": _NVFP4, "input_activations": _NVFP4},
    "W4A16_NVFP4": {"weights": _NVFP4},
}


def quantization_of_another_file(directory: Path, config: Settings) -> dict[str, Any]:
    """What config.json lacks of how weights are quantized, and another file tells.

    Raises:
        CheckpointError: the file is no JSON object, or a key holds none.
        UnsupportedError: it is not Model Optimizer's.
    """
    text = Settings(config.nested("text_config"), config.location)
    if any(one.get(key) for one in (config, text) for key in QUANTIZATION_KEYS):
        return {}
    for name in QUANTIZATION_FILES:
        file = directory / name
        if is_there(file):
            found = name == OF_MODELOPT and _as_config(read_settings(file))
            if found:
                return {QUANTIZATION_KEYS[0]: found}
            raise UnsupportedError(
                f"{file} says how the weights are quantized, and config.json does not",
                "use a checkpoint whose config.json has a quantization_config, or unquantized "
                "weights without that file",
            )
    return {}


def _as_config(file: Settings) -> dict[str, Any] | None:
    """``quantization_config`` in place of hf_quant_config.json; None if another wrote the file.

    Raises:
        CheckpointError: a key holds no object.
    """
    if file.nested("producer").get("name") != "modelopt":
        return None
    own = Settings(file.nested("quantization"), f"{file.location}: quantization")
    layers = own.objects("quantized_layers") or {"Linear": own}
    targets: dict[tuple[str, int | None], list[str]] = defaultdict(list)
    for name, layer in layers.items():
        targets[_algorithm(layer)].append(name)
    groups = {
        f"{name} {size}": {key: one | _sized(one, size) for key, one in _ALGORITHMS[name].items()}
        | {"targets": modules}
        for (name, size), modules in targets.items()
        if name in _ALGORITHMS
    }
    found = {"quant_method": "modelopt", "quant_algo": own.get("quant_algo")}
    kv = own.get("kv_cache_quant_algo")
    if kv:
        found[KV_SCHEME] = _FLOAT8 if kv == "FP8" else kv
    return found | {"config_groups": groups if len(groups) == len(targets) else {}}


def _algorithm(settings: Settings) -> tuple[str, int | None]:
    """The name of an algorithm, and the features that share a scale, if it says so."""
    says = settings.get("group_size") is not None
    size = settings.integer("group_size") if says else None
    return str(settings.get("quant_algo")), size


def _sized(elements: dict[str, Any], size: int | None) -> dict[str, int]:
    return {"group_size": size} if size is not None and "group_size" in elements else {}
