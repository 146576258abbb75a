"""What a GGUF architecture says of its files: names of tensors, keys of settings, order of rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sametoken.models.load.gguf_file import GGUFTensor
from sametoken.models.load.settings import Settings

HEAD_SIZE = "attention.key_length"
#: Stands for an expert's number where a tensor of the file holds those of all.
EACH = "*"
#: An expert's gate above its up.
GATE_UP = f"{EACH}.gate_up_proj"


def gated(names: str, module: str) -> dict[str, str]:
    """Names of a gated MLP's projections: in a file, with "gate", "up" and "down" for {}."""
    return {names.format(one): f"{module}.{one}_proj" for one in ("gate", "up", "down")}


_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,9})\.)?(?P<stem>[\w.]+?)(?:\.(?P<ending>weight|bias))?")
_NAMES: Mapping[str, str] = {
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
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **gated("ffn_{}", "mlp"),
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_up_exps": f"mlp.experts.{GATE_UP}",
    **gated("ffn_{}_exps", f"mlp.experts.{EACH}"),
    **gated("ffn_{}_shexp", "mlp.shared_experts"),
}


def _nothing(*given: object) -> dict[str, Any]:
    return {}


class Turns(NamedTuple):
    """Heads of values that a file has by turns: the first of each head of keys, then the second.

    Attributes:
        first: rows before them.
        num_keys: heads of keys.
        ratio: heads of values to each.
        size: rows of a head of values.
        in_columns: whether columns have this order, in place of rows.
    """

    first: int
    num_keys: int
    ratio: int
    size: int
    in_columns: bool = False

    def runs(self) -> list[tuple[int, int]]:
        """First row in the file, and number of rows, of each run in Hugging Face order."""
        heads = [(key, turn) for key in range(self.num_keys) for turn in range(self.ratio)]
        places = (self.first + (turn * self.num_keys + key) * self.size for key, turn in heads)
        before = [(0, self.first)] if self.first else []
        return before + [(place, self.size) for place in places]


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Names in a module for more tokens, which files have as the layer past the model's own.

    Attributes:
        layer: what the names of its layer begin with, with the layer's number for {}.
        own: its other modules by the file's names, likewise.
    """

    layer: str
    own: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A GGUF architecture as a Hugging Face class.

    Attributes:
        name: the class.
        names: modules, or tensors with their endings, by the file's names; beside those of all.
        module: names in a module for more tokens; None: it has none that is read.
        interleaved: whether llama.cpp rotates element 2j of q and k with 2j + 1, for which its
            converter reorders rows; our kernels rotate j with j + head_dim / 2.
        turns: tensors with heads of values by turns, by ends of their names.
        added_to_norms: what the converter adds to the weights of norms.
        plain_norms: ends of names in files of norms to which it adds nothing.
        missing_axes: axes of one element that the converter leaves out, by ends of names.
        sizes: counts without which there is no model, by their keys in config.json.
        keys: other settings, by their keys in config.json; an absent one keeps the class's default.
        values: settings of all files of the architecture.
        derived: settings that follow from several keys, or from the tensors that there are.
        reads: the keys that ``derived`` reads.
        only: keys with the values that mean nothing else.
        scaled_rope: settings of a scaled rope beside those of all.
        rotates: whether heads are rotated, so that files say by how much.
        by_layer: keys that may have a number for each layer.
        head_size: the key with the elements of a head that the model's class counts.
        ends: tokens at which a text, a turn or a message ends, beside those of all.
        forms: the architecture of files that set a key.
    """

    name: str
    names: Mapping[str, str] = field(default_factory=dict)
    module: ModuleNames | None = None
    interleaved: bool = False
    turns: Callable[[Settings], dict[str, Turns]] = _nothing
    added_to_norms: float = 0.0
    plain_norms: tuple[str, ...] = ()
    missing_axes: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[Settings, Mapping[str, GGUFTensor]], dict[str, Any]] = _nothing
    reads: tuple[str, ...] = ()
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    scaled_rope: Callable[[Settings], dict[str, Any]] = _nothing
    rotates: bool = True
    by_layer: tuple[str, ...] = ()
    head_size: str = HEAD_SIZE
    ends: tuple[str, ...] = ()
    forms: Mapping[str, Architecture] = field(default_factory=dict)

    @property
    def known(self) -> tuple[str, ...]:
        """The keys that it reads, beside those of all architectures."""
        return (*self.sizes.values(), *self.keys.values(), *self.reads, *self.only)

    def of(self, settings: Settings) -> Architecture:
        """The form of a file's settings."""
        found = (form for key, form in self.forms.items() if settings.get(key))
        return next(found, self)

    def config(self, settings: Settings, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
        """What config.json has beside the keys of all architectures.

        Raises:
            CheckpointError: a key is missing or impossible.
            UnsupportedError: a value is not implemented.
        """
        sizes = {key: settings.integer(own) for key, own in self.sizes.items()}
        given = {key: settings.get(own) for key, own in self.keys.items()}
        given = {key: value for key, value in given.items() if value is not None}
        return {**self.values, **sizes, **given, **self.derived(settings, tensors)}

    def size(self, settings: Settings, key: str, default: int | None = None) -> int:
        """A count of the model; of one for each layer, where there may be, the largest.

        Raises:
            CheckpointError: it is missing or impossible.
        """
        value = settings.get(key, default)
        if key in self.by_layer and isinstance(value, list) and value:
            # Layers without any have 0.
            counts = [one for one in value if one != 0] or [default]
            each = (replace(settings, values={settings.prefix + key: one}) for one in counts)
            return max(one.integer(key) for one in each)
        return settings.integer(key, default)

    def hugging_face_name(self, name: str, module_layers: range) -> str | None:
        """A tensor's name in checkpoints of transformers; one that has none keeps its own.

        Args:
            name: in the file.
            module_layers: the layers past the model's own.

        Returns:
            None of a tensor of a module that is not read.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            return name
        stem, ending = match.group("stem", "ending")
        if match["layer"] is None:
            return self._known("", stem, ending) or name
        index = int(match["layer"])
        if index not in module_layers:
            return self._known(f"model.layers.{index}.", stem, ending) or name
        if self.module is None or index > module_layers.start:
            return None
        if stem in self.module.own:
            return f"{self.module.own[stem].format(index)}.{ending}"
        layer = self.module.layer.format(index)
        # What has no name still is the module's: the model passes over it.
        return self._known(layer, stem, ending) or layer + name.split(".", 2)[2]

    def _known(self, layer: str, stem: str, ending: str | None) -> str | None:
        """A tensor's name, if it has one; ``layer`` begins it."""
        names = {**_NAMES, **self.names}
        if whole := names.get(stem if ending is None else f"{stem}.{ending}"):
            return layer + whole
        return f"{layer}{names[stem]}.{ending}" if ending and stem in names else None
