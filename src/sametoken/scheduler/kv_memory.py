"""KV blocks for requests: how many a turn needs, and which come from the prefix cache."""

from __future__ import annotations

from sametoken.errors import InvariantError
from sametoken.scheduler.block_pool import BlockPool, PrefixCache, block_keys
from sametoken.scheduler.kept_states import KeptStates
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.plan_draft import Turn
from sametoken.scheduler.request_state import RequestState
from sametoken.types.request import EngineRequest


class KVMemory:
    """The block pool, the prefix cache and kept states, seen by request and turn."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.prefix_cache = PrefixCache()
        self.pool = BlockPool(limits.num_blocks, self.prefix_cache)
        self.states = KeptStates(limits)

    def keys(self, request: EngineRequest) -> tuple[bytes, ...]:
        """Keys under which the blocks of a prompt are cached; none if caching is off for it."""
        if not (self._limits.enable_prefix_caching and request.use_prefix_cache):
            return ()
        return block_keys(
            request.prompt_token_ids, self._limits.block_size, self._limits.lookahead_tokens
        )

    def looks_up(self, request: RequestState) -> bool:
        """Whether a request may start from cached blocks.

        Log-probabilities of prompt tokens need the hidden state of every position.
        """
        wanted, caching = request.request, self._limits.enable_prefix_caching
        return caching and wanted.use_prefix_cache and wanted.params.prompt_logprobs is None

    def look_up(self, request: RequestState) -> tuple[int, ...]:
        """Cached blocks that a waiting request can start after; sets where it starts and stops.

        Its last prompt token is always computed.
        """
        most = (request.prompt_len - 1) // self._limits.block_size if self.looks_up(request) else 0
        cached = self.prefix_cache.match(request.block_keys[:most])
        usable = self.states.usable(request.block_keys, len(cached))
        request.num_cached = request.position = usable * self._limits.block_size
        request.stops = self.states.stops(request, request.position, len(cached))
        return cached[:usable]

    def fits_prompt(self, request: RequestState, cached: tuple[int, ...]) -> bool:
        """Whether a whole prompt fits in the available blocks, given its cached ones."""
        unused = sum(not self.pool.references(block) for block in cached)
        needed = self._limits.blocks_for(request.prompt_len + 1 + self._limits.lookahead_slots)
        return needed - len(cached) <= self.pool.num_available - unused

    def lacking(self, turn: Turn) -> int:
        """New blocks that a request needs for a turn."""
        needed = self._limits.blocks_for(turn.hi_after + self._limits.lookahead_slots)
        return max(0, needed - len(turn.request.blocks))

    def blocks_to_swap_in(self, turn: Turn) -> int:
        """Blocks that a swapped request needs for a turn: at least those that it had."""
        return max(turn.request.held_save.num_blocks, self.lacking(turn))

    def fit(self, turn: Turn) -> Turn:
        """The turn cut to the rows that available blocks hold, at least one.

        So neither drafts nor a long chunk preempt another request.
        """
        blocks = len(turn.request.blocks) + self.pool.num_available
        surplus = turn.hi_after + self._limits.lookahead_slots - blocks * self._limits.block_size
        return turn if surplus <= 0 else turn.cut(max(1, turn.num_rows - surplus))

    def index_chunk(self, request: RequestState, start: int, end: int) -> None:
        """Cache the prompt blocks that the chunk ``start .. end - 1`` completes."""
        first, last = start // self._limits.block_size, end // self._limits.block_size
        keys = request.block_keys[first:last]
        # A prompt's last full block may have no key.
        for key, block in zip(keys, request.blocks[first:last], strict=False):
            self.prefix_cache.insert(key, block)

    def index_kept(self, request: RequestState, num_kept_tokens: int) -> None:
        """Cache the blocks of a request that ends, as far as its tokens are kept.

        Keys cover only kept tokens, lookahead included, and blocks lie below ``num_final``.
        The target's and the drafter's KV there is correct: a request that matches it is in a
        later plan, which runs after every step that is processed or in flight, drafter
        included. It stays correct: windows in flight start at the newest processed token or
        later, drafters catch up from a window's start, and drafts are written above it
        (tests/unit/scheduler/test_scheduler.py).
        A swapped request has no blocks to cache.

        Raises:
            InvariantError: fewer than the prompt's tokens, or more than are processed.
        """
        if not request.prompt_len <= num_kept_tokens <= request.num_processed:
            raise InvariantError(
                f"request {request.request.request_id!r} cannot keep {num_kept_tokens} tokens: "
                f"its prompt has {request.prompt_len}, and {request.num_processed} are processed"
            )
        limits = self._limits
        may_cache = limits.enable_prefix_caching and limits.cache_emitted_blocks
        if not (may_cache and request.request.use_prefix_cache):
            return
        tokens = (*request.request.prompt_token_ids, *request.emitted)[:num_kept_tokens]
        keys = block_keys(tokens, limits.block_size, limits.lookahead_tokens)
        num_blocks = request.num_final // limits.block_size
        for key, block in zip(keys[:num_blocks], request.blocks, strict=False):
            self.prefix_cache.insert(key, block)
        self.states.keep_answer(request, keys)

    def forget(self, request: RequestState) -> None:
        """Remove a request's blocks and states from the prefix cache."""
        for block in request.blocks:
            self.prefix_cache.forget(block)
        self.states.forget(request)
