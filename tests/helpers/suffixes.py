"""Suffix search, word by word as it is defined."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sametoken.ops.lookup.suffix import GROUP, MAX_VOTERS, Earlier, Limits


@dataclass(frozen=True)
class Options:
    """``Limits`` before they are tables."""

    k: int
    depth: int = 24
    min_match: int = 1
    factor: float = 1.0
    min_prob: float = 0.1

    def tables(self, device: str = "cpu") -> Limits:
        return Limits.of(
            self.k,
            depth=self.depth,
            min_match=self.min_match,
            factor=self.factor,
            min_prob=self.min_prob,
            device=torch.device(device),
        )


def slow_search(own: list[int], others: list[list[int]], options: Options) -> list[int]:
    best: dict[tuple[int, int], tuple[int, int]] = {}
    for index, text in enumerate([own, *others]):
        for end in range(len(text) - 1):
            length = match_length(text[: end + 1], own, options.depth)
            group = (index, end // GROUP)
            if length and length > best.get(group, (0, 0))[0]:
                best[group] = (length, end)
    longest = max((length for length, _ in best.values()), default=0)
    voters = [
        [own, *others][index][end + 1 :]
        for (index, _), (length, end) in sorted(best.items())
        if length == longest
    ][:MAX_VOTERS]
    needed = max(1, math.ceil(options.min_prob * len(voters)))
    most = min(options.k, int(options.factor * longest)) if longest >= options.min_match else 0
    drafts: list[int] = []
    while len(drafts) < most:
        following = [text[len(drafts)] for text in voters if len(text) > len(drafts)]
        counts = [following.count(token) for token in following]
        if not counts or max(counts) < needed:
            break
        drafts.append(following[counts.index(max(counts))])
        voters = [text for text in voters if text[: len(drafts)] == drafts]
    return drafts


def match_length(text: list[int], own: list[int], depth: int) -> int:
    length = 0
    while length < min(depth, len(text), len(own)) and text[-1 - length] == own[-1 - length]:
        length += 1
    return length


def table(rows: list[list[int]], width: int, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded with what would match if it were ever looked at."""
    padded = [row + [fill] * (width - len(row)) for row in rows]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return torch.tensor(padded, dtype=torch.int64).view(len(rows), width), lengths


def earlier(rows: list[list[int]], width: int, fill: int) -> Earlier:
    return Earlier(*table(rows, width, fill))
