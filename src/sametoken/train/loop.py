"""The training loop: steps, learning rate and checkpoints."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from sametoken.engine.interrupts import DeferredInterrupts
from sametoken.errors import CheckpointError, ConfigError, NumericalError, in_words
from sametoken.io.files import replacing
from sametoken.ops.out_of_memory import out_of_memory_as
from sametoken.train.compute import enough_memory
from sametoken.train.options import LoopOptions
from sametoken.train.progress import CALMER, Meter, Pace, Report, StepLoss

CHECKPOINT = "checkpoint.pt"
_FORMAT = "sametoken-training-4"
# Steps between reports, each of which waits for the device.
_REPORT_EVERY = 10


class Objective(Protocol):
    """What is trained."""

    @property
    def network(self) -> nn.Module:
        """Its parameters are trained, its buffers kept."""
        ...

    def loss(self, step: int) -> StepLoss:
        """The loss of a step's batch, which is a function of the step alone."""
        ...


def run_loop(
    objective: Objective,
    options: LoopOptions,
    output: Path,
    report: Callable[[Report], None],
    *,
    identity: dict[str, Any],
    began: float,
) -> Report:
    """Train to the end, from the start or from a checkpoint.

    Ctrl-C ends the training after the step under way, with a checkpoint; a second one at once.

    Args:
        objective: what to train.
        options: steps, learning rate and batches.
        output: directory of the checkpoint.
        report: receives the progress every few steps.
        identity: JSON values that a checkpoint must hold to be resumed.
        began: ``time.monotonic`` from which ``max_seconds`` counts.

    Returns:
        The last report.

    Raises:
        ConfigError: the checkpoint is of another training, or has no room, or cannot be written;
            or a step does not fit the device.
        CheckpointError: the checkpoint cannot be read.
        NumericalError: the loss or a weight is not finite.
        KeyboardInterrupt: Ctrl-C.
    """
    return _Loop(objective, options, output, identity).run(report, began)


