"""One row at a time gives what transformers' Mamba-2 gives for the whole sequence.

A chunk of rows gives what its rows give one after the other, in other low-order bits.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from sametoken.ops.model.mamba2.chunk_reference import advance_chunk
from sametoken.ops.model.mamba2.reference import advance
from sametoken.ops.model.mamba2.rule import Mamba2, Mamba2Params
from sametoken.ops.model.recurrent.rule import FAST_ROWS
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.4, 0.9)])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
def test_rows_in_turn_are_transformers_scan(heads, groups, limit):
    """Without a convolution: one tap of weight 1, and inputs that SiLU turns into these."""
    generator = torch.Generator().manual_seed(heads)
    rule = Mamba2(heads, 5, groups, 7, conv_kernel=1)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    length, channels = 23, rule.conv_channels
    raw, dt, A_log, skip, bias = (
        random(length, channels),
        random(length, heads),
        random(heads),
        random(heads),
        random(heads),
    )
    x, b, c = torch.nn.functional.silu(raw).split(rule.xbc_sizes, dim=-1)
    expected, final = mamba2_chunk_scan(
        x.reshape(1, length, heads, 5),
        dt[None],
        -A_log.exp(),
        b.reshape(1, length, groups, 7),
        c.reshape(1, length, groups, 7),
        chunk_size=4,
        D=skip,
        dt_bias=bias,
        dt_softplus=True,
        dt_limit=limit,
        return_final_states=True,
    )
    params = Mamba2Params(rule, A_log, skip, bias, torch.ones(1, channels), None, limit)
    run_row, state = params.row_function(), torch.zeros(rule.state_shape)
    rows = [run_row(state, raw[t : t + 1], dt[t]) for t in range(length)]
    torch.testing.assert_close(torch.stack(rows), expected.view(length, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, final[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
@pytest.mark.parametrize("decays", ["none", "usual", "strong", "strong after weak"])
def test_a_chunk_is_its_rows_in_turn(dtype, tolerance, decays):
    """After a decay by exp(-1e4) small ones still count."""
    generator = torch.Generator().manual_seed(len(decays))

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, b, c = random(FAST_ROWS, 6, 12), random(FAST_ROWS, 2, 16), random(FAST_ROWS, 2, 16)
    step, state = random(FAST_ROWS, 6).sigmoid(), random(6, 12, 16)
    weak = -random(FAST_ROWS, 6).exp() * 1e-2
    mixed = torch.where(torch.arange(FAST_ROWS)[:, None] % 7 == 3, -1e4, weak)
    log_decay = {"none": weak * 0, "usual": weak, "strong": weak * 1e4, "strong after weak": mixed}
    walked, rows = state.clone(), (x, b, c, log_decay[decays], step)
    expected = torch.stack(
        [
            advance(walked, *inputs, decay.exp(), own)
            for *inputs, decay, own in zip(*rows, strict=True)
        ]
    )
    torch.testing.assert_close(advance_chunk(state, *rows), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(state, walked, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "size"), [(1, 5), (3, 16), (2, 37)])
def test_the_gated_norm_by_groups_is_its_formula(groups, size, dtype):
    generator = torch.Generator().manual_seed(size)
    x, gate = torch.randn(2, 4, groups * size, generator=generator).to(dtype)
    weight = torch.randn(groups * size, generator=generator).to(dtype)
    gated = (x.double() * torch.nn.functional.silu(gate.double())).view(4, groups, size)
    scale = (gated.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = ((gated * scale).flatten(1) * weight.double()).to(dtype)
    tolerance = 1e-6 if dtype is torch.float32 else 2**-7
    wide = torch.cat((gate, gate), dim=1)[:, : groups * size]
    for kernels in (ReferenceKernels(), NativeKernels()):
        found = kernels.gated_group_norm(x, wide, weight, groups, 1e-5)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        alone = [kernels.gated_group_norm(x[i : i + 1], gate[i : i + 1], weight, groups, 1e-5)
                 for i in range(4)]  # fmt: skip
        assert torch.equal(torch.cat(alone), found)
