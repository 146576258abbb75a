"""Commands about weights and adapters in the engine process: carried out beside the steps."""

from __future__ import annotations

import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sametoken.distributed.shared_memory import open_shared
from sametoken.distributed.trainer_group import TrainerGroup
from sametoken.engine.live_adapters import LiveAdapters, NewAdapter, adapter_errors
from sametoken.engine.weights import LEAVE_ROOM, NewWeights, Weights
from sametoken.errors import SametokenError, WeightUpdateError, shown
from sametoken.models.load.adapter import SENT, AdapterConfig, StoredAdapter, adapter_config
from sametoken.models.load.sent import SentTensors, source_of
from sametoken.models.load.sources import TensorSource
from sametoken.ops.out_of_memory import out_of_memory_as
from sametoken.serving.messages import (
    ChangeWeights,
    ComingAdapter,
    Command,
    FinishAdapter,
    FinishUpdate,
    JoinedTensors,
    JoinTrainer,
    LoadAdapter,
    NameWeights,
    Order,
    SharedTensors,
    StartUpdate,
    TakeWeights,
    TensorForm,
)
from sametoken.types.units import in_units
from sametoken.types.weight_updates import MemoryHandle

#: Dtypes that a trainer may send: those that weights are loaded from, and those of quantized ones.
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "int64", "int32", "int8", "uint8"),
)


@dataclass(frozen=True, slots=True)
class Done:
    """Within the engine process: what a command came to; weights are still to be written."""

    order: Order
    result: NewWeights | NewAdapter | SametokenError | None


