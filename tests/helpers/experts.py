"""What kernels make of experts, by the definition and in any batch."""

from __future__ import annotations

from torch import Tensor, equal
from torch.testing import assert_close

from sametoken.ops.backend import Routing
from sametoken.ops.model.moe import SeparateExperts
from sametoken.ops.model.moe_gate_triton import moe_gate
from sametoken.ops.model.moe_triton import StackedExperts
from sametoken.ops.reference import PlainWeight


def require_experts(
    stacked: StackedExperts,
    x: Tensor,
    logits: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    *,
    atol: float,
) -> None:
    """Require the reference's values, and a row's bits over all sizes of tiles."""
    chosen, weights = moe_gate(logits, routing, correction)
    whole = stacked(x, chosen, weights)
    matrices = (stacked.gate_up.weight, stacked.down.weight)
    separate = SeparateExperts(*([PlainWeight(one) for one in each] for each in matrices))
    assert_close(whole[:9], separate(x[:9], chosen[:9], weights[:9]), rtol=2e-2, atol=atol)
    for rows in (1, 2, 17, 64, 256, 257):
        ids, parts = moe_gate(logits[:rows].clone(), routing, correction)
        assert equal(ids, chosen[:rows])
        assert equal(parts, weights[:rows])
        assert equal(stacked(x[:rows].clone(), ids, parts), whole[:rows])
