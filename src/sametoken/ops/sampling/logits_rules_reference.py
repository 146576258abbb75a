"""Masks, biases and penalties in plain PyTorch; also the CPU path.

Row r of a window is processed as if its r drafts were committed: its prefix is the committed
tokens and drafts 1..r. No state is kept between steps, so rejected drafts have no effect
(tests/unit/runner/test_logits_processing.py).

Order: allowed ids, bad words (matched within the output, as in vLLM), min_tokens, biases,
repetition (prompt and output), frequency and presence (output only). If a bad word of several
tokens would forbid the last valid id, the lowest id that the other masks permit gets the logit 0.
Every product, quotient and difference is rounded to fp32 separately.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from sametoken.ops.backend import SampledRows
from sametoken.ops.sampling.logits_rules import CommittedTokens, LogitsRules, Parts

_FORBIDDEN = float("-inf")


def apply_rules(
    logits: Tensor, rows: SampledRows, committed: CommittedTokens, rules: LogitsRules
) -> None:
    """Mask, bias and penalise logits by their slots' rules; other rows keep their bits.

    Args:
        logits: [L, V] fp32, written.
        rows: slots and positions of the logits rows.
        committed: committed tokens and prompt lengths by slot.
        rules: by slot.
    """
    if not (rules.edits or rules.counters):
        return
    for slot, start, end, num_tokens in _windows(rows, rules):
        window = logits[start:end]
        tokens = torch.cat(
            (committed.token_ids[slot, :num_tokens], rows.token_ids[start + 1 : end])
        )
        prompt_len = int(committed.prompt_len[slot])
        if slot in rules.edits:
            _edit(window, tokens, num_tokens, prompt_len, Parts.of(rules.edits[slot]))
        if slot in rules.counters:
            penalties = (rules.repetition[slot], rules.frequency[slot], rules.presence[slot])
            _penalise(window, tokens, num_tokens, prompt_len, penalties)


def _windows(rows: SampledRows, rules: LogitsRules) -> list[tuple[int, int, int, int]]:
    """Slot, first row, end row, and number of committed tokens of each window with rules."""
    columns = torch.stack((rows.slots, rows.offsets, rows.positions), dim=1).tolist()
    windows: list[tuple[int, int, int, int]] = []
    for row, (slot, offset, position) in enumerate(columns):
        if slot not in rules.edits and slot not in rules.counters:
            continue
        if offset == 0:
            windows.append((slot, row, row + 1, position + 1))
        else:
            windows[-1] = (*windows[-1][:2], row + 1, windows[-1][3])
    return windows


def _edit(window: Tensor, tokens: Tensor, num_tokens: int, prompt_len: int, edits: Parts) -> None:
    """[d + 1, V] logits; [num_tokens + d] committed tokens and drafts."""
    if edits.has_masks:
        _mask(window, tokens, num_tokens, prompt_len, edits)
    window[:, edits.bias_ids] += edits.biases


def _mask(window: Tensor, tokens: Tensor, num_tokens: int, prompt_len: int, edits: Parts) -> None:
    header, vocab_size = edits.header, window.shape[1]
    early_rows = min(max(header.min_tokens - (num_tokens - prompt_len), 0), window.shape[0])
    if header.num_mask_words:
        allowed_ids = edits.allowed_ids(vocab_size)
        kept = window[:, allowed_ids]
        window.fill_(_FORBIDDEN)
        window[:, allowed_ids] = kept
    window[:, edits.banned_ids] = _FORBIDDEN
    for row, token_id in _completions(tokens, num_tokens, prompt_len, edits.bad_words):
        window[row, token_id] = _FORBIDDEN
    window[:early_rows, edits.stop_ids[edits.stop_ids < vocab_size]] = _FORBIDDEN

    no_valid_token = window.amax(dim=-1) == _FORBIDDEN
    for row in no_valid_token.nonzero().flatten().tolist():
        window[row, header.lowest_early if row < early_rows else header.lowest] = 0.0


def _completions(
    tokens: Tensor, num_tokens: int, prompt_len: int, words: tuple[tuple[int, ...], ...]
) -> list[tuple[int, int]]:
    """(window row, token id) pairs that would complete a bad word."""
    if not words:
        return []
    by_last_of_prefix = defaultdict(list)
    for word in words:
        by_last_of_prefix[word[-2]].append(word)
    reach = max(map(len, words)) - 1
    first = max(prompt_len, num_tokens - reach)
    output = tokens[first:].tolist()
    found = []
    for row, end in enumerate(range(num_tokens - first, len(output) + 1)):
        for word in by_last_of_prefix[output[end - 1]] if end else ():
            if tuple(output[max(end - len(word) + 1, 0) : end]) == word[:-1]:
                found.append((row, word[-1]))
    return found


def _penalise(
    window: Tensor,
    tokens: Tensor,
    num_tokens: int,
    prompt_len: int,
    penalties: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Apply repetition, frequency and presence penalties, fp32 scalar tensors, to a window."""
    repetition, frequency, presence = penalties
    ids, index = torch.unique(tokens, return_inverse=True)
    in_prompt = torch.bincount(index[:prompt_len], minlength=ids.shape[0]) > 0
    in_row = torch.zeros((window.shape[0], ids.shape[0]), dtype=torch.int64, device=ids.device)
    in_row[0] = torch.bincount(index[prompt_len:num_tokens], minlength=ids.shape[0])
    in_row[1:].scatter_(1, index[num_tokens:, None], 1)
    in_output = in_row.cumsum(dim=0)

    values = window[:, ids]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(in_prompt | (in_output > 0), repeated, values)
    lowered = values - in_output * frequency - presence
    window[:, ids] = torch.where(in_output > 0, lowered, values)
