"""``quant_method: modelopt``: float8 and NVFP4 as NVIDIA's Model Optimizer writes them.

``config_groups`` say which linears have which format, by their class or by name; what a writer
left out is seen from what is stored. Float8 has a scale a matrix, ``X.weight_scale``, and a fixed
one of activations, ``X.input_scale``; by channel, activations are rounded by token. Scales of keys
and values lie beside their projections (``kv_scheme``). Until 2025 a file of its own said the same
(``quantization_files``).
"""

from __future__ import annotations

from reprlib import repr as short

from sametoken.errors import UnsupportedError
from sametoken.models.load.by_target import ByTarget, Targeted
from sametoken.models.load.fp8_linear import Fp8Linear
from sametoken.models.load.linear_format import LinearFormat
from sametoken.models.load.nvfp4_linear import GROUP, MODELOPT, Nvfp4Linear
from sametoken.models.load.settings import ANOTHER, KV_SCHEME, Settings, require_known

_SCALES = ("weight_scale",)


def read_modelopt(settings: Settings) -> ByTarget:
    """The formats of a checkpoint's linears.

    Raises:
        CheckpointError: a key is missing or impossible.
        UnsupportedError: a setting is not implemented; named by its key.
    """
    require_known(
        settings,
        used=("config_groups", KV_SCHEME),
        unused=("quant_method", "quant_algo", "producer", "ignore", "quantized_layers"),
    )
    groups = settings.objects("config_groups")
    if not groups:
        algorithm = short(settings.get("quant_algo"))
        raise UnsupportedError(
            f"{settings.location}: quant_algo={algorithm} without config_groups is not supported",
            ANOTHER,
        )
    return ByTarget(tuple(map(_targeted, groups.values())))


def _targeted(group: Settings) -> Targeted:
    require_known(group, used=("targets", "weights", "input_activations"))
    targets = group.names("targets")
    # Classes are Linear, or a family's own of experts.
    modules = frozenset(one for one in targets if "." in one)
    return Targeted(modules, everything=len(modules) < len(targets), format=_linear(group))


def _linear(group: Settings) -> LinearFormat:
    weights, activations = (_elements(group, key) for key in ("weights", "input_activations"))
    match weights, activations:
        case (8, None, None), (8, None, _):
            return Fp8Linear("tensor", "tensor", _SCALES)
        case (8, None, "channel"), (8, None, _):
            return Fp8Linear("channel", "token", _SCALES)
        case (4, size, None), None | (4, _, _) if size == GROUP:
            return Nvfp4Linear(MODELOPT)
    raise UnsupportedError(
        f"{group.location}: weights={short(group.get('weights'))} with input_activations="
        f"{short(group.get('input_activations'))} is not supported",
        f"use float8, or NVFP4 with groups of {GROUP}",
    )


def _elements(group: Settings, key: str) -> tuple[object, object, object] | None:
    """Bits, features that share a scale, and strategy of floats; None: none are rounded."""
    if group.get(key) is None:
        return None
    one = Settings(group.nested(key), f"{group.location}.{key}")
    require_known(
        one,
        used=("num_bits", "group_size", "strategy"),
        only={"type": ("float",), "dynamic": (False,)},
    )
    return one.get("num_bits"), one.get("group_size"), one.get("strategy")
