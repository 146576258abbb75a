"""What ``WeightReader`` asks of a quantization format: what it covers, and how to read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from sametoken.ops.weight import UnquantizedWeight, Weight

if TYPE_CHECKING:
    from sametoken.models.load.sources import TensorSource
    from sametoken.models.load.weights import Part, WeightReader
    from sametoken.ops.backend import Kernels


class LinearFormat(Protocol):
    """How a checkpoint stores a quantized linear. Equal formats may be fused."""

    def covers(self, source: TensorSource, module: str) -> bool:
        """Whether the module is stored so, rather than unquantized; true if no tensor is there."""
        ...

    def read(self, reader: WeightReader, in_features: int, parts: tuple[Part, ...]) -> Weight:
        """This rank's shares of the parts, one after the other, as one weight.

        Args:
            reader: of the tensors.
            in_features: columns of each whole part.
            parts: named by module: without the name of a tensor in it.

        Raises:
            CheckpointError: a tensor is missing, or has another shape, dtype or range.
            ConfigError: the ranks cannot divide a part.
            UnsupportedError: the backend has no products for the format.
        """
        ...

    def expanded(self, reader: WeightReader, in_features: int, part: Part) -> Tensor:
        """This rank's share of a part as a matrix in fp32; arguments and errors as for ``read``."""
        ...


class TableFormat(LinearFormat, Protocol):
    """How a checkpoint stores an embedding, or a head that may be tied to one."""

    def read(
        self, reader: WeightReader, in_features: int, parts: tuple[Part, ...]
    ) -> UnquantizedWeight:
        """As in ``LinearFormat``."""
        ...


class StackFormat(Protocol):
    """How a checkpoint stores all experts' matrices of one product in quantized tensors."""

    def read(self, reader: WeightReader, count: int, in_features: int, part: Part) -> list[Weight]:
        """This rank's share of each expert's [part.rows, in_features] matrix, in order.

        ``part`` is one of them, named by the stack. Errors as for ``LinearFormat.read``.
        """
        ...


class Quantization:
    """The formats of a checkpoint's matrices, and of its experts where they are stacked.

    Of this class itself there are none.
    """

    def require_products(self, kernels: Kernels) -> None:
        """Refuse formats that the backend has no products of; by default there are none.

        Raises:
            UnsupportedError: there are some.
        """

    def format_of(self, module: str, source: TensorSource) -> LinearFormat | None:
        """The format of a linear, by its name without ``.weight``; None: unquantized."""
        return None

    def format_of_table(self, module: str, source: TensorSource) -> TableFormat | None:
        """The same of an embedding or a head."""
        return None

    def stack_of(self, stack: str, source: TensorSource) -> StackFormat | None:
        """The format of stacked experts, by the name of their tensor; None: unquantized."""
        return None


UNQUANTIZED = Quantization()
