"""A pass over recurrent state on a GPU: nothing waits for the device, no shape follows data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sametoken.errors import InvariantError
from sametoken.kernels.gated_delta_rule.triton import (
    LayerMemory,
    RawRows,
    Runs,
    advance,
    plan_runs,
)
from sametoken.kernels.interface import AttentionRows

if TYPE_CHECKING:
    from sametoken.state.recurrent import GatedDeltaParams, RecurrentCache


@dataclass(frozen=True, slots=True)
class DevicePass:
    """``RecurrentPass`` by kernels; captured steps and eager ones run the same."""

    cache: RecurrentCache
    _runs: Runs

    @classmethod
    def begin(cls, cache: RecurrentCache, rows: AttentionRows) -> DevicePass:
        """Derive what is folded, run and left pending; rows that do not follow give NaN."""
        capacity = cache.pending_qkv.shape[2]
        return cls(cache, plan_runs(rows, cache.position, cache.num_pending, capacity))

    def run(
        self, layer: int, mixed_qkv: Tensor, a: Tensor, b: Tensor, params: GatedDeltaParams
    ) -> Tensor:
        """As ``RecurrentPass.run``."""
        cache = self.cache
        if mixed_qkv.dtype != cache.spec.dtype:
            raise InvariantError(f"raw inputs in {mixed_qkv.dtype} are kept in {cache.spec.dtype}")
        memory = LayerMemory(
            cache.states[layer],
            cache.history[layer],
            cache.pending_qkv[layer],
            cache.pending_gates[layer],
        )
        return advance(self._runs, cache.spec, params, RawRows(mixed_qkv, a, b), memory)

    def finish(self) -> None:
        """Nothing is left to do: what follows on the stream comes after all layers."""
