"""The gated delta rule by chunks against the rows of the engine's reference."""

from __future__ import annotations

import pytest
import torch

from sametoken.kernels.gated_delta_rule.reference import advance
from sametoken.train.gated_delta import CHUNK, gated_delta_rule


def drawn(length, key_heads=2, value_heads=4, key_dim=5, value_dim=3, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(2, length, *shape, generator=generator)

    q, k, v = rand(key_heads, key_dim), rand(key_heads, key_dim), rand(value_heads, value_dim)
    return q, k, v, -rand(value_heads).exp(), rand(value_heads).sigmoid()


def by_rows(q, k, v, log_decay, beta):
    outputs = torch.empty_like(v)
    for batch in range(len(q)):
        state = torch.zeros(v.shape[2], k.shape[3], v.shape[3])
        for row in range(q.shape[1]):
            part = (x[batch, row] for x in (q, k, v, log_decay, beta))
            outputs[batch, row] = advance(state, *part)
    return outputs


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_it_is_the_rows(length):
    given = drawn(length)
    torch.testing.assert_close(gated_delta_rule(*given), by_rows(*given), rtol=1e-4, atol=1e-5)


def test_decays_that_leave_nothing_and_that_keep_everything():
    q, k, v, log_decay, beta = drawn(70)
    for rate in (0.0, -1e-6, -50.0, -1e4):
        given = (q, k, v, torch.full_like(log_decay, rate), beta)
        torch.testing.assert_close(gated_delta_rule(*given), by_rows(*given), rtol=1e-4, atol=1e-5)


def test_keys_that_repeat():
    q, k, v, log_decay, _ = drawn(CHUNK)
    given = (q, k[:, :1].expand_as(k), v, torch.zeros_like(log_decay), torch.ones_like(log_decay))
    torch.testing.assert_close(gated_delta_rule(*given), by_rows(*given), rtol=1e-4, atol=1e-4)


def test_its_gradients_are_those_of_the_rows():
    given = [x.requires_grad_() for x in drawn(9)]
    wanted = torch.randn(gated_delta_rule(*given).shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((gated_delta_rule(*given) * wanted).sum(), given)

    def rows(q, k, v, log_decay, beta):
        # The reference advances its state in place; the same row out of place.
        outputs = []
        for batch in range(2):
            state = torch.zeros(4, 5, 3)
            for row in range(9):
                one_q, one_k = (
                    torch.nn.functional.normalize(x[batch, row], dim=-1).repeat_interleave(2, 0)
                    for x in (q, k)
                )
                state = state * log_decay[batch, row].exp()[:, None, None]
                read = (state * one_k[..., None]).sum(1)
                update = (v[batch, row] - read) * beta[batch, row][:, None]
                state = state + one_k[..., None] * update[:, None]
                outputs.append((state * one_q[..., None]).sum(1) / 5**0.5)
        return torch.stack(outputs).view(2, 9, 4, 3)

    expected = torch.autograd.grad((rows(*given) * wanted).sum(), given)
    for name, one, other in zip(["q", "k", "v", "decay", "beta"], found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=name)
