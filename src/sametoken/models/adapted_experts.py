"""A layer's experts with adapters beside them, which come expert by expert or as stacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.layers.share import ExpertModules, Part
from sametoken.models.adapter_factors import Adapter, RankShares, StackedFactors
from sametoken.ops.model.low_rank import Factors
from sametoken.ops.model.low_rank_experts import AdaptedExperts, ExpertFactors

_BELONG = "check that adapter and model belong together"


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """The experts of a layer, beside which adapters have places.

    Attributes:
        name: of all, as ``module_name`` gives it.
        modules: of the checkpoint.
        experts: what adapters are written to.
    """

    name: str
    modules: ExpertModules
    experts: AdaptedExperts

    @property
    def known(self) -> set[str]:
        """The names of what an adapter may change."""
        parts = (*self.modules.inputs, self.modules.output)
        each = (f"{index}.{part.name}" for index in range(self.modules.count) for part in parts)
        return {f"{self.name}.{one}" for one in (*each, *self._stacks)}

    @property
    def most_elements(self) -> int:
        """Elements of factors of rank 1 beside all matrices."""
        inner = self.modules.inputs[0].rows
        each = (len(self.modules.inputs) + 1) * (self.modules.output.rows + inner)
        return self.modules.count * each

    @property
    def _stacks(self) -> tuple[str, str]:
        first = "gate_up_proj" if len(self.modules.inputs) == 2 else "up_proj"
        return first, self.modules.output.name

    def layouts(self, adapter: Adapter) -> set[bool]:
        """Whether this layer's stacks are of transposed matrices, where their shapes say it.

        Raises:
            CheckpointError: they are of other experts.
        """
        hidden, inner = self.modules.output.rows, self.modules.inputs[0].rows
        wanted = (len(self.modules.inputs) * inner, hidden), (hidden, inner)
        found = set()
        for name, shape in zip(self._stacks, wanted, strict=True):
            own = adapter.stacks.get(f"{self.name}.{name}")
            if own is None:
                continue
            count, *matrix = own.shape
            if count != self.modules.count or tuple(matrix) not in (shape, shape[::-1]):
                raise CheckpointError(
                    f"adapter {adapter.location} is for a {self.name}.{name} of {count} x "
                    f"{matrix[0]} x {matrix[1]}, the model's has {self.modules.count} x "
                    f"{shape[0]} x {shape[1]}",
                    _BELONG,
                )
            if shape[0] != shape[1]:
                found.add(tuple(matrix) != shape)
        return found

    def factors(
        self, adapter: Adapter, shares: RankShares, *, transposed: bool
    ) -> list[ExpertFactors]:
        """This rank's share of what an adapter adds to each expert.

        Raises:
            CheckpointError: its factors have other shapes than the model's experts.
        """
        first, second = (self._stack(adapter, name, transposed=transposed) for name in self._stacks)
        inputs = tuple(zip(self.modules.inputs, self._rows, strict=True))
        output, inner = self.modules.output, self.modules.inputs[0].rows

        def own(
            index: int, part: Part, stack: StackedFactors | None, rows: slice = slice(None)
        ) -> Factors | None:
            module = f"{self.name}.{index}.{part.name}"
            whole = stack.of(index, rows) if stack else adapter.modules.get(module)
            in_features = inner if part is output else output.rows
            return whole and shares.of(whole, module, part, in_features, adapter.location)

        return [
            ExpertFactors(
                [own(index, part, first, rows) for part, rows in inputs], own(index, output, second)
            )
            for index in range(self.modules.count)
        ]

    def _stack(self, adapter: Adapter, name: str, *, transposed: bool) -> StackedFactors | None:
        own = adapter.stacks.get(f"{self.name}.{name}")
        return own.turned() if own and transposed else own

    @property
    def _rows(self) -> Sequence[slice]:
        """The rows of each input in a matrix that has all."""
        count, inner = len(self.modules.inputs), self.modules.inputs[0].rows
        if self.modules.interleaved:
            return [slice(index, None, count) for index in range(count)]
        return [slice(index * inner, (index + 1) * inner) for index in range(count)]


def is_transposed(adapter: Adapter, places: Iterable[ExpertPlaces]) -> bool:
    """Whether an adapter's stacks are of transposed matrices, as some versions of PEFT have them.

    Raises:
        CheckpointError: some are, others are not; or they are of other experts.
        UnsupportedError: all their matrices are square.
    """
    found = {one for place in places for one in place.layouts(adapter)}
    if len(found) > 1:
        raise CheckpointError(
            f"adapter {adapter.location} has some experts' factors in turned order", _BELONG
        )
    if adapter.stacks and not found:
        raise UnsupportedError(
            f"adapter {adapter.location} changes square matrices of experts alone, and PEFT's "
            "versions differ in which of its factors is the first",
            "train gate_up_proj and down_proj of the experts both, or merge it into the checkpoint",
        )
    return found == {True}
