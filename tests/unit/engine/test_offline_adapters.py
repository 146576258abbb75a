from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from sametoken.engine.live_adapters import NewAdapter
from sametoken.engine.offline_adapters import OfflineAdapters
from sametoken.types.lora_modules import AdapterNames


def test_an_adapter_that_an_interrupt_comes_before_is_dropped():
    """Other ranks would keep their shares of it until another one comes."""
    dropped, named = [], AdapterNames(())
    new = NewAdapter("sql", lambda place: None, lambda: dropped.append("sql"))
    engine = SimpleNamespace(adapters=SimpleNamespace(load=lambda name, given: new))

    @contextmanager
    def resting():
        raise KeyboardInterrupt
        yield

    adapters = OfflineAdapters(engine, named, threading.Lock(), resting)
    with pytest.raises(KeyboardInterrupt):
        adapters.load("sql", "somewhere")
    assert dropped == ["sql"]
    assert not named.modules
