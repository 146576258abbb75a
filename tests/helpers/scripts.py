"""Scripts of ``benchmarks`` as modules, which are found by plain names in their folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@contextmanager
def imported(folder: str, *names: str) -> Iterator[SimpleNamespace]:
    """Modules of ``benchmarks/FOLDER`` by name; what they import of it is forgotten with them."""
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS / folder)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]
