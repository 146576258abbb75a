"""Factors of all experts of a layer in one module, as PEFT has them of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sametoken.errors import CheckpointError, shown
from sametoken.models.adapter_factors import StackedFactors
from sametoken.ops.model.low_rank import Factors

#: An experts' module has the first or the second, and the third, in this order.
_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
_WRAPPED = ".base_layer"


def parameters_of(
    modules: Iterable[str], trains: Callable[[str], bool], location: str
) -> dict[str, str]:
    """The parameters of experts that modules hold factors of, by the modules' names.

    PEFT wraps experts once for each parameter that it trains: the last one has the module's name,
    and those before it are a base layer below. ``trains`` tells whether the config names one.

    Raises:
        CheckpointError: there are other modules than the config tells.
    """
    wrapped: dict[str, list[str]] = {}
    for name in modules:
        experts = name
        while experts.endswith(_WRAPPED):
            experts = experts.removesuffix(_WRAPPED)
        if experts.endswith(".experts"):
            wrapped.setdefault(experts, []).append(name)
    found: dict[str, str] = {}
    for experts, names in wrapped.items():
        parameters = [one for one in _PARAMETERS if trains(f"{experts}.{one}")]
        wanted = [experts + _WRAPPED * depth for depth in range(len(parameters))]
        if sorted(names, key=len) != wanted:
            raise CheckpointError(
                f"{location} holds factors of {len(names)} parameters of {shown(experts)}, and "
                f"target_parameters names {', '.join(parameters) or 'none'}",
                "save the adapter again, with the config that it was trained with",
            )
        for name, parameter in zip(reversed(wanted), parameters, strict=True):
            found[name] = f"{experts}.{parameter}"
    return found


def stack_of(factors: Factors, rank: int) -> StackedFactors:
    """Factors [E * r, K], expert by expert, and [N, r * E], rank by rank, as each expert's."""
    count = factors.down.shape[0] // rank
    down = factors.down.unflatten(0, (count, rank))
    up = factors.up.unflatten(1, (rank, count)).permute(2, 0, 1)
    return StackedFactors(down, up, factors.scale)
