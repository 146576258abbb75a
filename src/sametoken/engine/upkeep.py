"""What is done between an engine's steps: new weights and adapters, memory given back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sametoken.engine.live_adapters import NewAdapter
from sametoken.engine.sleep import DROP_WEIGHTS
from sametoken.engine.weights import NewWeights
from sametoken.errors import RequestError, WeightUpdateError
from sametoken.types.weight_updates import MODEL

if TYPE_CHECKING:
    from sametoken.engine.core import EngineCore


@contextmanager
def used_or_dropped(new: NewWeights | NewAdapter) -> Iterator[None]:
    """A block that uses what was loaded; if it raises, no rank keeps that."""
    try:
        yield
    except BaseException:
        new.drop()
        raise


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Changes what an engine's steps run on, between two of them.

    Attributes:
        engine: whose steps they are.
    """

    engine: EngineCore

    def use_weights(self, new: NewWeights, version: int | None = None) -> int:
        """Write new weights from ``weights.load`` over the old ones, between steps.

        Call it in ``used_or_dropped``.

        Returns:
            The version from now on: ``version``, or the next one. Running requests keep their KV.

        Raises:
            WeightUpdateError: the version does not fit, or no room is left; nothing is changed.
            EngineDeadError: the engine has failed, or a step fails now.
        """
        self.engine.require_alive()
        if self.engine.sleep.lacks_weights and not new.of_target:
            raise WeightUpdateError(
                "a drafter may share weights that were dropped", "update the model first"
            )
        if self.engine.sleep.lacks_weights and new.leaves_buffers:
            raise WeightUpdateError(
                "the update leaves buffers out, and a sleep of level 2 dropped them",
                "send the model's state_dict, or sleep at level 1",
            )
        version = new.version_after(self.engine.scheduler.weight_version, version)
        self.engine.sleep.begin_update()

        def write() -> None:
            new.replacement.write()
            if new.of_target:
                self.engine.scheduler.begin_weights(version)
                self.engine.sleep.lacks_weights &= not new.replacement.pairs
            else:
                self.engine.scheduler.begin_drafter_weights()

        self.engine.at_rest(write)
        return version

    def use_adapter(self, new: NewAdapter) -> None:
        """Give an adapter from ``engine.adapters.load`` a place, between steps.

        Call it in ``used_or_dropped``.

        Raises:
            RequestError: there is no place for it; nothing is changed.
            EngineDeadError: the engine has failed, or a step fails now.
        """
        adapters = self.engine.adapters
        self.engine.require_alive()
        place = adapters.place(new.name, self.engine.scheduler.adapters_in_use)
        if place is None:
            raise RequestError(
                f"there is room for {adapters.count} adapters, and requests or their names hold "
                "all of it",
                "remove one, let its requests end, or start with a larger max_loras",
                param="lora_name",
            )
        self.engine.at_rest(partial(new.write, place))

    def remove_adapter(self, name: str) -> None:
        """No further request may have an adapter; unfinished ones keep it until they end."""
        self.engine.adapters.remove(name)

    @property
    def is_sleeping(self) -> bool:
        """Whether some part sleeps, so that the engine may not step."""
        return bool(self.engine.sleep.asleep)

    def require_sleep(self, level: int) -> None:
        """Refuse a sleep that this engine can never have; errors as in ``sleep``."""
        self.engine.sleep.require_possible(level)
        if level == DROP_WEIGHTS:
            self.engine.weights.require_target(MODEL)

    def sleep(self, level: int) -> None:
        """Give memory back until ``wake_up``; requests that wait go on waiting.

        Args:
            level: 1 gives back KV and prefix cache; 2 the target's weights too.

        Raises:
            RequestError: there is no such level, or requests run.
            UnsupportedError: this engine's memory cannot be given back.
            EngineDeadError: the engine has failed, or a step fails now.
        """
        self.require_sleep(level)
        self.engine.at_rest()
        scheduler = self.engine.scheduler
        if scheduler.num_running or scheduler.num_swapped:
            raise RequestError("requests run, whose KV is needed", "let them end first")
        self.forget_prefixes()
        self.engine.sleep.begin(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End the sleep of "weights" and "kv_cache", or of one of them.

        Raises:
            RequestError: no such part, no room for it, or weights were dropped and not updated.
            EngineDeadError: the engine has failed.
        """
        self.engine.require_alive()
        self.engine.sleep.end(tags)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache in the engine's memory.

        Raises:
            EngineDeadError: the engine has failed.
        """
        self.engine.require_alive()
        self.engine.scheduler.forget_prefixes()
