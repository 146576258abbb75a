"""Quantizations that name modules: by their whole name, by an expression, or all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sametoken.models.load.linear_format import LinearFormat, Quantization
from sametoken.models.load.mxfp4 import Mxfp4Stack
from sametoken.models.load.sources import TensorSource

#: The head, which most writers leave out without saying so.
HEAD = re.compile(r"(?:.*\.)?lm_head$")


@dataclass(frozen=True, slots=True)
class Targeted:
    """Targets, of which by default there are none, and the format of the linears that they name.

    Attributes:
        names: whole names of modules.
        expressions: of which one matches the beginning of a name.
        everything: whether all linears are meant.
    """

    names: frozenset[str] = frozenset()
    expressions: tuple[re.Pattern[str], ...] = ()
    everything: bool = False
    format: LinearFormat | None = None

    def rank(self, module: str) -> int:
        """How closely a module is named: 0 by name, 1 by expression, 2 by class, 3 not."""
        if module in self.names:
            return 0
        if any(expression.match(module) for expression in self.expressions):
            return 1
        return 2 if self.everything else 3


@dataclass(frozen=True, slots=True)
class ByTarget(Quantization):
    """``Quantization`` by the names of modules: the closest target decides, then the first.

    Attributes:
        groups: targets with their formats.
        ignored: modules that stay unquantized.
    """

    groups: tuple[Targeted, ...]
    ignored: Targeted = Targeted()

    @property
    def expressions(self) -> tuple[re.Pattern[str], ...]:
        """All that a name is matched with."""
        return tuple(one for each in (*self.groups, self.ignored) for one in each.expressions)

    def format_of(self, module: str, source: TensorSource) -> LinearFormat | None:
        """See ``Quantization``.

        A group may name modules by a class, which tensors do not show: a router is no Linear in
        some families. So a weight that is stored in a floating dtype, without anything of the
        format beside it, is what it is.
        """
        named = self.format_named(module)
        return named if named is not None and named.covers(source, module) else None

    def format_named(self, module: str) -> LinearFormat | None:
        """The format that a linear of this name is to have, however it is stored."""
        group = min(self.groups, key=lambda one: one.rank(module))
        excepted = self.ignored.rank(module) < 3 or group.rank(module) == 3
        return None if excepted else group.format


def all_stored(linear: LinearFormat, besides: tuple[re.Pattern[str], ...]) -> ByTarget:
    """One format for every linear that is stored in it, ``besides`` some."""
    whole = Targeted(everything=True, format=linear)
    return ByTarget((whole,), ignored=Targeted(expressions=besides))


@dataclass(frozen=True, slots=True)
class StackedExperts(Quantization):
    """``Quantization`` of stacked experts alone.

    Attributes:
        format: theirs.
        ignored: modules that stay unquantized.
    """

    format: Mxfp4Stack
    ignored: Targeted

    def stack_of(self, stack: str, source: TensorSource) -> Mxfp4Stack | None:
        """See ``Quantization``."""
        named = self.stack_named(stack)
        return named if named is not None and named.covers(source, stack) else None

    def stack_named(self, stack: str) -> Mxfp4Stack | None:
        """The format that a stack of this name is to have, however it is stored."""
        return None if self.ignored.rank(stack.rpartition(".")[0]) < 3 else self.format
