"""KV blocks for requests: how many a turn needs, and which come from the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sametoken.errors import InvariantError
from sametoken.scheduler.block_pool import BlockPool, block_keys
from sametoken.scheduler.kept_states import KeptStates
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.plan_draft import PlanDraft, Turn
from sametoken.scheduler.request_state import RequestState
from sametoken.scheduler.swap_space import Found, SwapSpace
from sametoken.types.plan import SwapIn, SwapOut
from sametoken.types.request import EngineRequest

#: Set the keys of blocks in the fast form, and of each adapter, apart.
_FAST, _ADAPTER = b"fast", b"adapter"


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest cached beginning of a prompt.

    Attributes:
        blocks: its blocks on the device.
        saved: keys of the blocks after them, which are in swap space.
    """

    blocks: tuple[int, ...] = ()
    saved: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        return len(self.blocks) + len(self.saved)

    def first(self, count: int) -> CachedPrefix:
        """Its first ``count`` blocks."""
        num_saved = max(0, count - len(self.blocks))
        return CachedPrefix(self.blocks[:count], self.saved[:num_saved])


@dataclass(eq=False)
class KVMemory:
    """What the block pool, kept states and the swap space do for a request or turn.

    Attributes:
        num_updates: of the weights that compute KV, a drafter's too; prefix cache keys cover it.
    """

    limits: SchedulerLimits
    pool: BlockPool
    states: KeptStates
    swap: SwapSpace
    num_updates: int = 0

    def begin_weights(self) -> None:
        """From now on KV is computed with weights that no earlier block had.

        Prefixes in swap space and kept states stay under keys that no request has any more.
        """
        self.num_updates += 1
        self.pool.forget_prefixes()

    def keys(self, request: EngineRequest) -> tuple[bytes, ...]:
        """Keys under which the blocks of a prompt are cached; none if caching is off for it."""
        if not (self.limits.enable_prefix_caching and request.use_prefix_cache):
            return ()
        tokens, root = request.prompt_token_ids, self._root(request)
        if end := self.limits.fast_form.end(len(tokens)):
            # KV in the fast form has other bits, and that of what follows is in the usual one.
            return self._keys_of(tokens[: end + self.limits.lookahead_tokens], root + _FAST)
        return self._keys_of(tokens, root)

    def looks_up(self, request: RequestState) -> bool:
        """Whether a request may start from cached blocks.

        Log-probabilities of prompt tokens need the hidden state of every position.
        """
        wanted, caching = request.request, self.limits.enable_prefix_caching
        return caching and wanted.use_prefix_cache and wanted.params.prompt_logprobs is None

    def find_prefix(self, request: RequestState) -> CachedPrefix | None:
        """The cached prefix that a waiting request can start after; sets its start and chunk ends.

        None if the prompt does not fit in the available blocks, or if saved blocks are still read
        from the file. The last prompt token is always computed.
        """
        most = (request.prompt_len - 1) // self.limits.block_size if self.looks_up(request) else 0
        keys = request.block_keys[:most]
        blocks = self.pool.prefix_cache.match(keys)
        saved = self.swap.saved_prefix(keys[len(blocks) :])
        cached = self._start_after(request, CachedPrefix(blocks, saved))
        if not self._fits_prompt(request, cached):
            return None
        found = self.swap.fetch(cached.saved)
        if found is not Found.GONE:
            return cached if found is Found.HERE else None
        cached = self._start_after(request, CachedPrefix(cached.blocks))
        return cached if self._fits_prompt(request, cached) else None

    def assign_prefix(self, request: RequestState, cached: CachedPrefix, draft: PlanDraft) -> None:
        """Give an admitted request its cached prefix; what was saved is copied to new blocks."""
        self.pool.share(cached.blocks)
        draft.assign_blocks(request, list(cached.blocks))
        if not cached.saved:
            return
        blocks = self.extend(request, len(cached.saved), draft)
        host_blocks = self.swap.host_blocks(cached.saved)
        draft.swap_ins.append(SwapIn(request.held_slot, tuple(blocks), host_blocks))
        for key, block in zip(cached.saved, blocks, strict=True):
            self.pool.prefix_cache.insert(key, block)

    def swap_out(self, victim: RequestState, draft: PlanDraft) -> None:
        """Free a preempted request's blocks, saved if there is room for all of them."""
        num_saved = self.limits.blocks_for(victim.reach)
        keys = tuple((victim.admission, index) for index in range(victim.num_dropped, num_saved))
        host_blocks = self.swap.save_request(keys)
        # Of a window of one row, no block is seen at the end of another.
        if host_blocks:
            victim.saved = keys
            in_use = tuple(victim.blocks[: len(keys)])
            draft.swap_outs.append(SwapOut(victim.held_slot, in_use, host_blocks))
        self.pool.release(victim.blocks)
        victim.blocks.clear()

    def swap_in(self, request: RequestState, turn: Turn, draft: PlanDraft) -> None:
        """Give a preempted request blocks for a turn, with what was saved, or for a restart."""
        blocks = self.extend(request, self._blocks_to_swap_in(turn), draft)
        if request.saved:
            host_blocks = self.swap.host_blocks(request.saved)
            in_use = tuple(blocks[: len(host_blocks)])
            draft.swap_ins.append(SwapIn(request.held_slot, in_use, host_blocks))
            self._discard(request)
        else:
            draft.restarts.append(request.held_slot)

    def free(self, request: RequestState) -> None:
        """Free what a released request has, on the device and in swap space."""
        self.pool.release(request.blocks)
        self._discard(request)

    def may_return(self, request: RequestState) -> bool:
        """Whether a preempted request can get blocks: what was saved is here, or it restarts."""
        found = self.swap.fetch(request.saved) if request.saved else Found.GONE
        if found is Found.COMING:
            return False
        if found is Found.GONE:
            self._discard(request)
            if request.num_in_flight:
                return False
            request.lose_kv()
        return self._blocks_to_swap_in(Turn.least(request)) <= self.pool.num_available

    def lacking(self, turn: Turn) -> int:
        """New blocks that a request needs for a turn."""
        needed = self.limits.blocks_for(turn.hi_after + self.limits.lookahead_slots)
        return max(0, needed - turn.request.table_len)

    def lacks_blocks(self, request: RequestState) -> bool:
        """Whether a running request needs more blocks for its shortest turn than are available."""
        return self.lacking(Turn.least(request)) > self.pool.num_available

    def drop_behind(self, request: RequestState) -> None:
        """Free a running request's blocks that lie behind the window of every later row.

        Rows of earlier steps may still read them: whoever gets a block writes it in a later one.
        """
        if not self.limits.sliding_window:
            return
        first_seen = request.next_position - self.limits.sliding_window + 1
        count = first_seen // self.limits.block_size - request.num_dropped
        if count > 0:
            self.pool.release(request.blocks[:count])
            del request.blocks[:count]
            request.num_dropped += count

    def fit(self, turn: Turn) -> Turn:
        """The turn cut to the rows that available blocks hold; they hold its request's shortest.

        So neither drafts nor a long chunk preempt another request.
        """
        blocks = turn.request.table_len + self.pool.num_available
        surplus = turn.hi_after + self.limits.lookahead_slots - blocks * self.limits.block_size
        return turn if surplus <= 0 else turn.cut(turn.num_rows - surplus)

    def index_chunk(self, request: RequestState, start: int, end: int) -> None:
        """Cache the prompt blocks that the chunk ``start .. end - 1`` completes."""
        first, last = start // self.limits.block_size, end // self.limits.block_size
        keys = request.block_keys[first:last]
        # A prompt's last full block may have no key.
        for key, block in zip(keys, request.blocks[first - request.num_dropped :], strict=False):
            self.pool.prefix_cache.insert(key, block)

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
        may_cache = self.limits.enable_prefix_caching and self.limits.cache_emitted_blocks
        if not (may_cache and request.request.use_prefix_cache):
            return
        if request.fast_end or request.num_updates != self.num_updates:
            # Answers have the usual form, a longer prompt has not; or some KV is of older weights.
            return
        keys = self._kept_keys(request, num_kept_tokens)
        num_blocks = request.num_final // self.limits.block_size
        indexed = keys[request.num_dropped : num_blocks]
        for key, block in zip(indexed, request.blocks, strict=False):
            self.pool.prefix_cache.insert(key, block)
        self.states.keep_answer(request, keys)

    def forget(self, request: RequestState) -> None:
        """Remove a request's blocks and states from the prefix cache and from swap space.

        By key: it may have left blocks behind a window, or when it was preempted.
        """
        self.pool.forget(request.block_keys)
        self.swap.drop(request.block_keys)
        self.states.forget(request)

    def extend(self, request: RequestState, count: int, draft: PlanDraft) -> list[int]:
        """Append ``count`` new blocks to a request's table; evicted prefixes are saved."""
        blocks = self.pool.allocate(count)
        saved = [(block, self.swap.save_prefix(key)) for key, block in self.pool.evicted]
        self.pool.evicted.clear()
        # One copy of all: each gathers from every cache of the device.
        if moves := [(block, host) for block, host in saved if host is not None]:
            block_ids, host_blocks = zip(*moves, strict=True)
            draft.swap_outs.append(SwapOut(None, block_ids, host_blocks))
        draft.assign_blocks(request, blocks)
        return blocks

    def _discard(self, request: RequestState) -> None:
        """Free what a preempted request has in swap space."""
        self.swap.drop(request.saved)
        request.saved = ()

    def _fits_prompt(self, request: RequestState, cached: CachedPrefix) -> bool:
        """Whether a whole prompt fits in the available blocks, given its cached ones."""
        needed = self.limits.blocks_for(request.prompt_len + 1 + self.limits.lookahead_slots)
        if needed <= self.pool.num_available:
            return True
        unused = sum(not self.pool.references(block) for block in cached.blocks)
        return needed - len(cached.blocks) <= self.pool.num_available - unused

    def _blocks_to_swap_in(self, turn: Turn) -> int:
        """Blocks that a swapped request needs for a turn: at least those that it had."""
        request = turn.request
        replayed = request.num_replayed + 1 + self.limits.lookahead_slots if request.replays else 0
        in_replay = self.limits.blocks_for(replayed) - request.num_dropped
        return max(len(request.saved), in_replay, self.lacking(turn))

    def _kept_keys(self, request: RequestState, num_kept_tokens: int) -> tuple[bytes, ...]:
        """Keys of prompt and output up to the kept tokens; those of the prompt are known."""
        known = request.block_keys
        first, prompt = len(known) * self.limits.block_size, request.request.prompt_token_ids
        rest = (*prompt[first:], *request.emitted)[: num_kept_tokens - first]
        return known + self._keys_of(rest, known[-1] if known else self._root(request.request))

    def _keys_of(self, token_ids: Sequence[int], root: bytes) -> tuple[bytes, ...]:
        return block_keys(token_ids, self.limits.block_size, self.limits.lookahead_tokens, root)

    def _root(self, request: EngineRequest) -> bytes:
        """What a request's KV depends on beside its tokens: weights, and an adapter of its own."""
        adapter = _ADAPTER + request.adapter.to_bytes(4, "little") if request.adapter else b""
        return (self.num_updates.to_bytes(8, "little") if self.num_updates else b"") + adapter

    def _start_after(self, request: RequestState, cached: CachedPrefix) -> CachedPrefix:
        """Cut a cached prefix to where the request can start; sets its start and chunk ends."""
        usable = self.states.usable(request.block_keys, len(cached))
        request.num_cached = request.position = usable * self.limits.block_size
        request.chunk_ends = self.states.chunk_ends(request, request.position, len(cached))
        return cached.first(usable)
