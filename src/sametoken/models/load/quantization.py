"""Which linears of a checkpoint are quantized, and in which format: config.json's quantization.

Formats, as their writers define them:

- ``compressed-tensors`` (github.com/vllm-project/compressed-tensors): ``config_groups`` name
  targets by module, by ``re:`` and a regular expression, or by class; ``ignore`` takes out.
- ``fp8`` (DeepSeek's and Qwen's; transformers' FineGrainedFP8Config): all linears except
  ``modules_to_not_convert``.
- ``gptq`` (AutoGPTQ, GPTQModel), ``awq`` (AutoAWQ) and ``auto-round`` (Intel's AutoRound): all
  linears that are stored so.
- ``modelopt`` (NVIDIA's Model Optimizer): ``config_groups``, as above in part.
- ``mxfp4`` (gpt-oss; transformers' Mxfp4Config): stacked experts except ``modules_to_not_convert``.

Every key is either understood or refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product
from reprlib import repr as short
from typing import Any

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.load.by_target import HEAD, ByTarget, StackedExperts, Targeted, all_stored
from sametoken.models.load.four_bits import OF_QUANTIZING, read_auto_round, read_awq, read_gptq
from sametoken.models.load.fp8_linear import BLOCK, Fp8Linear
from sametoken.models.load.int4_linear import PACKED, Int4Linear
from sametoken.models.load.linear_format import UNQUANTIZED, LinearFormat, Quantization
from sametoken.models.load.modelopt import read_modelopt
from sametoken.models.load.mxfp4 import Mxfp4Stack
from sametoken.models.load.nvfp4_linear import GROUP, Nvfp4Linear
from sametoken.models.load.settings import (
    ANOTHER,
    COMPARE,
    KV_SCHEME,
    Settings,
    chosen,
    compiled,
    quantization_settings,
    require_known,
    require_quick,
    unsupported,
)

#: The class of every projection that a format may cover.
_LINEAR = "Linear"
_EXPRESSION = "re:"


def read_quantization(config: Mapping[str, Any], location: str) -> Quantization:
    """The quantization of a config.json; ``UNQUANTIZED`` without one.

    Raises:
        CheckpointError: a key is missing or impossible.
        UnsupportedError: a method, format or setting is not implemented; named by its key.
    """
    settings = quantization_settings(config, location)
    if settings is None:
        return UNQUANTIZED
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        known = ", ".join(_METHODS)
        remedy = f"supported: {known}; or use the checkpoint's unquantized weights"
        raise unsupported(settings, "quant_method", remedy)
    return _METHODS[method](settings)


def kv_strategy(config: Mapping[str, Any], location: str) -> str | None:
    """How a checkpoint scales keys and values in float8: "tensor" or "attn_head"; None: not.

    Raises:
        CheckpointError: a key is impossible.
        UnsupportedError: another scheme, named by its key.
    """
    settings = quantization_settings(config, location)
    if settings is None or not settings.get(KV_SCHEME):
        return None
    scheme = _arguments(settings, KV_SCHEME)
    _require_e4m3(scheme)
    if scheme.get("dynamic"):
        raise unsupported(scheme, "dynamic", ANOTHER)
    return chosen(scheme, "strategy", ("tensor", "attn_head"), "tensor")


def require_unquantized(config: Mapping[str, Any], location: str, use: str) -> None:
    """Refuse a quantized checkpoint for a use that needs its weights in a floating dtype.

    Raises:
        UnsupportedError: names the use.
    """
    weights = read_quantization(config, location) is not UNQUANTIZED
    if weights or kv_strategy(config, location):
        what = "weights" if weights else "keys and values"
        raise UnsupportedError(
            f"{location} has quantized {what}, which {use} does not support",
            "use the unquantized checkpoint",
        )


def _read_fp8(settings: Settings) -> Quantization:
    """``quant_method: fp8``."""
    require_known(
        settings,
        used=(
            "weight_block_size",
            "activation_scheme",
            "scale_fmt",
            "modules_to_not_convert",
            "ignored_layers",
        ),
        only={"fmt": ("e4m3", "float8_e4m3fn"), "expert_dtype": ("fp8",)},
        unused=("quant_method", "dequantize"),
    )
    block = settings.get("weight_block_size")
    if block not in (None, [BLOCK, BLOCK]):
        raise unsupported(settings, "weight_block_size", f"use [{BLOCK}, {BLOCK}] or none")
    scheme = chosen(settings, "activation_scheme", ("dynamic", "static"), "dynamic")
    form = chosen(settings, "scale_fmt", ("float", "ue8m0"), "float")
    if form == "ue8m0" and (block is None or scheme == "static"):
        raise unsupported(settings, "scale_fmt", "use ue8m0 with dynamic activations and blocks")
    # UE8M0 is a format of activations' scales too: DeepSeek-V3.1 was trained so.
    by_group = "group_ue8m0" if form == "ue8m0" else "group"
    dynamic = "token" if block is None else by_group
    linear = Fp8Linear(
        scales="tensor" if block is None else "block",
        activations="tensor" if scheme == "static" else dynamic,
        scale_names=("weight_scale_inv", "weight_scale"),
    )
    keys = ("modules_to_not_convert", "ignored_layers")
    names = settings.names(keys[0]) or settings.names(keys[1])
    says_so = any(settings.get(key) is not None for key in keys)
    # As transformers matches them: from the start of a name to the end of a part, or at its end.
    literal = [re.escape(name) for name in names]
    patterns = (rf"(?:{name}(?:\.|$)|.*{name}$)" for name in literal)
    return all_stored(linear, tuple(map(re.compile, patterns)) if says_so else (HEAD,))


def _read_mxfp4(settings: Settings) -> Quantization:
    """``quant_method: mxfp4``."""
    require_known(settings, used=("modules_to_not_convert",), unused=("quant_method", "dequantize"))
    names = settings.names("modules_to_not_convert")
    # As transformers matches them: an expression up to the end of a part of a name, or its ending.
    starts = (compiled(settings, name).pattern for name in names)
    patterns = [rf"(?:{start})(?:(?<=\.)|(?=\.|$))" for start in starts]
    patterns += [rf".*{re.escape(name)}$" for name in names]
    expressions = tuple(map(re.compile, patterns))
    require_quick(settings, expressions)
    return StackedExperts(Mxfp4Stack(), Targeted(expressions=expressions))


def _read_compressed_tensors(settings: Settings) -> Quantization:
    """``quant_method: compressed-tensors``."""
    require_known(
        settings,
        used=("config_groups", "format", "ignore", KV_SCHEME, "sparsity_config"),
        only={"quantization_status": ("compressed", "frozen")},
        unused=("quant_method", "version", "global_compression_ratio", *OF_QUANTIZING),
    )
    # Writers of 2024 state a sparsity that they measured; the weights are stored whole.
    if settings.nested("sparsity_config").get("format", "dense") != "dense":
        raise unsupported(settings, "sparsity_config", ANOTHER)
    groups = settings.objects("config_groups")
    if not groups and settings.get(KV_SCHEME):
        return UNQUANTIZED
    if not groups:
        raise CheckpointError(f"{settings.location} has no config_groups", COMPARE)
    whole = settings.get("format")
    read = []
    for own in groups.values():
        require_known(own, used=("targets", "weights", "input_activations", "format"))
        kind = own.get("format", whole)
        if not isinstance(kind, str) or kind not in _COMPRESSED:
            raise UnsupportedError(
                f"{own.location}: format={short(kind)} is not supported",
                f"supported: {', '.join(_COMPRESSED)}",
            )
        read.append(_targeted(own, own.names("targets"), _COMPRESSED[kind](own)))
    found = ByTarget(tuple(read), _targeted(settings, settings.names("ignore"), None))
    require_quick(settings, found.expressions)
    return found


def _targeted(
    settings: Settings, targets: tuple[str, ...], linear: LinearFormat | None
) -> Targeted:
    """Targets as compressed-tensors writes them."""
    given = [one.removeprefix(_EXPRESSION) for one in targets if one.startswith(_EXPRESSION)]
    expressions = tuple(compiled(settings, one) for one in given)
    names = frozenset(one for one in targets if not one.startswith(_EXPRESSION))
    return Targeted(names - {_LINEAR}, expressions, _LINEAR in names, linear)


def _float_linear(group: Settings) -> Fp8Linear:
    """A group of the formats ``float-quantized`` and ``naive-quantized``."""
    weights = _arguments(group, "weights")
    _require_e4m3(weights)
    strategy = chosen(weights, "strategy", ("tensor", "channel", "block"))
    if strategy == "block" and weights.get("block_structure") not in ([BLOCK, BLOCK], "128x128"):
        raise unsupported(weights, "block_structure", f"use [{BLOCK}, {BLOCK}]")
    if weights.get("dynamic"):
        raise unsupported(weights, "dynamic", ANOTHER)
    return Fp8Linear(strategy, _float_activations(group), ("weight_scale",))


def _four_bits(group: Settings, kind: str) -> Settings:
    """The settings of a group's weights in 4 bits."""
    weights = _arguments(group, "weights")
    found = (weights.get("num_bits"), weights.get("type", "int"), weights.get("dynamic", False))
    if found != (4, kind, False):
        raise UnsupportedError(
            f"{weights.location}: num_bits={short(found[0])}, type={short(found[1])}, "
            f"dynamic={short(found[2])} is not supported",
            f"use 4 bits, {kind}, not dynamic",
        )
    return weights