class WeightUpdates:
    """Carries out commands about weights one at a time, in a thread.

    The next one begins after ``used``, so that one set of new weights is held at most.

    Args:
        weights, adapters: the engine's.
        device: of the engine.
        post: takes a ``Done``, from any thread.
    """

    def __init__(
        self,
        weights: Weights,
        adapters: LiveAdapters,
        device: torch.device,
        post: Callable[[Any], None],
    ) -> None:
        self._weights, self._adapters = weights, adapters
        self._device = device
        self._post = post
        self._waiting: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._used = threading.Semaphore(0)
        self._group: TrainerGroup | None = None
        self._update: _Update | None = None
        threading.Thread(target=self._work, name="weights", daemon=True).start()

    def begin(self, order: Order) -> None:
        """Carry out a command about weights, after those before it."""
        self._waiting.put(order)

    def used(self) -> None:
        """The ``Done`` has been handled."""
        self._used.release()

    def _work(self) -> None:
        while True:
            self._finish(self._waiting.get())

    def _finish(self, order: Order) -> None:
        # A function of its own, so that no local of the thread keeps weights.
        self._post(Done(order, self._result(order.command)))
        self._used.acquire()

    def _result(self, command: Command) -> NewWeights | NewAdapter | SametokenError | None:
        try:
            result = self._carry_out(command)
            self._wait_for_reads()
            return result
        except SametokenError as error:
            # A copy, without the frames, which hold what was sent.
            kind, given = error.__reduce__()
            return kind(*given)
        except Exception as error:
            return WeightUpdateError(f"the new weights cannot be loaded: {error!r}", "see the log")

    def _carry_out(self, command: Command) -> NewWeights | NewAdapter | None:
        if isinstance(command, ChangeWeights):
            return self._weights.load(source_of(Path(command.path)), command.target)
        if isinstance(command, NameWeights):
            return NewWeights.same()
        if isinstance(command, LoadAdapter):
            given = command.given
            return self._adapters.load(
                command.name, given if isinstance(given, str) else given.stored()
            )
        if isinstance(command, FinishUpdate):
            update = self._ended(None)
            return self._weights.load(update.source(), update.target)
        if isinstance(command, FinishAdapter):
            update = self._ended(command.name)
            assert update.config is not None
            stored = StoredAdapter(SENT, update.config, update.source())
            return self._adapters.load(command.name, stored)
        if isinstance(command, JoinTrainer):
            self._group = None
            self._group = TrainerGroup(command.at)
        elif isinstance(command, StartUpdate):
            # A trainer that was started again has nothing to end the one before with.
            self._update = None
            self._update = self._started(command.target)
        elif isinstance(command, TakeWeights):
            self._take(command.weights)
        return None

    def _started(self, target: str | ComingAdapter) -> _Update:
        if isinstance(target, str):
            return _Update(target, self._weights.require_target(target))
        most_bytes = self._adapters.require_room()
        with adapter_errors():
            return _Update(target.name, most_bytes, adapter_config(target.config))

    def _ended(self, adapter: str | None) -> _Update:
        """The update that has begun, if it is that of the adapter, or of weights; it ends."""
        update = self._begun()
        if adapter != (None if update.config is None else update.target):
            raise WeightUpdateError(
                f"the update that has begun is of {shown(update.target)}",
                "finish it, by the request of its kind, or start another one",
            )
        self._update = None
        return update

    def _wait_for_reads(self) -> None:
        """Wait for the copies that were enqueued, which steps in flight come before.

        Once a command is answered, the trainer may change the memory that they read.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _take(self, weights: str | tuple[TensorForm, ...] | JoinedTensors | SharedTensors) -> None:
        if isinstance(weights, str):
            self._begun().take_directory(Path(weights))
        elif isinstance(weights, SharedTensors):
            update, self._update = self._begun(), None
            update.open(weights, self._device)
            self._update = update
        elif isinstance(weights, JoinedTensors):
            self._receive(weights.forms, weights.packed_bytes)
        else:
            self._receive(weights, None)

    def _receive(self, forms: tuple[TensorForm, ...], packed_bytes: int | None) -> None:
        """Receive tensors; after a failure the group is left, as its ranks may be out of step."""
        group, self._group = self._group, None
        if group is None:
            raise WeightUpdateError(
                "no trainer has been joined", "send /init_weight_transfer_engine first"
            )
        update, self._update = self._begun(), None
        update.receive(forms, group, packed_bytes)
        self._group, self._update = group, update

    def _begun(self) -> _Update:
        if self._update is None:
            raise WeightUpdateError(
                "no update has begun, or it has failed", "send /start_weight_update first"
            )
        return self._update


@dataclass(slots=True)
class _Update:
    """What a trainer has sent of one update.

    Attributes:
        target: "model" or "drafter", or the name of an adapter.
        most_bytes: of all its tensors.
        config: of an adapter; None: these are weights.
        directory: with all of them, if they come so.
        tensors: that were received, or opened.
        num_bytes: of them.
        buffer: of the trainer's, and its handles: opened once, as it is counted once.
    """

    target: str
    most_bytes: int
    config: AdapterConfig | None = None
    directory: Path | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    num_bytes: int = 0
    buffer: tuple[Mapping[str, MemoryHandle], Tensor] | None = None

    def take_directory(self, path: Path) -> None:
        """Note a directory.

        Raises:
            WeightUpdateError: there is one already, or it would be an adapter's.
        """
        if self.config is not None:
            raise WeightUpdateError(
                "an update of an adapter has a directory", "load it by /v1/load_lora_adapter"
            )
        if self.directory is not None:
            raise WeightUpdateError(
                "one update has two directories", "put all tensors of the checkpoint into one"
            )
        self.directory = path

    def receive(
        self, forms: tuple[TensorForm, ...], group: TrainerGroup, packed_bytes: int | None
    ) -> None:
        """Receive tensors in this order, joined as ``TrainerGroup.pieces`` says.

        Raises:
            WeightUpdateError: one of them comes twice, has an unknown dtype, or there is no memory
                for them; or the trainer is gone.
        """
        sizes = self._sizes(forms)
        for piece in group.pieces(sizes, packed_bytes):
            own = slice(piece.start, piece.stop)
            buffer = _room(sum(sizes[own]), forms[piece.start], group.device)
            group.broadcast(buffer)
            self._take(forms[own], torch.split(buffer, sizes[own]))

    def open(self, shared: SharedTensors, device: torch.device) -> None:
        """Open tensors of a trainer on this machine; those of a buffer are copied from it.

        Raises:
            WeightUpdateError: as for ``receive``, or a tensor is on another device, or of another
                shape or dtype than it should be.
        """
        sizes = self._sizes(shared.forms)
        if not shared.sizes:
            for form, handles in zip(shared.forms, shared.handles, strict=True):
                _require_form(form, handles)
                self.tensors[form.name] = open_shared(handles, device)
            return
        whole = self._opened_buffer(shared.handles[0], device)
        if list(shared.sizes) != sizes or whole.dim() != 1 or len(whole) < sum(sizes):
            raise WeightUpdateError(
                f"a buffer of {in_units(whole.nbytes)} does not hold the tensors one after another",
                "send tensor_sizes in bytes, in the order of names",
            )
        # The trainer fills it again.
        copy = _room(sum(sizes), shared.forms[0], device).copy_(whole[: sum(sizes)])
        self._take(shared.forms, torch.split(copy, sizes))

    def source(self) -> TensorSource:
        """All tensors of the update."""
        if self.directory is not None:
            return source_of(self.directory)
        return SentTensors(self.tensors.items())

    def _sizes(self, forms: tuple[TensorForm, ...]) -> list[int]:
        """Bytes of each tensor that comes, if all of them may come; a trainer may send one by one.

        After a refusal the update has ended.
        """
        sizes = [math.prod(form.shape) * _dtype(form).itemsize for form in forms]
        self.num_bytes += sum(sizes)
        if self.num_bytes > self.most_bytes:
            raise WeightUpdateError(
                f"the update has {in_units(self.num_bytes)} and may have "
                f"{in_units(self.most_bytes)}",
                "send each of its tensors once",
            )
        for name, count in Counter(form.name for form in forms).items():
            if count > 1 or name in self.tensors:
                raise WeightUpdateError(
                    f"the tensor {shown(name)} is sent twice", "send each tensor once"
                )
        return sizes

    def _take(self, forms: tuple[TensorForm, ...], parts: Sequence[Tensor]) -> None:
        """Take tensors whose bytes are parts of a buffer of this process."""
        for form, part in zip(forms, parts, strict=True):
            dtype = _dtype(form)
            # Within a buffer, a tensor of large items may follow one of small ones.
            aligned = part.storage_offset() % dtype.itemsize == 0
            whole = part if aligned else part.clone()
            self.tensors[form.name] = whole.view(dtype).view(form.shape)

    def _opened_buffer(self, handles: Mapping[str, MemoryHandle], device: torch.device) -> Tensor:
        if self.buffer is None or self.buffer[0] != handles:
            if any(one.dtype != "uint8" for one in handles.values()):
                raise WeightUpdateError("a buffer holds no bytes", "share one of torch.uint8")
            self.buffer = handles, open_shared(handles, device)
        return self.buffer[1]


def _dtype(form: TensorForm) -> torch.dtype:
    if form.dtype not in _DTYPES:
        raise WeightUpdateError(
            f"the tensor {shown(form.name)} is of dtype {shown(form.dtype)}",
            f"use one of {', '.join(_DTYPES)}",
        )
    dtype: torch.dtype = getattr(torch, form.dtype)
    return dtype


def _require_form(form: TensorForm, handles: Mapping[str, MemoryHandle]) -> None:
    for one in handles.values():
        if (one.dtype, one.shape) != (form.dtype, form.shape):
            raise WeightUpdateError(
                f"the tensor {shown(form.name)} is {one.dtype} of shape {list(one.shape)} in the "
                f"trainer's memory, and {form.dtype} of {list(form.shape)} as it was sent",
                "send the dtype and shape that it has",
            )


def _room(num_bytes: int, first: TensorForm, device: torch.device) -> Tensor:
    what = f"{in_units(num_bytes)}, {shown(first.name)} and what comes with it"
    with out_of_memory_as(WeightUpdateError, f"no memory for {what}", LEAVE_ROOM):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
