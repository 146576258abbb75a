"""Kept recurrent states: at which positions, in which device memory, and for which prefix.

A prefix leaves KV in its blocks and, in a model with recurrent layers, a state at its end. States
are kept at ends of blocks, under the block's key, so a request can start there
(docs/decisions/0024-kept-recurrent-states.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import lcm

from sametoken.errors import InvariantError
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.plan_draft import Turn
from sametoken.scheduler.request_state import RequestState
from sametoken.types.plan import StateCopy

#: Blocks between kept states of an answer, each of which costs a copy; and the fewest blocks of
#: a prompt past its last kept state that are worth a short step more, which ends at the next one.
INTERVAL = 8


class StatePool:
    """States are free, held for a request that runs, or kept under a block key.

    Once no state is free, kept ones are evicted, least recently used first.
    """

    def __init__(self, num_states: int) -> None:
        self._num_states = num_states
        self._free = list(range(num_states - 1, -1, -1))
        self._held: set[int] = set()
        # In order of last use.
        self._state_of: OrderedDict[bytes, int] = OrderedDict()

    def longest(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys up to the last one that a state is kept under."""
        kept = (count for count in range(len(keys), 0, -1) if keys[count - 1] in self._state_of)
        return next(kept, 0)

    def use(self, key: bytes) -> int:
        """The state kept under a key, which becomes the most recently used."""
        state = self._state_of[key] = self._state_of.pop(key)
        return state

    def keep(self, key: bytes) -> int | None:
        """A state to keep under a key; None if there is one already, or none to be had."""
        if key in self._state_of:
            self.use(key)
            return None
        state = self._take()
        if state is not None:
            self._state_of[key] = state
        return state

    def hold(self) -> int | None:
        """A state without a key; None if such states are half of all."""
        if 2 * len(self._held) >= self._num_states:
            return None
        state = self._take()
        if state is not None:
            self._held.add(state)
        return state

    def give(self, key: bytes, state: int) -> None:
        """Keep a held state under a key, unless another has it."""
        if key in self._state_of:
            self.use(key)
            self.free(state)
        else:
            self._held.remove(state)
            self._state_of[key] = state

    def free(self, state: int) -> None:
        """Give a held state back."""
        self._held.remove(state)
        self._free.append(state)

    def forget(self, key: bytes) -> None:
        """Remove the state kept under a key, if any."""
        state = self._state_of.pop(key, None)
        if state is not None:
            self._free.append(state)

    def check_integrity(self, held: Sequence[int]) -> None:
        """Check the pool against the states that requests hold.

        Raises:
            InvariantError: a state leaked or is owned twice.
        """
        if sorted(held) != sorted(self._held):
            raise InvariantError(f"requests hold the states {held}, not {sorted(self._held)}")
        if sorted([*self._free, *held, *self._state_of.values()]) != [*range(self._num_states)]:
            raise InvariantError("a state is not free, held or kept exactly once")

    def _take(self) -> int | None:
        if not self._free and self._state_of:
            self.forget(next(iter(self._state_of)))
        return self._free.pop() if self._free else None


