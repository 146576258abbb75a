"""EAGLE-3 checkpoints in the two layouts that the field publishes.

SafeAILab (also SpecForge, SGLang, TensorRT Model Optimizer): config.json is that of a
one-layer Llama with ``draft_vocab_size`` and, where it differs, ``target_hidden_size``;
tensors are ``midlayer.*``, ``fc.weight``, ``norm.weight``, ``lm_head.weight``, ``d2t``
[draft vocabulary] int64, ``t2d`` [vocabulary] bool and seldom ``embed_tokens.weight``
(SafeAILab/EAGLE ``eagle/model/cnets.py``; the published heads hold ``pytorch_model.bin``).

``speculators`` (vllm-project): config.json has ``speculators_model_type``, the layer's
config under ``transformer_layer_config`` and flags beside it; tensors are ``layers.0.*``,
``embed_tokens.weight`` and the rest as above (``models/eagle3/{config,core}.py``).
``norm_before_residual`` is true if missing, as vLLM reads it
(``transformers_utils/configs/speculators/algos.py``).

Auxiliary layer ids: a number i at the top of the config means the input of target layer i,
as vLLM captures it (``hidden_states + residual`` before the layer; the same index names it
in ``load_model(aux_layers=...)``). Under ``eagle_config``, or with
``"eagle_aux_layer_semantics": "sglang"``, it means the output of layer i, so that SGLang
adds 1 (``set_eagle3_layers_to_capture``; vLLM ``eagle3_utils.py``). The default of both is
(2, n // 2, n - 3) in the first meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from sametoken.errors import CheckpointError, DrafterMismatchError, UnsupportedError
from sametoken.kernels.interface import Kernels, PackedWeight, QKNorm
from sametoken.layers.attention import Attention
from sametoken.layers.norm import RMSNorm
from sametoken.layers.rotary import rotary_table
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import DERIVED_TENSORS, load_attention, load_mlp
from sametoken.models.eagle3 import Eagle3Config, Eagle3Head
from sametoken.models.huggingface import SafetensorsSource
from sametoken.models.huggingface import _json_object as read_json
from sametoken.models.huggingface import _model_config as model_config
from sametoken.models.settings import Settings
from sametoken.models.weights import Part, WeightReader

_LAYER = "layers.0"
_UNUSED = (*DERIVED_TENSORS, "verifier_lm_head.weight", "verifier_norm.weight")


class SharedWeights(Protocol):
    """What a head may take from its target: two packed weights [V, hidden]."""

    embedding: PackedWeight
    head: PackedWeight


def read_head_config(directory: Path) -> Eagle3Config:
    """The architecture of a head in either layout.

    Raises:
        CheckpointError: config.json is missing, malformed, or lacks a key.
        UnsupportedError: another kind of drafter, or a feature that is not implemented.
    """
    location = directory / "config.json"
    config = read_json(location)
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UnsupportedError(f"{location} describes a {kind!r} drafter", "use an EAGLE-3 head")
    layer_config = config.get("transformer_layer_config", config)
    if not isinstance(layer_config, dict):
        raise CheckpointError(f"{location}: transformer_layer_config is not an object")
    layer = model_config({"architectures": ["Eagle3Head"]} | layer_config, {}, str(location))
    _require_supported(config, layer, location)
    settings, nested = Settings(config, str(location)), config.get("eagle_config") or {}
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=settings.integer("draft_vocab_size", layer.vocab_size),
        target_hidden_size=settings.integer("target_hidden_size", layer.hidden_size),
        aux_layer_ids=_aux_layer_ids(config, nested, location),
        norm_before_residual=bool(
            config.get("norm_before_residual", "speculators_model_type" in config)
        ),
        norm_before_fc=bool(config.get("norm_before_fc", nested.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
    )


def _aux_layer_ids(
    config: Mapping[str, Any], nested: Mapping[str, Any], location: Path
) -> tuple[int, ...] | None:
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key)
    of_outputs = config.get("eagle_aux_layer_semantics") == "sglang"
    if not ids:
        ids, of_outputs = nested.get(key), True
    if not ids:
        return None
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise CheckpointError(f"{location}: {key}={ids!r} is not a list of layer numbers")
    return tuple(i + of_outputs for i in ids)


def _require_supported(config: Mapping[str, Any], layer: ModelConfig, location: Path) -> None:
    activation = layer.extra.get("hidden_act", "silu")
    windowed = "sliding_attention" in (layer.extra.get("layer_types") or ()) or (
        layer.extra.get("use_sliding_window") and layer.extra.get("sliding_window")
    )
    aux_in_use = (config.get("eagle_config") or {}).get("use_aux_hidden_state", True)
    for refused, what in (
        (layer.num_layers != 1, f"{layer.num_layers} decoder layers"),
        (activation != "silu", f"activation {activation!r}"),
        (windowed, "sliding-window attention"),
        (not aux_in_use, "no auxiliary hidden states"),
        (config.get("fc_norm") and config.get("norm_before_fc"), "norms in two places before fc"),
    ):
        if refused:
            raise UnsupportedError(f"{location}: an EAGLE-3 head with {what} is not supported")


def aux_layers(config: Eagle3Config, num_target_layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads, in its order.

    Raises:
        DrafterMismatchError: the target has no such layer.
    """
    n = num_target_layers
    ids = (2, n // 2, n - 3) if config.aux_layer_ids is None else config.aux_layer_ids
    if not all(0 <= i <= n for i in ids):
        raise DrafterMismatchError(
            f"the EAGLE-3 head reads layers {ids}, the target has {n} layers",
            "use a head that was trained for this target",
        )
    return ids


def require_fit(config: Eagle3Config, target: ModelConfig) -> None:
    """Refuse a head that was trained for another target.

    Raises:
        DrafterMismatchError: another vocabulary, hidden size or number of layers.
    """
    for mine, theirs, what in (
        (config.layer.vocab_size, target.vocab_size, "tokens"),
        (config.target_hidden_size, target.hidden_size, "hidden elements"),
    ):
        if mine != theirs:
            raise DrafterMismatchError(
                f"the EAGLE-3 head expects a target of {mine} {what}, the target has {theirs}",
                "use a head that was trained for this target",
            )
    aux_layers(config, target.num_layers)


def load_head(
    directory: Path,
    config: Eagle3Config,
    shared: SharedWeights,
    *,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
) -> Eagle3Head:
    """Read a head's weights; what it lacks of embedding and lm_head comes from the target.

    Args:
        directory: where config.json and the safetensors files are.
        config: from ``read_head_config``.
        shared: the target's weights.
        kernels: the bundle that runs the head.
        dtype: what every weight is converted to.
        device: where every weight goes.
        max_positions: rows of the rotary table.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the config wants.
        UnsupportedError: pickled weights only, or tensors that the head has no use for.
        DrafterMismatchError: the weights to share do not fit the head.
    """
    source = _HeadSource(directory)
    reader = WeightReader(source, kernels, dtype, device)
    layer = config.layer
    target_ids = _target_ids(directory, config, device)
    head = Eagle3Head(
        config=config,
        kernels=kernels,
        embedding=_own_or_shared(
            reader, "embed_tokens", layer.vocab_size, config, shared.embedding
        ),
        aux_norms=_aux_norms(reader, config),
        fc=reader.linear(config.num_aux * config.target_hidden_size, Part("fc", layer.hidden_size)),
        input_layernorm=_norm(reader, f"{_LAYER}.input_layernorm", layer),
        hidden_norm=_norm(reader, f"{_LAYER}.hidden_norm", layer),
        attention=_attention(reader, layer, max_positions),
        post_attention_layernorm=_norm(reader, f"{_LAYER}.post_attention_layernorm", layer),
        mlp=load_mlp(layer, reader, f"{_LAYER}.mlp"),
        norm=_norm(reader, "norm", layer),
        lm_head=_own_or_shared(reader, "lm_head", config.draft_vocab_size, config, shared.head),
        target_ids=target_ids,
    )
    reader.require_all_read(allowed=_UNUSED)
    return head


def _norm(reader: WeightReader, name: str, layer: ModelConfig) -> RMSNorm:
    weight = reader.vector(f"{name}.weight", layer.hidden_size)
    return RMSNorm(reader.kernels, weight, layer.rms_norm_eps)


def _aux_norms(reader: WeightReader, config: Eagle3Config) -> tuple[RMSNorm, ...]:
    part, eps = config.target_hidden_size, config.layer.rms_norm_eps
    if config.norm_before_fc:
        weight = reader.vector("input_norm.weight", config.num_aux * part)
        return (RMSNorm(reader.kernels, weight, eps),)
    if config.fc_norm:
        weights = [reader.vector(f"fc_norm.{i}.weight", part) for i in range(config.num_aux)]
        return tuple(RMSNorm(reader.kernels, weight, eps) for weight in weights)
    return ()


def _attention(reader: WeightReader, layer: ModelConfig, max_positions: int) -> Attention:
    prefix, qk_norm = f"{_LAYER}.self_attn", None
    if f"{prefix}.q_norm.weight" in reader:
        q_weight = reader.vector(f"{prefix}.q_norm.weight", layer.head_dim)
        k_weight = reader.vector(f"{prefix}.k_norm.weight", layer.head_dim)
        qk_norm = QKNorm(q_weight, k_weight, layer.rms_norm_eps)
    rotary = rotary_table(
        layer.rope, head_dim=layer.head_dim, max_positions=max_positions, device=reader.device
    )
    return load_attention(layer, reader, prefix, rotary, qk_norm, in_features=2 * layer.hidden_size)


def _own_or_shared(
    reader: WeightReader, name: str, rows: int, config: Eagle3Config, shared: PackedWeight
) -> PackedWeight:
    hidden = config.layer.hidden_size
    if f"{name}.weight" in reader:
        return reader.packed(hidden, Part(f"{name}.weight", rows))
    if (shared.out_features, shared.in_features) != (rows, hidden):
        raise DrafterMismatchError(
            f"the EAGLE-3 head has no {name} of its own and wants one of {rows} x {hidden}, "
            f"the target's is {shared.out_features} x {shared.in_features}",
            "use a head that was trained for this target",
        )
    return shared


def _target_ids(directory: Path, config: Eagle3Config, device: torch.device) -> Tensor | None:
    """[draft vocabulary] target ids from the offsets ``d2t``; None if both are one vocabulary."""
    if config.draft_vocab_size == config.layer.vocab_size:
        return None
    offsets = _integers(directory, "d2t")
    if offsets is None or offsets.shape != (config.draft_vocab_size,):
        found = "none" if offsets is None else f"shape {list(offsets.shape)}"
        raise CheckpointError(
            f"{directory} needs d2t of shape [{config.draft_vocab_size}], found {found}",
            "check that config and weights belong together",
        )
    target_ids = torch.arange(config.draft_vocab_size) + offsets.to(torch.int64)
    low, high = torch.aminmax(target_ids)
    if low < 0 or high >= config.layer.vocab_size:
        raise CheckpointError(
            f"{directory}: d2t leads to token ids {int(low)}..{int(high)}, "
            f"outside a vocabulary of {config.layer.vocab_size}",
            "check that config and weights belong together",
        )
    return target_ids.to(device)


def _integers(directory: Path, name: str) -> Tensor | None:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                tensor: Tensor = file.get_tensor(name)
                return tensor
    return None


class _HeadSource:
    """A head's floating tensors under one set of names: those of ``speculators``."""

    def __init__(self, directory: Path) -> None:
        self._source = SafetensorsSource(directory)
        self.location = self._source.location
        self._names = {
            name.removeprefix("model.").replace("midlayer.", f"{_LAYER}."): name
            for name in self._source.names()
            if name.removeprefix("model.") not in ("d2t", "t2d")
        }

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names[name])

    def chunks(self, name: str) -> Iterator[Tensor]:
        return self._source.chunks(self._names[name])
