"""Rules by token id and by history, applied to one request's window.

Row r of a window is judged as if its r drafts were committed: its prefix is the committed
tokens and drafts 1..r. Nothing is remembered between steps, so a rejected draft cannot
leave a trace (tests/unit/verification/test_process_logits.py).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count

import torch
from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.state.sampling import SlotRules

_FORBIDDEN = float("-inf")


def apply_rules(
    window: Tensor, tokens: Tensor, num_tokens: int, prompt_len: int, rules: SlotRules
) -> None:
    """Mask, bias, and penalise a window in place.

    Args:
        window: [d + 1, V] fp32 logits, written.
        tokens: [num_tokens + d] int64, committed tokens and the window's drafts.
        num_tokens: committed tokens n.
        prompt_len: how many of them are the prompt.
        rules: the request's rules.
    """
    if rules.has_masks:
        _mask(window, tokens, num_tokens, prompt_len, rules)
    window[:, rules.bias_ids] += rules.bias
    if rules.has_penalties:
        _penalise(window, tokens, num_tokens, prompt_len, rules)


def _mask(
    window: Tensor, tokens: Tensor, num_tokens: int, prompt_len: int, rules: SlotRules
) -> None:
    """Allowed ids, bad words (matched within the output, as in vLLM), then min_tokens.

    Where a bad word of several tokens forbids the last id left, it yields: the lowest id
    that the other masks permit is chosen. Masks that always leave nothing are refused at
    the door (``verification.admission``).
    """
    stop_ids = rules.stop_ids[rules.stop_ids < window.shape[1]]
    early_rows = min(max(rules.min_tokens - (num_tokens - prompt_len), 0), window.shape[0])
    if rules.allowed_ids is not None:
        kept = window[:, rules.allowed_ids]
        window.fill_(_FORBIDDEN)
        window[:, rules.allowed_ids] = kept
    window[:, rules.banned_ids] = _FORBIDDEN
    if rules.bad_words:
        for row, token_id in _completions(tokens, num_tokens, prompt_len, rules.bad_words):
            window[row, token_id] = _FORBIDDEN
    window[:early_rows, stop_ids] = _FORBIDDEN

    stuck = window.amax(dim=-1) == _FORBIDDEN
    for row in stuck.nonzero().flatten().tolist():
        masked = (rules.banned_ids, stop_ids) if row < early_rows else (rules.banned_ids,)
        lowest = _lowest_permitted(rules.allowed_ids, torch.cat(masked), window.shape[1])
        window[row, lowest] = 0.0


def _lowest_permitted(allowed_ids: Tensor | None, masked_ids: Tensor, vocab_size: int) -> int:
    masked = set(masked_ids.tolist())
    candidates = range(vocab_size) if allowed_ids is None else allowed_ids.tolist()
    for token_id in candidates:
        if token_id not in masked:
            return int(token_id)
    raise InvariantError("a request was admitted whose masks forbid every token")


def _completions(
    tokens: Tensor, num_tokens: int, prompt_len: int, words: tuple[tuple[int, ...], ...]
) -> list[tuple[int, int]]:
    """(window row, token id) pairs that would complete a bad word of several tokens."""
    by_last_of_prefix = defaultdict(list)
    for word in words:
        by_last_of_prefix[word[-2]].append(word)
    reach = max(map(len, words)) - 1
    first = max(prompt_len, num_tokens - reach)
    output = tokens[first:].tolist()
    found = []
    for row, end in zip(count(), range(num_tokens - first, len(output) + 1), strict=False):
        for word in by_last_of_prefix[output[end - 1]] if end else ():
            if tuple(output[max(end - len(word) + 1, 0) : end]) == word[:-1]:
                found.append((row, word[-1]))
    return found


def _penalise(
    window: Tensor, tokens: Tensor, num_tokens: int, prompt_len: int, rules: SlotRules
) -> None:
    """Repetition (prompt and output), then frequency and presence (output only)."""
    ids, index = torch.unique(tokens, return_inverse=True)
    in_prompt = torch.bincount(index[:prompt_len], minlength=ids.shape[0]) > 0
    in_row = torch.zeros((window.shape[0], ids.shape[0]), dtype=torch.int64, device=ids.device)
    in_row[0] = torch.bincount(index[prompt_len:num_tokens], minlength=ids.shape[0])
    in_row[1:].scatter_(1, index[num_tokens:, None], 1)
    in_output = in_row.cumsum(dim=0)

    values = window[:, ids]
    penalty = rules.repetition_penalty
    repeated = torch.where(values > 0, values / penalty, values * penalty)
    values = torch.where(in_prompt | (in_output > 0), repeated, values)
    lowered = values - in_output * rules.frequency_penalty - rules.presence_penalty
    window[:, ids] = torch.where(in_output > 0, lowered, values)
