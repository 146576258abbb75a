"""A sleep gives memory back, and nothing runs before what was lost has come back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sametoken.engine.core import EngineCore
from sametoken.engine.sleep import CPUMemory, DeviceMemory, FixedMemory, Sleep, whole_storages
from sametoken.engine.upkeep import used_or_dropped
from sametoken.errors import InvariantError, RequestError, UnsupportedError, WeightUpdateError


class Noted:
    """Memory that notes what is given back, and what comes again."""

    def __init__(self) -> None:
        self.dropped: list[bool] = []
        self.restored: list[str] = []
        self.refuses = False

    def require_droppable(self) -> None:
        pass

    def drop(self, *, weights: bool) -> None:
        self.dropped.append(weights)
        if self.refuses:
            raise UnsupportedError("the system keeps these pages")

    def restore(self, tags) -> None:
        if self.refuses:
            raise RequestError("no room")
        self.restored += tags

    def make_ready(self) -> None:
        self.restored.append("ready")


def test_levels_and_tags():
    memory = Noted()
    sleep = Sleep(memory)
    sleep.require_awake()
    sleep.begin(1)
    with pytest.raises(InvariantError):
        sleep.require_awake()
    sleep.end(["weights"])
    assert sleep.asleep == {"kv_cache"}
    sleep.end(["kv_cache"])
    sleep.require_awake()
    sleep.begin(2)
    for tags in (None, ["weights", "kv_cache"]):
        with pytest.raises(RequestError, match="Update the weights"):
            sleep.end(tags)
    sleep.end(["weights"])
    with pytest.raises(RequestError, match="Update the weights"):
        sleep.end(["kv_cache"])
    sleep.begin(1)
    assert sleep.lacks_weights, "a lighter sleep brings no weights back"
    sleep.lacks_weights = False
    sleep.end(None)
    assert memory.dropped == [False, True, False]
    first = ["weights", "kv_cache", "ready"]
    assert memory.restored == [*first, "weights", "kv_cache", "weights", "ready"]
    sleep.end(None)
    assert memory.restored.count("ready") == 2, "what is awake is not made ready again"


@pytest.mark.parametrize("level", [0, 3, "1", None])
def test_there_are_two_levels(level):
    sleep = Sleep(memory := Noted())
    with pytest.raises(RequestError, match="level"):
        sleep.begin(level)
    with pytest.raises(RequestError, match="no part"):
        sleep.end(["model"])
    assert (memory.dropped, sleep.asleep) == ([], set())


@pytest.mark.parametrize("level", [1, 3])
def test_a_sleep_that_is_refused_forgets_nothing(level):
    forgotten = []
    scheduler = SimpleNamespace(has_unfinished=False, forget_prefixes=lambda: forgotten.append(1))
    core = EngineCore(SimpleNamespace(steps_in_flight=1), scheduler, None)
    with pytest.raises((RequestError, UnsupportedError)):
        core.upkeep.sleep(level)
    assert not forgotten


def core_with(memory, **scheduler) -> EngineCore:
    facts = {"has_unfinished": False, "num_running": 0, "num_swapped": 0} | scheduler
    settings = SimpleNamespace(steps_in_flight=1)
    return EngineCore(settings, SimpleNamespace(**facts), None, memory=memory)


@pytest.mark.parametrize("held", ["num_running", "num_swapped"])
def test_requests_that_have_begun_keep_an_engine_awake(held):
    core = core_with(memory := Noted(), **{held: 1})
    with pytest.raises(RequestError, match="requests run"):
        core.upkeep.sleep(1)
    assert not memory.dropped


def test_weights_that_no_update_can_bring_back_are_not_dropped():
    core = core_with(memory := Noted(), forget_prefixes=lambda: None)
    with pytest.raises(UnsupportedError, match="built by hand"):
        core.upkeep.sleep(2)
    assert not memory.dropped
    core.upkeep.sleep(1)
    assert memory.dropped == [False]


def test_an_adapter_that_finds_no_place_is_dropped():
    core, dropped = core_with(Noted(), adapters_in_use=set()), []
    core.adapters = SimpleNamespace(place=lambda name, in_use: None, count=1)
    new = SimpleNamespace(name="a", drop=lambda: dropped.append("a"))
    with pytest.raises(RequestError, match="room for 1 adapters"), used_or_dropped(new):
        core.upkeep.use_adapter(new)
    assert dropped == ["a"]


def test_what_was_dropped_in_part_is_lost():
    sleep = Sleep(memory := Noted())
    memory.refuses = True
    with pytest.raises(UnsupportedError):
        sleep.begin(2)
    assert (sleep.asleep, sleep.lacks_weights) == ({"weights", "kv_cache"}, True)


def test_memory_that_stays_is_refused():
    sleep = Sleep(FixedMemory("several ranks"))
    with pytest.raises(UnsupportedError, match="several ranks"):
        sleep.begin(1)
    assert not sleep.asleep


def test_memory_of_a_cpu_is_given_back_at_its_address():
    kv, weights = torch.ones(2**20), torch.ones(2**20)
    strided = torch.ones(2**12, 2**9).t()
    before = [one.data_ptr() for one in (kv, weights)]
    memory = CPUMemory((kv, strided), (weights,))
    memory.drop(weights=False)
    assert kv[2**11 : -(2**11)].eq(0).all()
    assert weights.eq(1).all()
    assert strided.eq(1).all()
    memory.drop(weights=True)
    assert weights[2**11 : -(2**11)].eq(0).all()
    weights.fill_(3)
    assert weights.eq(3).all()
    assert [one.data_ptr() for one in (kv, weights)] == before


def test_what_finds_no_room_goes_on_sleeping():
    sleep = Sleep(memory := Noted())
    sleep.begin(2)
    memory.refuses = True
    with pytest.raises(RequestError, match="no room"):
        sleep.end(["kv_cache"])
    with pytest.raises(WeightUpdateError, match="no room"):
        sleep.begin_update()
    assert (sleep.asleep, sleep.lacks_weights) == ({"weights", "kv_cache"}, True)
    memory.refuses = False
    sleep.begin_update()
    sleep.lacks_weights = False
    sleep.begin_update()
    assert memory.restored == ["weights"], "weights that are there need no room"


class Graphs:
    """Captured steps that note their life beside that of the storages."""

    def __init__(self, events: list[str], *tensors: torch.Tensor) -> None:
        self.events, self.tensors = events, tensors

    def _note(self, event: str) -> None:
        self.events.append(f"{event} {[one.untyped_storage().nbytes() for one in self.tensors]}")

    def release(self) -> None:
        self._note("release")

    def capture_all(self) -> None:
        self._note("capture")


@pytest.fixture
def events(monkeypatch):
    """What is done to a device that is not there."""
    noted: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: noted.append(name))
    return noted


@pytest.fixture
def spoilt(monkeypatch):
    """Memory that comes has any values, as a device's may."""
    resize = torch.UntypedStorage.resize_

    def resize_(self, size):
        resize(self, size)
        self.fill_(7)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_)


