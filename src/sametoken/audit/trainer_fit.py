"""Why a trainer's log-probabilities differ from the engine's: which assumption fits them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EQUAL, TIES, STALE = "equal", "numeric ties", "stale weights"
TEMPERATURE, TOKENS, UNEXPLAINED = "wrong temperature", "wrong tokens", "unexplained"
BOTH = f"{STALE} and {TEMPERATURE}"

#: One step of a bf16 logit between 16 and 32, and the share of tokens that may be further off.
ROUNDING, TOLERATED_SHARE = 0.125, 0.01
#: Differences are counted up to each of these, and beyond.
SIZES = (1e-6, 1e-4, 1e-2, ROUNDING, 1.0)
#: Of the mean difference, the part that may lie in one direction where only rounding differs.
TOLERATED_BIAS = 0.5
#: An assumption explains differences if it leaves at most this part of them.
LEFT_OVER = 0.5
#: A temperature fits fewer tokens by chance.
MIN_TOKENS = 8
_GRID = tuple(2 ** (step / 4) for step in range(-12, 13))
_SECTIONS = 14
#: A rounder temperature fits as well if it leaves at most this much more.
_AS_WELL = 0.02


@dataclass(frozen=True, slots=True)
class Fit:
    """Differences, trainer less engine, under an assumption.

    Attributes:
        assumed: the assumption, in words.
        cause: what it proves if it fits.
        num_tokens, num_equal: compared tokens, and those with the same fp32 bits.
        num_far: tokens that differ by more than ``ROUNDING``.
        mean: the mean difference; of tokens that the engine sampled, minus the estimate of the
            divergence KL(engine, trainer).
        mean_abs, max_abs: mean and largest absolute difference.
        spread: tokens by absolute difference: with the same bits, up to each of ``SIZES``, beyond.
    """

    assumed: str
    cause: str
    num_tokens: int
    num_equal: int
    num_far: int
    mean: float
    mean_abs: float
    max_abs: float
    spread: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, assumed: str, cause: str, trainer: Sequence[Tensor], engine: Sequence[Tensor]
    ) -> Fit:
        """Compare the log-probabilities of rollouts.

        Args:
            assumed, cause: see the class.
            trainer: by rollout, fp64.
            engine: by rollout, fp32; of at least one token in all.
        """
        theirs, ours = torch.cat(list(trainer)), torch.cat(list(engine))
        differences = theirs - ours.double()
        distances = differences.abs()
        equal = theirs.float() == ours
        sizes = torch.bucketize(distances[~equal], torch.tensor(SIZES, dtype=torch.float64))
        num_equal = int(equal.sum())
        return cls(
            assumed=assumed,
            cause=cause,
            num_tokens=ours.numel(),
            num_equal=num_equal,
            num_far=int((distances > ROUNDING).sum()),
            mean=float(differences.mean()),
            mean_abs=float(distances.mean()),
            max_abs=float(distances.max()),
            spread=(num_equal, *sizes.bincount(minlength=len(SIZES) + 1).tolist()),
        )

    @property
    def is_exact(self) -> bool:
        """Whether every token has the same bits."""
        return self.num_equal == self.num_tokens

    @property
    def fits(self) -> bool:
        """Whether nothing is left to explain."""
        return self.is_exact or self.is_rounding

    @property
    def is_rounding(self) -> bool:
        """Whether bf16 rounding may be the whole difference: small, in both directions."""
        near = self.num_far <= TOLERATED_SHARE * self.num_tokens
        # Few tokens lean to one side by chance.
        chance = 4 / math.sqrt(self.num_tokens)
        return near and abs(self.mean) <= max(TOLERATED_BIAS, chance) * self.mean_abs


def cause_of(given: Fit, others: Sequence[Fit]) -> tuple[str, Fit]:
    """The cause of the differences, and the assumption that fits best.

    Args:
        given: under what the rollouts say of themselves.
        others: under other assumptions.
    """
    if given.is_exact:
        return EQUAL, given
    best = given
    # Two causes at once must explain as much again as one does alone.
    for num_causes in (1, 2):
        fitting = (one for one in others if one.fits and (one.cause == BOTH) == (num_causes == 2))
        found = min(fitting, key=lambda fit: fit.mean_abs, default=best)
        if not best.is_exact and found.mean_abs <= LEFT_OVER * best.mean_abs:
            best = found
    if best is not given:
        return best.cause, best
    return (TIES if given.is_rounding else UNEXPLAINED), given


def fitted_temperature(distance: Callable[[float], float], expected: float) -> float:
    """The temperature of the smallest distance, within a factor of 8 of ``expected``.

    A grid, since distances may have several minima, then golden sections around its best point.
    The result is the roundest of the numbers that fit as well.
    """
    grid = [expected * factor for factor in _GRID]
    found = [distance(temperature) for temperature in grid]
    place = found.index(min(found))
    low, high = grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
    exact = _minimum(distance, math.log(low), math.log(high))
    rounded = (round(exact, digits) for digits in (1, 2, 3))
    candidates = {one: distance(one) for one in (*rounded, exact) if one > 0}
    most = (1 + _AS_WELL) * min(candidates.values())
    return next(one for one, left in candidates.items() if left <= most)


def _minimum(distance: Callable[[float], float], low: float, high: float) -> float:
    """Of a function with one minimum between two logarithms."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = distance(math.exp(left)), distance(math.exp(right))
    for _ in range(_SECTIONS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = distance(math.exp(left))
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = distance(math.exp(right))
    return math.exp((low + high) / 2)
