"""One row at a time gives what transformers' Gated DeltaNet gives for the whole sequence.

A chunk of rows gives what its rows give one after the other, in other low-order bits.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from sametoken.ops.model.gated_delta_rule.chunk_reference import advance_chunk
from sametoken.ops.model.gated_delta_rule.reference import advance, gates
from sametoken.ops.model.recurrent.convolution import convolve_row
from sametoken.ops.model.recurrent.rule import FAST_ROWS

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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
@pytest.mark.parametrize("decays", ["none", "usual", "strong", "strong after weak"])
@pytest.mark.parametrize("equal_keys", [False, True])
def test_a_chunk_is_its_rows_in_turn(dtype, tolerance, decays, equal_keys):
    """Keys that are equal couple all rows; after a decay by exp(-1e4) small ones still count."""
    generator = torch.Generator().manual_seed(len(decays))

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = random(FAST_ROWS, 2, 16), random(FAST_ROWS, 2, 16), random(FAST_ROWS, 6, 12)
    beta, state = random(FAST_ROWS, 6).sigmoid(), random(6, 16, 12)
    if equal_keys:
        k[:], beta[:] = k[0].clone(), 1
    weak = -random(FAST_ROWS, 6).exp() * 1e-2
    mixed = torch.where(torch.arange(FAST_ROWS)[:, None] % 7 == 3, -1e4, weak)
    log_decay = {"none": weak * 0, "usual": weak, "strong": weak * 1e4, "strong after weak": mixed}
    rows = (q, k, v, log_decay[decays], beta)
    walked = state.clone()
    expected = torch.stack([advance(walked, *each) for each in zip(*rows, strict=True)])
    torch.testing.assert_close(advance_chunk(state, *rows), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(state, walked, rtol=0, atol=tolerance)


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
    windows = padded.unfold(0, taps, 1).mT
    torch.testing.assert_close(convolve_row(windows, by_tap, bias), torch.stack(rows))
    torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-5, atol=1e-5)
