"""All experts' matrices of one product in one tensor, unquantized or in float8."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sametoken.ops.weight import Rounding


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """All experts' matrices of one product: [E, N, K], gate before up where both are.

    Attributes:
        weight: of the model's dtype or float8 e4m3.
        scales: of float8, fp32: [E, N], or [E, N, groups] by row and 128 features.
        rounding: of activations before a float8 product; None: none.
        blocks: as in ``Fp8Matrix``, of every expert.
    """

    weight: Tensor
    scales: Tensor | None = None
    rounding: Rounding | None = None
    blocks: bool = False

    @property
    def out_features(self) -> int:
        """N."""
        return self.weight.shape[1]

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of matrices and scales."""
        return self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)
