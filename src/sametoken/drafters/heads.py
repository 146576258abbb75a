"""Draft heads: which checkpoint a config names, and how it is loaded over a target.

With a token map a head proposes a subset of the vocabulary and computes only those logits, which
dominate a small head's memory traffic (FR-Spec: Zhao et al., arXiv:2502.14856). The target's own
logits stay complete.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import (
    Drafter,
    LoadedDrafter,
    Placement,
    SharedHead,
    named,
    require_memory,
)
from sametoken.drafters.context import Coupling
from sametoken.drafters.eagle import EagleDrafter
from sametoken.drafters.state_head import StateDrafter
from sametoken.errors import ConfigError, DrafterMismatchError, UnsupportedError, in_words
from sametoken.io.files import read_json
from sametoken.models.base import CausalLM, ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.heads.base import EagleHead, HeadCheckpoint
from sametoken.models.heads.reader import HeadInUse, target_lm_head
from sametoken.models.heads.state_head import StateHead
from sametoken.models.load.sources import TensorSource
from sametoken.ops.backend import Kernels
from sametoken.ops.weight import Weight
from sametoken.state.caches import ModelCache
from sametoken.types.speculative_methods import TABLE

Head = EagleHead | StateHead
Checkpoint = HeadCheckpoint[Head]

_REMEDY = "give a JSON list of token ids, as `sametoken train token-map` writes it"


def read_token_map(path: Path, vocab_size: int) -> Tensor:
    """Read a token map: the ids that a head may propose.

    Args:
        path: a JSON list of ids, in any order.
        vocab_size: of the target; ids are below it.

    Returns:
        [V'] int64, ascending.

    Raises:
        ConfigError: the file cannot be read, or is not a list of distinct token ids.
    """
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the token map {path} cannot be read ({in_words(error)})", _REMEDY
        ) from error
    if not isinstance(found, list) or not found or not all(type(i) is int for i in found):
        raise ConfigError(f"the token map {path} is no list of integers", _REMEDY)
    low, high = min(found), max(found)
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"the token map {path} holds ids {low}..{high}, outside a vocabulary of {vocab_size}",
            "use one that was made with the target's own tokenizer",
        )
    token_ids = torch.tensor(sorted(set(found)), dtype=torch.int64)
    if token_ids.shape[0] != len(found):
        raise ConfigError(f"the token map {path} names a token twice", _REMEDY)
    return token_ids


def load(spec: SpeculativeConfig, target: CausalLM, placement: Placement) -> LoadedDrafter:
    """See ``types.speculative_methods.Method``.

    Raises:
        CheckpointError: the checkpoint is missing or broken.
        UnsupportedError: the checkpoint is not implemented.
        DrafterMismatchError: it does not fit the target.
    """
    k = spec.num_model_tokens
    if not isinstance(target, Decoder):
        raise UnsupportedError(
            f"{target.config.architecture} keeps no states for a draft head",
            "use another speculative method",
        )
    checkpoint = fitting_head(spec, target.config, placement.target_path, placement.load_format)
    token_ids = None
    if spec.token_map is not None:
        token_ids = read_token_map(Path(spec.token_map), target.config.vocab_size)
        token_ids = token_ids.to(placement.device)

    quantize_fp8 = spec.quantization is not None

    def load_head(
        checkpoint: Checkpoint, of: Decoder, kernels: Kernels, in_use: Weight | None = None
    ) -> tuple[Head, bool]:
        """A head, and whether its lm_head is the target's; ``in_use`` has been made of that."""
        offered = _Offered(of, in_use)
        head = checkpoint.load(
            offered,
            kernels=kernels,
            dtype=placement.dtype,
            device=placement.device,
            max_positions=placement.max_positions,
            token_ids=token_ids,
            quantize_fp8=quantize_fp8,
            parallel=placement.parallel,
        )
        return head, offered.head_taken

    head, shares = load_head(checkpoint, target, placement.backend.model)

    def made_of(other: CausalLM, kernels: Kernels) -> Weight:
        assert isinstance(other, Decoder)
        return target_lm_head(other, kernels, head.token_ids, placement.parallel, quantize_fp8)

    def attach(kv_cache: ModelCache | None, coupling: Coupling) -> Drafter:
        if isinstance(head, StateHead):
            return StateDrafter(head, k, coupling)
        return EagleDrafter(head, require_memory(kv_cache), k, coupling)

    def reload(source: TensorSource, over: CausalLM, kernels: Kernels) -> Head:
        assert isinstance(over, Decoder)
        # The target in use may have given its memory back. And its parts, on several ranks, read
        # their checkpoint, which updates leave behind.
        in_use = head.lm_head if over is target else None
        new, new_shares = load_head(checkpoint.reading(source), over, kernels, in_use)
        if new_shares != shares:
            mine, theirs = ("the target's", "its own") if shares else ("its own", "the target's")
            raise DrafterMismatchError(
                f"the draft head that runs has {mine} lm_head, the new one {theirs}",
                "build another engine with the new head",
            )
        return new

    shared = {id(target.embedding), id(target.head)}
    own = {id(one): one.nbytes for one in head.tables if id(one) not in shared}
    return LoadedDrafter(
        head.caches,
        attach,
        weights_bytes=head.nbytes + sum(own.values()),
        draft_bytes=head.draft_bytes,
        catch_up_bytes=head.nbytes if head.caches else 0,
        model=head,
        reload=reload,
        in_target=checkpoint.prefix if spec.model is None else None,
        shared_head=SharedHead(head.lm_head, made_of) if shares else None,
    )


class _Offered:
    """``SharedWeights`` of a target, and whether a head took the lm_head."""

    def __init__(self, target: Decoder, in_use: Weight | None) -> None:
        self.embedding, self.final_norm = target.embedding, target.final_norm
        self.head_taken, self._target = False, target
        self._in_use = None if in_use is None else HeadInUse(in_use)

    @property
    def head(self) -> Weight | HeadInUse:
        self.head_taken = True
        return self._in_use or self._target.head

    def whole_head(self) -> Weight | HeadInUse:
        self.head_taken = True
        return self._in_use or self._target.whole_head()


def fitting_head(
    spec: SpeculativeConfig, target: ModelConfig, target_path: Path, load_format: str
) -> Checkpoint:
    """The checkpoint of a method's head, with its config read and its weights not.

    Arguments and errors as in ``drafters.build.needs_of_drafter``.
    """
    directory = target_path if spec.model is None else Path(spec.model)
    given: Checkpoint = named(TABLE[spec.method].head)(directory, load_format=load_format)
    checkpoint = given.drafting(spec.num_model_tokens)
    checkpoint.require_fit(target)
    if spec.token_map is not None and checkpoint.num_own_tokens is not None:
        raise ConfigError(
            f"the draft head proposes {checkpoint.num_own_tokens} of {target.vocab_size} tokens by "
            "a map of its own",
            'leave "token_map" out',
        )
    return checkpoint
