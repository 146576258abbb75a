"""Gate and up on Hopper without the chip: that they compile, once for all numbers of rows.

Rows are compared on the chip (tests/gpu/test_gemm_gpu.py, tests/gpu/test_fp8_gpu.py): Gluon has
no interpreter.
"""

from __future__ import annotations

import pytest

from helpers.compiled import compile_launches

CODE = """
from sametoken.ops.model.gemm import hopper
from sametoken.ops.model.gemm.tuning import GatedConfig

hopper.pdl_options = lambda tensor: dict(PDL=True, launch_pdl=True)
for rows in (0, 1, 300):
    x, matrix = (torch.zeros(size, 80, dtype=torch.{dtype}) for size in (rows, 144))
    scales = dict({scales})
    out = hopper.gated_product(GatedConfig({features}), x, matrix, **scales)
    assert out.shape == (rows, 72)
"""
SCALES = "feature_scales=torch.zeros(144), row_scales=torch.zeros(rows), dtype=torch.bfloat16"


@pytest.mark.parametrize(
    ("dtype", "features", "scales"), [("float16", 64, ""), ("float8_e4m3fn", 128, SCALES)]
)
def test_one_kernel_serves_all_numbers_of_rows(dtype, features, scales, tmp_path):
    compile_launches(CODE.format(dtype=dtype, features=features, scales=scales), tmp_path)
    assert len(list(tmp_path.rglob("gated_kernel.ptx"))) == 1
