"""The thread that reads and receives weights: one command at a time, all or nothing."""

from __future__ import annotations

import queue

import pytest
import torch

from sametoken.engine.live_adapters import NoLiveAdapters
from sametoken.engine.weights import FixedWeights, NewWeights
from sametoken.errors import CheckpointError, SametokenError, UnsupportedError, WeightUpdateError
from sametoken.serving.messages import (
    ChangeWeights,
    FinishUpdate,
    JoinedTensors,
    JoinTrainer,
    NameWeights,
    Order,
    SharedTensors,
    StartUpdate,
    TakeWeights,
    TensorForm,
)
from sametoken.serving.weight_updates import WeightUpdates
from sametoken.types.weight_updates import MemoryHandle

NO_ADAPTERS = NoLiveAdapters()
CPU = torch.device("cpu")
ONE, TWO = TensorForm("one", "float32", (2, 3)), TensorForm("two", "bfloat16", ())


class Group:
    """Sends bytes 0, 1, 2 and so on, a tensor at a time, until it is lost."""

    device = torch.device("cpu")
    pieces = staticmethod(lambda sizes, _: [range(i, i + 1) for i in range(len(sizes))])

    def __init__(self, at) -> None:
        self.left = at

    def broadcast(self, tensor) -> None:
        if not self.left:
            raise WeightUpdateError("the group is not whole")
        self.left -= 1
        torch.arange(tensor.numel(), out=tensor)


class Weights:
    """Takes anything, and keeps what came."""

    def __init__(self) -> None:
        self.loaded: list = []

    def require_target(self, target: str) -> int:
        return 64

    def load(self, source, target: str) -> NewWeights:
        names = {name: torch.cat(list(source.chunks(name))) for name in source.names()}
        self.loaded.append((target, names))
        return NewWeights.same()


@pytest.fixture
def scene(monkeypatch):
    monkeypatch.setattr("sametoken.serving.weight_updates.TrainerGroup", Group)
    weights, inbox = Weights(), queue.SimpleQueue()
    updates = WeightUpdates(weights, NO_ADAPTERS, CPU, inbox.put)

    def carry_out(command):
        order = Order(0, command)
        updates.begin(order)
        done = inbox.get(timeout=10)
        assert done.order is order
        updates.used()
        return done.result

    return weights, carry_out


def test_tensors_in_several_parts_make_one_update(scene):
    weights, carry_out = scene
    assert carry_out(JoinTrainer(9)) is None
    assert carry_out(StartUpdate("drafter")) is None
    assert carry_out(TakeWeights((ONE,))) is None
    assert carry_out(TakeWeights((TWO,))) is None
    assert weights.loaded == []
    assert isinstance(carry_out(FinishUpdate(None)), NewWeights)
    ((target, tensors),) = weights.loaded
    assert target == "drafter"
    sent = torch.arange(24, dtype=torch.uint8)
    assert torch.equal(tensors["one"], sent.view(torch.float32).view(2, 3))
    assert tensors["two"].dtype == torch.bfloat16
    assert isinstance(carry_out(FinishUpdate(None)), WeightUpdateError)


def test_tensors_of_one_piece_are_cut_apart_whatever_their_alignment(scene, monkeypatch):
    weights, carry_out = scene
    told = []
    whole = lambda sizes, most: told.append(most) or [range(len(sizes))]  # noqa: E731
    monkeypatch.setattr(Group, "pieces", staticmethod(whole))
    carry_out(JoinTrainer(1))
    carry_out(StartUpdate("model"))
    odd = TensorForm("odd", "bfloat16", (3,))
    assert carry_out(TakeWeights(JoinedTensors((odd, ONE, TWO), 100))) is None
    assert told == [100]
    assert isinstance(carry_out(FinishUpdate(None)), NewWeights)
    tensors = weights.loaded[0][1]
    sent = torch.arange(32, dtype=torch.uint8)
    assert torch.equal(tensors["odd"], sent[:6].view(torch.bfloat16))
    assert torch.equal(tensors["one"], sent[6:30].clone().view(torch.float32).view(2, 3))
    assert torch.equal(tensors["two"], sent[30:].view(torch.bfloat16))