def _nvfp4_linear(group: Settings) -> Nvfp4Linear:
    """A group of the format ``nvfp4-pack-quantized``.

    Activations stay in 16 bits: as in vLLM on chips that do not multiply in 4 bits, rounding is
    for those that do.
    """
    given = [_four_bits(group, "float")]
    if group.get("input_activations") is not None:
        given.append(_arguments(group, "input_activations"))
    wanted = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": GROUP,
    }
    for one, (key, value) in product(given, wanted.items()):
        if one.get(key, value) != value:
            raise unsupported(one, key, f"use {value}")
    return Nvfp4Linear()


def _packed_linear(group: Settings) -> Int4Linear:
    """A group of the format ``pack-quantized``."""
    weights = _four_bits(group, "int")
    if group.get("input_activations") is not None:
        raise unsupported(group, "input_activations", "use a checkpoint of weights alone")
    strategy = chosen(weights, "strategy", ("group", "channel"), "group")
    size = -1 if strategy == "channel" else weights.integer("group_size")
    return Int4Linear(PACKED, size, bool(weights.get("symmetric", True)))


def _float_activations(group: Settings) -> str:
    """How a group rounds activations: "none", or by "token", "group" or "tensor"."""
    if group.get("input_activations") is None:
        return "none"
    given = _arguments(group, "input_activations")
    _require_e4m3(given)
    strategy, dynamic = given.get("strategy"), given.get("dynamic", False)
    if (strategy, dynamic) in (("token", True), ("tensor", False)):
        return str(strategy)
    if (strategy, dynamic, given.get("group_size")) == ("group", True, BLOCK):
        return "group"
    raise UnsupportedError(
        f"{given.location}: strategy={short(strategy)} with dynamic={short(dynamic)} and "
        f"group_size={short(given.get('group_size'))} is not supported",
        f"use token (dynamic), group of {BLOCK} (dynamic) or tensor (static); one dynamic scale "
        "for a batch would make rows depend on each other",
    )


