"""The speculative methods, one line each; whatever else is told by a method's name derives from it.

Keys of a single method are fields of ``SpeculativeConfig`` that name it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

MAX_SPECULATIVE_TOKENS = 64


class Kind(Enum):
    """What a method drafts from: matches of text, a draft head, another model, or nothing."""

    LOOKUP = auto()
    HEAD = auto()
    MODEL = auto()
    RECORDER = auto()


class Checkpoint(Enum):
    """Whether the config's ``model`` names the drafter's checkpoint."""

    NONE = auto()
    REQUIRED = auto()
    #: Some targets have a drafter that ships.
    OPTIONAL = auto()


@dataclass(frozen=True, slots=True)
class Method:
    """A method and its drafter.

    Attributes:
        load: "module:function" that loads the drafter. Its arguments are the
            ``SpeculativeConfig``, the target and a ``Placement``; it returns a
            ``LoadedDrafter`` (``drafters.base``).
        num_tokens: the default k; 0: the config or the checkpoint tells it.
        limits: least and greatest k.
        head: "module:class" of a draft head's checkpoint, or "module:function" that chooses it.
        architectures: parts of an architecture's name, in lower case, that tell the method.
        own_k: keys of a head's config.json that tell how many tokens it drafts.
    """

    kind: Kind
    load: str
    checkpoint: Checkpoint = Checkpoint.NONE
    num_tokens: int = 0
    limits: tuple[int, int] = (1, MAX_SPECULATIVE_TOKENS)
    head: str = ""
    architectures: tuple[str, ...] = ()
    own_k: tuple[str, ...] = ()


#: The method that records hidden states and drafts nothing.
EXTRACT = "extract_hidden_states"
_DRAFTERS, _HEADS = "sametoken.drafters", "sametoken.models.heads"
_NEEDED, _SHIPPED = Checkpoint.REQUIRED, Checkpoint.OPTIONAL
_head = partial(Method, Kind.HEAD, f"{_DRAFTERS}.heads:load")

# vLLM requires k = 1 for extraction, which proposes no drafts.
TABLE: dict[str, Method] = {
    "ngram": Method(Kind.LOOKUP, f"{_DRAFTERS}.ngram:load", num_tokens=8),
    "suffix": Method(Kind.LOOKUP, f"{_DRAFTERS}.suffix:load"),
    "draft_model": Method(Kind.MODEL, f"{_DRAFTERS}.draft_model:load", _NEEDED, num_tokens=4),
    "eagle": _head(_NEEDED, head=f"{_HEADS}.eagle:Eagle1Checkpoint", architectures=("eagle",)),
    "eagle3": _head(_SHIPPED, head=f"{_HEADS}.eagle3:Eagle3Checkpoint", architectures=("eagle3",)),
    "mtp": _head(
        num_tokens=3,
        limits=(1, 8),
        head=f"{_HEADS}.own_module:open_module",
        architectures=("mtp", "nextn"),
    ),
    "medusa": _head(
        _NEEDED,
        head=f"{_HEADS}.medusa:MedusaCheckpoint",
        architectures=("medusa",),
        own_k=("num_heads", "medusa_num_heads"),
    ),
    "mlp_speculator": _head(
        _NEEDED,
        head=f"{_HEADS}.mlp_speculator:MLPSpeculatorCheckpoint",
        architectures=("mlpspeculator",),
        own_k=("n_predict",),
    ),
    EXTRACT: Method(Kind.RECORDER, f"{_DRAFTERS}.extract:load", limits=(0, 1)),
}


def _of(*kinds: Kind) -> tuple[str, ...]:
    return tuple(name for name, method in TABLE.items() if method.kind in kinds)


METHODS = tuple(TABLE)
LOOKUPS, HEADS = _of(Kind.LOOKUP), _of(Kind.HEAD)
#: What a cascade may fall back to.
CASCADED = _of(Kind.MODEL, Kind.HEAD)
DRAFTING = (*LOOKUPS, *CASCADED)
WITHOUT_MODEL = tuple(name for name, one in TABLE.items() if one.checkpoint is Checkpoint.NONE)
WITH_MODEL = tuple(name for name in TABLE if name not in WITHOUT_MODEL)


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers of a target whose inputs EAGLE-3 reads, if nothing names others."""
    return 2, num_layers // 2, num_layers - 3
