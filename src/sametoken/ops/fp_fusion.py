"""Products fused with sums, rounded once: Triton 3.10 fuses them only where a launch asks."""

from __future__ import annotations

#: Launch options of every kernel but those whose bits need two roundings.
FUSED = {"enable_fp_fusion": True}
