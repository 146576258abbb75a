"""Per-head products in Triton, under the interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.compiled import compile_launches
from sametoken.ops.model.latent_attention.heads_triton import DeviceHeadWeights


@pytest.mark.parametrize(
    ("rows", "heads", "features", "depth", "dtype"),
    [(1, 3, 24, 12, torch.float32), (17, 2, 70, 66, torch.float32), (5, 1, 64, 64, torch.float16)],
)
def test_each_head_has_its_own_matrix(rows, heads, features, depth, dtype):
    torch.manual_seed(0)
    # Parts of wider tensors, with NaN around them.
    x = torch.full((rows, heads, depth + 3), torch.nan, dtype=dtype)
    x[..., :depth] = torch.randn(rows, heads, depth)
    out = torch.full((rows, heads, features + 5), 7.0, dtype=dtype)
    matrices = torch.randn(heads, features, depth).to(dtype)
    weight = DeviceHeadWeights(matrices)
    weight.matmul(x[..., :depth], out[..., :features])
    expected = torch.einsum("thk,hnk->thn", x[..., :depth].double(), matrices.double())
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(
        out[..., :features].double(), expected, rtol=tolerance, atol=tolerance
    )
    assert (out[..., features:] == 7).all()
    assert weight.nbytes == matrices.nbytes
    last, turned = torch.empty(rows, 1, features, dtype=dtype), torch.empty_like(out)
    weight.heads(heads - 1, heads).matmul(x[:, -1:, :depth], last)
    assert torch.equal(last[:, 0], out[:, -1, :features])
    of_turned = DeviceHeadWeights(matrices.mT.contiguous()).transposed()
    of_turned.matmul(x[..., :depth], turned[..., :features])
    assert torch.equal(turned[..., :features], out[..., :features])
    weight.matmul(x[:0, :, :depth], out[:0, :, :features])


def test_real_sizes_compile(tmp_path):
    compile_launches(
        """
from sametoken.ops.model.latent_attention.heads_triton import head_products
for rows in (1, 200, 1100):
    q, out = (torch.zeros(rows, 20, width, dtype=torch.bfloat16) for width in (256, 576))
    matrices = torch.zeros(20, 512, 192, dtype=torch.bfloat16)
    head_products(q[..., :192], matrices, out[..., :512])
    head_products(out[..., :512], matrices.mT, q[..., :192])
""",
        tmp_path,
    )
