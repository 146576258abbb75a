"""One row at a time gives what transformers' Gated DeltaNet gives for the whole sequence."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from sametoken.ops.model.gated_delta_rule.reference import advance, gates
from sametoken.ops.model.recurrent.convolution import convolve_row

MODELINGS = pytest.mark.parametrize("modeling", [modeling_qwen3_next, modeling_qwen3_5])
HEADS = pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (2, 6), (1, 4)])


@MODELINGS
@HEADS
@pytest.mark.parametrize("from_state", [False, True])
def test_rows_in_turn_are_transformers_recurrence(modeling, key_heads, value_heads, from_state):
    generator = torch.Generator().manual_seed(key_heads + value_heads)
    length, key_dim, value_dim = 23, 8, 5

    def random(*shape):
        return torch.randn(shape, generator=generator)

    q, k = random(length, key_heads, key_dim), random(length, key_heads, key_dim)
    v = random(length, value_heads, value_dim)
    a, b = random(length, value_heads), random(length, value_heads)
    a_log, dt_bias = random(value_heads), random(value_heads)
    state = random(value_heads, key_dim, value_dim) * from_state

    log_decay = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    expected, expected_state = modeling.torch_recurrent_gated_delta_rule(
        q[None],
        k[None],
        v[None],
        g=log_decay[None],
        beta=b.sigmoid()[None],
        initial_state=state[None].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    rows = []
    for t in range(length):
        row_gates = gates(a[t], b[t], a_log.exp(), dt_bias)
        rows.append(advance(state, q[t], k[t], v[t], *row_gates))
    torch.testing.assert_close(torch.stack(rows), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, expected_state[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_convolution_of_every_row_is_torch_s(with_bias):
    generator = torch.Generator().manual_seed(0)
    channels, taps, length = 6, 4, 9
    x = torch.randn(length, channels, generator=generator)
    weight = torch.randn(channels, 1, taps, generator=generator)
    bias = torch.randn(channels, generator=generator) if with_bias else None
    padded = torch.nn.functional.pad(x, (0, 0, taps - 1, 0))
    expected = torch.nn.functional.silu(
        torch.nn.functional.conv1d(padded.t()[None], weight, bias, groups=channels)
    )[0].t()
    by_tap = weight[:, 0].t().contiguous()
    rows = [convolve_row(padded[t : t + taps], by_tap, bias) for t in range(length)]
    torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-5, atol=1e-5)
