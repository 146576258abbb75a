"""Draft heads that propose some of the target's tokens alone, and read those rows of a head.

A large vocabulary's logits are most of what a small head reads, and answers are made of few
of its tokens (FR-Spec: Zhao et al., arXiv:2502.14856). The target reads its own head whole.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sametoken.core.files import read_json
from sametoken.errors import ConfigError

_REMEDY = "give a JSON list of token ids, as `sametoken train token-map` writes it"


def read_token_map(path: Path, vocab_size: int) -> Tensor:
    """The tokens that a file names.

    Args:
        path: a JSON list of ids, in any order.
        vocab_size: of the target; ids are below it.

    Returns:
        [V'] int64, ascending.

    Raises:
        ConfigError: the file cannot be read, or is no list of different ids of tokens.
    """
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the token map {path} cannot be read ({error})", _REMEDY) from error
    if not isinstance(found, list) or not found or not all(type(i) is int for i in found):
        raise ConfigError(f"the token map {path} is no list of integers", _REMEDY)
    low, high = min(found), max(found)
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"the token map {path} holds ids {low}..{high}, outside a vocabulary of {vocab_size}",
            "use one that was made with the target's own tokenizer",
        )
    token_ids = torch.tensor(sorted(set(found)))
    if token_ids.shape[0] != len(found):
        raise ConfigError(f"the token map {path} names a token twice", _REMEDY)
    return token_ids