class KeptStates:
    """Chooses what is kept of prompts and answers; does nothing without recurrent layers.

    Of a prompt: where it parts from an earlier one, and its last block with a key, unless few
    blocks are new. Of an answer: every ``INTERVAL`` blocks while it grows, of which the last
    survives its end.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.pool = StatePool(limits.num_kept_states)
        self._needed = limits.num_kept_states > 0
        self._keeps_answers = limits.cache_emitted_blocks
        self._block_size = limits.block_size
        self._interval = INTERVAL * limits.block_size

    def usable(self, keys: Sequence[bytes], num_cached: int) -> int:
        """Of the first ``num_cached`` blocks, which are cached, those a request can start after."""
        return self.pool.longest(keys[:num_cached]) if self._needed else num_cached

    def chunk_ends(self, request: RequestState, start: int, num_cached: int) -> tuple[int, ...]:
        """Positions at which a chunk of the prompt must end, for its state to be kept.

        Args:
            request: the request.
            start: the position that it starts from.
            num_cached: its leading blocks that are cached; it parts from an earlier one there.
        """
        if not self._needed:
            return ()
        # A chunk in the fast form ends at multiples alone.
        step = lcm(self._block_size, request.fast_form.multiple if request.fast_end else 1)
        shared, ends = num_cached * self._block_size // step * step, []
        if shared > start and (not start or shared - start >= self._interval):
            ends.append(shared)
        end = len(request.block_keys) * self._block_size // step * step
        last, free = ends[-1] if ends else start, (request.prompt_len, request.fast_end)
        if end > last and (end in free or end - last >= self._interval):
            ends.append(end)
        return tuple(ends)

    def restored(self, request: RequestState) -> list[StateCopy]:
        """The copy that an admitted request starts from, if it starts from cached blocks."""
        if not (self._needed and request.num_cached):
            return []
        state = self.pool.use(self._key(request, request.num_cached))
        return [StateCopy(request.held_slot, request.num_cached, state)]

    def kept_after(self, turns: Sequence[Turn]) -> list[StateCopy]:
        """The copies to make after the turns of a step, which is about to be launched.

        No request of the same plan can be given these states: all are admitted by now.
        """
        copies: list[StateCopy] = []
        for turn in turns if self._needed else ():
            copies += self._of_chunk(turn) if turn.request.prefilling else self._of_window(turn)
        return copies

    def keep_answer(self, request: RequestState, keys: Sequence[bytes]) -> None:
        """Keep the last held state of a request that ends, as far as its tokens are kept.

        Args:
            request: the request.
            keys: keys of its kept blocks, emitted ones included.
        """
        request.block_keys = tuple(keys)
        end = min(request.num_final, len(keys) * self._block_size)
        position = max((held for held in request.held_states if held <= end), default=None)
        if position is not None:
            self.pool.give(self._key(request, position), request.held_states.pop(position))

    def release(self, request: RequestState) -> None:
        """Free the states that a request holds."""
        for state in request.held_states.values():
            self.pool.free(state)
        request.held_states.clear()

    def check_integrity(self, admitted: Sequence[RequestState]) -> None:
        """Check the pool against the states that admitted requests hold, as the pool does."""
        held = [state for request in admitted for state in request.held_states.values()]
        self.pool.check_integrity(held)

    def forget(self, request: RequestState) -> None:
        """Remove the states of all prefixes of a request."""
        for key in request.block_keys:
            self.pool.forget(key)

    def _of_chunk(self, turn: Turn) -> list[StateCopy]:
        request, end = turn.request, turn.request.position + turn.num_query
        if end not in request.chunk_ends:
            return []
        state = self.pool.keep(self._key(request, end))
        return [] if state is None else [StateCopy(request.held_slot, end, state)]

    def _of_window(self, turn: Turn) -> list[StateCopy]:
        """Copies at the positions that a window may pass; exactly one window passes each.

        A window of n tokens that has a drafts accepted passes positions n .. n + a. Those in
        flight end below ``bound.hi``, so a position from there on is held before any passes it.
        """
        request, bound = turn.request, turn.request.bound
        keeps = self._keeps_answers and request.request.use_prefix_cache
        if not keeps or request.fast_end:
            return []
        self._free_passed(request)
        first, last = -(-bound.hi // self._interval) * self._interval, bound.hi + turn.draft_limit
        for position in range(first, last + 1, self._interval):
            if position not in request.held_states:
                state = self.pool.hold()
                if state is not None:
                    request.held_states[position] = state
        return [
            StateCopy(request.held_slot, position, state)
            for position, state in request.held_states.items()
            if bound.lo <= position <= last
        ]

    def _free_passed(self, request: RequestState) -> None:
        """Free all held states at final positions but the last of them."""
        final = [position for position in request.held_states if position <= request.num_final]
        for position in sorted(final)[:-1]:
            self.pool.free(request.held_states.pop(position))

    def _key(self, request: RequestState, position: int) -> bytes:
        return request.block_keys[position // self._block_size - 1]
