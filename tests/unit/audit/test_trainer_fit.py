"""Causes of differences, from log-probabilities that are made up."""

from __future__ import annotations

import math
import random

import pytest
import torch

from sametoken.audit.trainer_fit import (
    BOTH,
    EQUAL,
    STALE,
    TEMPERATURE,
    TIES,
    UNEXPLAINED,
    Fit,
    cause_of,
    fitted_temperature,
)

ENGINE = torch.linspace(-6, -0.01, 400)


def fit(noise: float = 0.0, shift: float = 0.0, cause: str = "") -> Fit:
    """A trainer with this much noise, and this much more than the engine everywhere."""
    generator = torch.Generator().manual_seed(1)
    noises = torch.randn(len(ENGINE), generator=generator).double()
    theirs = ENGINE.double() + shift + noise * noises
    return Fit.of("assumed", cause, theirs.split(90), ENGINE.split(90))


def test_counts_and_differences_are_over_all_rollouts():
    theirs = [torch.tensor([-1.0, -2.5]).double(), torch.tensor([-3.25]).double()]
    found = Fit.of("so", STALE, theirs, [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])])
    assert (found.num_tokens, found.num_equal, found.num_far) == (3, 1, 2)
    assert (found.mean, found.mean_abs, found.max_abs) == (-0.25, 0.25, 0.5)
    assert found.spread == (1, 0, 0, 0, 0, 2, 0)
    assert not found.is_exact


def test_differences_are_counted_by_size():
    ours = torch.full((8,), -2.0)
    sizes = [0, 2**-21, 2**-20, 1e-4, 0.125, 0.126, 1.0, 1.5]
    found = Fit.of("", "", [ours.double() - torch.tensor(sizes).double()], [ours])
    assert found.spread == (1, 2, 1, 0, 1, 2, 1)


def test_a_number_that_was_printed_in_full_is_equal_in_fp32():
    """JSON of an fp32 number has digits of fp64."""
    ours = torch.tensor([0.1]).neg().log_softmax(0) - 0.1
    assert Fit.of("", "", [torch.tensor([float(repr(float(ours)))]).double()], [ours]).is_exact


@pytest.mark.parametrize(
    ("given", "others", "cause"),
    [
        (fit(), [], EQUAL),
        (fit(), [fit(cause=STALE)], EQUAL),
        (fit(0.01), [], TIES),
        (fit(0.01), [fit(0.01, cause=STALE), fit(0.009, cause=TEMPERATURE)], TIES),
        # However small: other weights explain every bit of it.
        (fit(0.001), [fit(cause=STALE)], STALE),
        (fit(0.5), [fit(0.3, cause=TEMPERATURE), fit(0.02, cause=STALE)], STALE),
        (fit(0.5), [fit(0.02, cause=STALE), fit(0.01, cause=TEMPERATURE)], TEMPERATURE),
        (fit(0.5), [fit(0.2, cause=STALE)], UNEXPLAINED),
        # Two causes must leave half of what one leaves.
        (fit(0.5), [fit(0.02, cause=TEMPERATURE), fit(0.015, cause=BOTH)], TEMPERATURE),
        (fit(0.5), [fit(0.02, cause=TEMPERATURE), fit(0.01, cause=BOTH)], BOTH),
        (fit(0.5), [fit(cause=STALE), fit(cause=BOTH)], STALE),
        (fit(0.5), [fit(0.3, cause=STALE), fit(0.01, cause=BOTH)], BOTH),
        # All in one direction: a sum over other tokens, for one.
        (fit(0.001, shift=0.02), [], UNEXPLAINED),
        (fit(0.03, shift=0.005), [], TIES),
        (fit(0.2), [], UNEXPLAINED),
    ],
)
def test_the_assumption_that_leaves_least_is_the_cause(given, others, cause):
    found, best = cause_of(given, others)
    assert found == cause
    assert best is next((one for one in others if one.cause == found), given)


def test_one_far_token_among_few_is_no_rounding():
    theirs = ENGINE.double()
    theirs[7] -= 1
    assert cause_of(Fit.of("", "", [theirs[:50]], [ENGINE[:50]]), [])[0] == UNEXPLAINED
    assert cause_of(Fit.of("", "", [theirs[:9]], [ENGINE[:9]]), [])[0] == UNEXPLAINED


def distance_from(wanted: float, noise: float = 0.0):
    """Of log-probabilities of random logits at a temperature, with noise that stays the same."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(60, 30, generator=generator).double()
    theirs = noise * torch.randn(60, generator=generator).double()
    theirs += (logits / wanted).log_softmax(-1)[:, 3]

    def distance(temperature: float) -> float:
        return float(((logits / temperature).log_softmax(-1)[:, 3] - theirs).abs().mean())

    return distance


@pytest.mark.parametrize("wanted", [0.2, 0.7, 1.0, 1.43, 5.0])
@pytest.mark.parametrize("expected", [0.7, 1.0])
def test_a_temperature_is_found_to_the_digit(wanted, expected):
    assert fitted_temperature(distance_from(wanted), expected) == wanted


@pytest.mark.parametrize("wanted", [0.7, 1.0])
def test_under_noise_the_roundest_near_one_is_taken(wanted):
    assert fitted_temperature(distance_from(wanted, noise=0.02), 1.0) == wanted


def test_a_temperature_that_is_not_round_is_near():
    assert math.isclose(fitted_temperature(distance_from(0.73219), 1.0), 0.73219, rel_tol=2e-3)


def test_noise_alone_has_no_temperature():
    """It finds one, which explains no half of the differences."""
    draw = random.Random(0)
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(4)).double()
    ours = logits.log_softmax(-1)[:, 0]
    theirs = ours + torch.tensor([draw.gauss(0, 0.3) for _ in range(50)]).double()

    def fit_at(temperature: float) -> Fit:
        found = (logits / temperature).log_softmax(-1)[:, 0].float()
        return Fit.of("", TEMPERATURE, [theirs], [found])

    best = fit_at(fitted_temperature(lambda t: fit_at(t).mean_abs, 1.0))
    assert cause_of(fit_at(1.0), [best])[0] == UNEXPLAINED