def test_a_trainer_s_memory_is_read_before_the_answer(monkeypatch):
    """On a GPU copies wait behind steps in flight, and after the answer the trainer fills it."""
    events = []

    class Stream:
        def synchronize(self) -> None:
            events.append("read")

    def room(num_bytes, first, device):
        events.append("begun")
        return torch.empty(num_bytes, dtype=torch.uint8)

    module = "sametoken.serving.weight_updates"
    monkeypatch.setattr(f"{module}.open_shared", lambda *_: torch.zeros(24, dtype=torch.uint8))
    monkeypatch.setattr(f"{module}._room", room)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: Stream())
    answered = queue.SimpleQueue()

    def post(done) -> None:
        assert not isinstance(done.result, SametokenError), done.result
        events.append("answered")
        answered.put(done)

    updates = WeightUpdates(Weights(), NO_ADAPTERS, torch.device("cuda"), post)
    handle = {"gpu": MemoryHandle("uint8", (24,), (1,), 0, b"", 24, 0, b"", 0, b"", False)}
    shared = SharedTensors((ONE,), (handle,), (24,))
    for command in (StartUpdate("model"), TakeWeights(shared), FinishUpdate(None)):
        events.clear()
        updates.begin(Order(0, command))
        answered.get(timeout=10)
        begun = ["begun"] if isinstance(command, TakeWeights) else []
        assert events == [*begun, "read", "answered"]
        updates.used()


def test_a_new_update_drops_what_was_sent(scene):
    weights, carry_out = scene
    carry_out(JoinTrainer(9))
    for name in ("half", "whole"):
        carry_out(StartUpdate("model"))
        carry_out(TakeWeights((TensorForm(name, "float32", (1,)),)))
    carry_out(FinishUpdate(None))
    assert list(weights.loaded[0][1]) == ["whole"]


def test_a_trainer_that_is_lost_ends_update_and_group(scene):
    weights, carry_out = scene
    carry_out(JoinTrainer(1))
    carry_out(StartUpdate("model"))
    assert "not whole" in str(carry_out(TakeWeights((ONE, TWO))))
    assert "no trainer" in str(carry_out(TakeWeights((ONE,))))
    assert "no update" in str(carry_out(FinishUpdate(None)))
    assert weights.loaded == []


@pytest.mark.parametrize(
    ("forms", "told"),
    [
        ((ONE, ONE), "sent twice"),
        ((TensorForm("a", "complex64", (1,)),), "dtype"),
        ((TensorForm("a", "__name__", (1,)),), "dtype"),
        ((TensorForm("a", "float32", (17,)),), "may have"),
        ((TensorForm("a", "float32", (2**31, 2**31)),), "may have"),
    ],
)
def test_forms_are_checked_before_anything_is_received(scene, forms, told):
    _, carry_out = scene
    carry_out(JoinTrainer(0))
    carry_out(StartUpdate("model"))
    assert told in str(carry_out(TakeWeights(forms)))


def test_the_parts_of_an_update_share_its_bytes(scene):
    _, carry_out = scene
    carry_out(JoinTrainer(9))
    carry_out(StartUpdate("model"))
    assert carry_out(TakeWeights((TensorForm("a", "float32", (8,)),))) is None
    assert "may have" in str(carry_out(TakeWeights((TensorForm("b", "float32", (9,)),))))


def test_directories(scene, tmp_path):
    _, carry_out = scene
    assert "no update" in str(carry_out(TakeWeights(str(tmp_path))))
    carry_out(StartUpdate("model"))
    assert carry_out(TakeWeights(str(tmp_path))) is None
    assert "two directories" in str(carry_out(TakeWeights(str(tmp_path))))
    assert isinstance(carry_out(FinishUpdate(None)), CheckpointError)
    assert isinstance(carry_out(ChangeWeights("/nowhere", None, "model")), CheckpointError)


def test_another_version_replaces_nothing(scene):
    _, carry_out = scene
    named = carry_out(NameWeights(7))
    assert (named.replacement.pairs, named.version_after(3, 7)) == ((), 7)


def test_fixed_weights_refuse_at_the_start():
    inbox = queue.SimpleQueue()
    WeightUpdates(FixedWeights("extraction"), NO_ADAPTERS, CPU, inbox.put).begin(
        Order(0, StartUpdate("model"))
    )
    assert isinstance(inbox.get(timeout=10).result, UnsupportedError)


def test_the_next_command_waits_until_weights_are_used():
    inbox = queue.SimpleQueue()
    updates = WeightUpdates(Weights(), NO_ADAPTERS, CPU, inbox.put)
    for ticket in range(2):
        updates.begin(Order(ticket, NameWeights(7)))
    assert inbox.get(timeout=10).order.ticket == 0
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.1)
    updates.used()
    done = inbox.get(timeout=10)
    assert done.order.ticket == 1
    assert not isinstance(done.result, SametokenError)