class _Loop:
    def __init__(
        self, objective: Objective, options: LoopOptions, output: Path, identity: dict[str, Any]
    ) -> None:
        self._objective = objective
        self._options = options
        self._path = output / CHECKPOINT
        self._identity = identity | _fixed(options)
        self._parameters = [p for p in objective.network.parameters() if p.requires_grad]
        self._optimizer = _optimizer(objective.network, options)
        self._step, self._steps = 0, options.steps
        self._is_whole = True
        self._last = Report(0, self._steps, 0.0, 0.0, (), 1.0, 0.0)
        self._meter, self._pace = Meter(), Pace(options)
        self._require_room()
        if options.resume:
            self._restore()

    def run(self, report: Callable[[Report], None], began: float) -> Report:
        try:
            with DeferredInterrupts(self._cut) as interrupts:
                self._take_steps(report, began, interrupts)
                self._save()
        except KeyboardInterrupt:
            if self._is_whole:
                self._save()
            raise
        return self._last

    def _cut(self, cause: BaseException) -> None:
        """A step ends in its middle, between old weights and new ones."""
        self._is_whole = False

    def _take_steps(
        self, report: Callable[[Report], None], began: float, interrupts: DeferredInterrupts
    ) -> None:
        meter = self._meter
        self._plan(began)
        while self._step < self._steps:
            interrupts.check()
            meter.add(interrupts.cuttable(self._take_step))
            self._step += 1
            self._plan(began)
            late = self._pace.is_late(time.monotonic() - began)
            if self._step % _REPORT_EVERY == 0 or self._step == self._steps or late:
                rate = self._optimizer.param_groups[0]["lr"]
                self._last = meter.report(self._step, self._steps, rate, began)
                report(self._last)
            if late:
                break
            every = self._options.checkpoint_every
            if every and self._step % every == 0:
                self._save()

    def _plan(self, began: float) -> None:
        """Set the number of steps to what fits the time, once that can be told."""
        if self._pace.wants(self._step):
            self._meter.wait()
            self._steps = self._pace.planned(self._step, time.monotonic() - began, self._steps)

    def _take_step(self) -> StepLoss:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._step, self._steps, self._options)
        self._optimizer.zero_grad(set_to_none=True)
        with out_of_memory_as(
            ConfigError,
            f"a step of batch_tokens={self._options.batch_tokens} does not fit the device",
            "lower batch_tokens, or max_length where one sequence is longer",
        ):
            found = self._objective.loss(self._step)
            found.loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self._parameters, self._options.clip_norm)
            self._optimizer.step()
        return found

    def _require_room(self) -> None:
        """Refuse an output that cannot take the checkpoint, which the end of a training writes."""
        weights = sum(tensor.nbytes for tensor in self._objective.network.state_dict().values())
        needed = weights + 2 * sum(parameter.nbytes for parameter in self._parameters)
        # A later one is written beside the one before; a resumed training's is there already.
        is_replaced = 0 < self._options.checkpoint_every <= self._steps
        copies = 2 if is_replaced and not self._options.resume else 1
        free = shutil.disk_usage(self._path.parent).free
        if free < copies * needed:
            beside = ", with a later one beside it," if copies > 1 else ""
            raise ConfigError(
                f"{self._path.parent} has room for {free} bytes, and a checkpoint{beside} takes "
                f"{copies * needed}",
                "make room or choose another output",
            )
        try:
            # A hole takes no room, and meets the limits of the process and of the file system.
            with tempfile.TemporaryFile(dir=self._path.parent) as file:
                file.truncate(needed)
        except OSError as error:
            raise ConfigError(
                f"{self._path} takes {needed} bytes, which cannot be written ({in_words(error)})",
                "raise the limit of files (ulimit -f) or choose another output",
            ) from error

    def _save(self) -> None:
        # The checkpoint before is one to go on from.
        if not all(bool(one.isfinite().all()) for one in self._parameters):
            raise NumericalError(f"weights are not finite by step {self._step}", CALMER)
        state = {
            "format": _FORMAT,
            "identity": self._identity,
            "step": self._step,
            "steps": self._steps,
            "report": asdict(self._last),
            "meter": self._meter.sums(),
            "network": self._objective.network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        try:
            with replacing(self._path) as unfinished:
                torch.save(state, unfinished)
        except (OSError, RuntimeError) as error:
            raise not_written(self._path, error) from error

    def _restore(self) -> None:
        with _readable(self._path):
            state = _read_checkpoint(self._path)
            _require_same(self._path, state, self._identity, self._options)
            self._take(state)

    def _take(self, state: dict[str, Any]) -> None:
        step, steps = state["step"], state["steps"]
        if type(step) is not int or type(steps) is not int or not 0 <= step <= steps:
            raise ValueError(f"step {step!r} of {steps!r}")
        self._step, self._steps = step, steps
        # No step follows a training that was complete.
        self._last = Report(**state["report"])
        self._meter = Meter.of(state["meter"], self._parameters[0].device)
        self._objective.network.load_state_dict(state["network"])
        moments = state["optimizer"]["state"]
        _require_moments(moments, self._optimizer, step)
        # Settings of the groups come from the options of this run.
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": moments})
        torch.set_rng_state(state["rng"])
        if torch.cuda.is_available() and state["cuda_rng"]:
            torch.cuda.set_rng_state_all(state["cuda_rng"])


def not_written(path: Path, error: Exception) -> ConfigError:
    """The error of a file of the output directory that could not be written."""
    return ConfigError(
        f"{path} cannot be written ({in_words(error)})", "make room or choose another output"
    )


def require_same_training(output: Path, options: LoopOptions, settings: dict[str, Any]) -> None:
    """Refuse to resume a training of other settings, before text and states are prepared for it.

    Args:
        output: directory of the checkpoint.
        options: nothing is refused unless they resume.
        settings: the part of ``run_loop``'s identity that is known so far.

    Raises:
        ConfigError, CheckpointError: as ``run_loop``.
    """
    path = output / CHECKPOINT
    if options.resume:
        with _readable(path):
            state = _read_checkpoint(path, mmap=True)
            _require_same(path, state, settings | _fixed(options), options)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        with enough_memory():
            yield
    except ConfigError:
        raise
    except Exception as error:
        # A foreign file can fail in zip, in pickle or in the optimizer, with any error.
        raise CheckpointError(
            f"{path} cannot be read ({error!r})", "remove it, and train again without resume"
        ) from error


def _require_same(
    path: Path, state: dict[str, Any], identity: dict[str, Any], options: LoopOptions
) -> None:
    found, theirs = state["format"], state["identity"]
    differing = sorted(key for key, value in identity.items() if theirs.get(key) != value)
    if options.max_seconds is None and state["steps"] != options.steps:
        differing.append("steps")
    if found != _FORMAT or differing:
        raise ConfigError(
            f"{path} is of a training with other settings: {differing or found}",
            "give the same settings, or choose another output",
        )


def _read_checkpoint(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        # torch stores members uncompressed. A compressed one could unpack to any size.
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("it is packed")
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    if not isinstance(state, dict):
        raise TypeError(f"it holds a {type(state).__name__}")
    return state


def _require_moments(moments: dict[int, Any], optimizer: torch.optim.Optimizer, step: int) -> None:
    """Refuse moments of other parameters: the optimizer would load them and fail in its step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if step and not moments:
        raise ValueError("it holds no state of the optimizer")
    for index, moment in moments.items():
        shape = parameters[index].shape
        if moment["step"].shape or any(moment[n].shape != shape for n in ("exp_avg", "exp_avg_sq")):
            raise ValueError(f"the optimizer's state of parameter {index} has other shapes")


def learning_rate(step: int, steps: int, options: LoopOptions) -> float:
    """The learning rate of a step, counted from 0: a linear rise, then half a cosine to 0."""
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    share = (step - options.warmup_steps) / max(steps - options.warmup_steps, 1)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


def _optimizer(network: nn.Module, options: LoopOptions) -> torch.optim.AdamW:
    trained = [p for p in network.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


def _fixed(options: LoopOptions) -> dict[str, Any]:
    """Options that a resumed training must share with its checkpoint."""
    free = ("steps", "max_seconds", "checkpoint_every", "resume", "device")
    return {name: value for name, value in asdict(options).items() if name not in free}