@pytest.mark.usefixtures("spoilt")
def test_device_memory_goes_after_the_graphs_and_comes_before_them(events):
    kv, weights = torch.ones(2, 4), torch.ones(6)
    rows = kv[1]
    graphs = Graphs(events, kv, weights)
    memory = DeviceMemory(whole_storages([kv]), whole_storages([weights]), graphs)
    sleep = Sleep(memory)
    sleep.begin(1)
    sleep.begin(2)
    assert events == [
        *("synchronize", "release [32, 24]", "empty_cache"),
        *("synchronize", "release [0, 24]", "empty_cache"),
    ]
    assert [one.untyped_storage().nbytes() for one in (kv, rows, weights)] == [0, 0, 0]
    events.clear()
    sleep.end(["kv_cache"])
    assert events == []
    assert rows.eq(0).all()
    assert kv.eq(0).all()
    sleep.begin_update()
    weights.fill_(3)
    sleep.lacks_weights = False
    kv.fill_(5)
    sleep.end(None)
    assert events == ["capture [32, 24]"]
    assert weights.eq(3).all(), "an update before the wake-up stays"
    assert kv.eq(5).all(), "what is awake is not restored again"


def test_a_device_without_room_is_named_and_may_be_asked_again(events, monkeypatch):
    kv = torch.ones(4)
    graphs = Graphs(events, kv)
    sleep = Sleep(DeviceMemory(whole_storages([kv]), (), graphs))
    sleep.begin(1)

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(graphs, "capture_all", full)
        with pytest.raises(RequestError, match="no room to wake up"):
            sleep.end(None)
    with pytest.raises(InvariantError):
        sleep.require_awake()
    sleep.end(None)
    assert events[-1] == "capture [16]"
    sleep.require_awake()


def test_a_storage_that_holds_anything_else_stays():
    shared, own = torch.ones(8), torch.ones(2, 3)
    halves = own[:1], own[1:]
    assert [size for _, size in whole_storages([shared[:4], *halves])] == [24]
    fixed = torch.frombuffer(bytearray(8), dtype=torch.int32)
    assert whole_storages([fixed]) == ()
