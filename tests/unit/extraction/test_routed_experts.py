"""Notes of chosen experts: the last pass alone, layers of slices put together."""

from __future__ import annotations

import torch

from sametoken.extraction.routed_experts import NotingKernels
from sametoken.ops.backend import Routing
from sametoken.ops.reference import ReferenceKernels

ROUTING = Routing(2, normalise=True)


def test_the_last_pass_is_put_together_from_its_slices():
    plain, kernels = ReferenceKernels(), NotingKernels(ReferenceKernels())
    layers = torch.randn(2, 5, 7)
    chosen = [plain.moe_gate(one, ROUTING)[0] for one in layers]
    # Of another module with the same kernels, and other counts.
    kernels.moe_gate(torch.randn(9, 7), Routing(3, normalise=True))
    for one in layers:
        for rows in (one[:3], one[3:]):
            kernels.moe_gate(rows, ROUTING)
    taken = kernels.take(5, 2)
    assert torch.equal(taken.view(5, 2, 2), torch.stack(chosen, 1))
    assert kernels.num_experts == 7
    kernels.moe_gate(layers[0], ROUTING)
    assert torch.equal(kernels.take(5, 1), chosen[0])
    assert kernels.name == plain.name