def _arguments(group: Settings, key: str) -> Settings:
    """The settings of a group's weights or activations."""
    arguments = Settings(group.nested(key), f"{group.location}.{key}")
    require_known(
        arguments,
        used=("strategy", "block_structure", "dynamic", "group_size", "num_bits", "type"),
        only={"symmetric": (True, False)},
        unused=("observer", "observer_kwargs", "zp_dtype", "scale_dtype", "actorder"),
    )
    return arguments


def _require_e4m3(settings: Settings) -> None:
    found = (settings.get("num_bits"), settings.get("type"), settings.get("symmetric", True))
    if found != (8, "float", True):
        raise UnsupportedError(
            f"{settings.location}: num_bits={short(found[0])}, type={short(found[1])}, "
            f"symmetric={short(found[2])} is not supported",
            "use 8 bits, float, symmetric",
        )


_COMPRESSED: dict[str, Callable[[Settings], LinearFormat]] = {
    "float-quantized": _float_linear,
    # The same tensors, as the library calls them where activations are not rounded.
    "naive-quantized": _float_linear,
    PACKED: _packed_linear,
    "nvfp4-pack-quantized": _nvfp4_linear,
}
_METHODS: dict[str, Callable[[Settings], Quantization]] = {
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "modelopt": read_modelopt,
    "mxfp4": _read_mxfp4,
}
