"""The scheduler against a device written in lists, which runs every plan in order.

The fake device keeps what a real one keeps: tokens and lengths per slot, block tables, and
what was written to every position of every block, for the target and for a drafter, by which
version of the weights, which adapter and in which form; where states are kept, also the tokens that
each slot has folded and those that are pending. Its next token is a hash of what it reads back, so
a wrong block gives a wrong token; it also says at once which position is wrong.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sametoken.scheduler import kept_states
from sametoken.scheduler.block_pool import block_keys
from sametoken.scheduler.draft_limits import StepReads
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.plan_draft import SHARE
from sametoken.scheduler.scheduler import Scheduler
from sametoken.types.fast_prompts import FastForm
from sametoken.types.layout import StepShape
from sametoken.types.outputs import RequestResult, StepResult
from sametoken.types.plan import Admission, ScheduledRequest, StepPlan
from sametoken.types.request import EngineRequest
from sametoken.types.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def short_interval(monkeypatch):
    """Answers of a few blocks leave states too."""
    monkeypatch.setattr(kept_states, "INTERVAL", 2)


VOCAB = 5
GARBAGE = "garbage"


def next_token(tokens):
    digest = hashlib.blake2b(bytes(tokens), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCAB


def reference(prompt, count, window=0):
    """``next_token`` of all tokens so far, or of the last ``window``."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-window:]))
    return tuple(tokens[len(prompt) :])


@dataclass
class Slot:
    tokens: list
    prompt_len: int
    num_computed: int
    num_cached: int
    version: int
    adapter: int
    fast_end: int
    table: list = field(default_factory=list)
    folded: tuple = ()
    pending: tuple = ()


class FakeDevice:
    def __init__(self, limits, rng):
        self.limits, self.rng = limits, rng
        self.slots = {}
        nothing = (None, 0, None, False)
        self.kv = [[nothing] * limits.block_size for _ in range(limits.num_blocks)]
        self.drafter_kv = [[nothing] * limits.block_size for _ in range(limits.num_blocks)]
        self.host = {}
        self.kept = {}
        self.next_step_id = self.version = 0
        self.accepted = self.replayed = self.fast = self.replayed_fast = 0

    def run(self, plan: StepPlan, poison: bool) -> StepResult:
        assert plan.step_id == self.next_step_id
        assert plan.num_wanted is None or 0 <= plan.num_wanted <= self.limits.num_speculative_tokens
        self.next_step_id += 1
        self.move_out(plan)
        for slot in plan.restarts:
            self.slots[slot].num_computed = self.slots[slot].num_cached = 0
            self.slots[slot].table.clear()
        for admission in plan.admissions:
            self.admit(admission)
        for assignment in plan.block_assignments:
            table = self.slots[assignment.slot].table
            # What was swapped out is assigned anew.
            del table[assignment.first_index :]
            assert assignment.first_index == len(table)
            table.extend(assignment.block_ids)
        self.move_in(plan)
        assert len({row.slot for row in plan.requests}) == len(plan.requests)
        failed = self.rng.choice(plan.requests).slot if poison and plan.requests else None
        for copy in plan.restored_states:
            slot = self.slots[copy.slot]
            assert copy.position == slot.num_computed == slot.num_cached
            slot.folded, pending, adapter, num_fast = self.kept[copy.state]
            assert adapter == slot.adapter
            assert num_fast == min(copy.position, slot.fast_end)
            slot.pending = pending[: copy.position - len(slot.folded)]
        rows = tuple(self.run_row(row, row.slot == failed) for row in plan.requests)
        for copy in plan.kept_states:
            slot = self.slots[copy.slot]
            if len(slot.folded) <= copy.position <= slot.num_computed:
                num_fast = min(copy.position, slot.fast_end)
                self.kept[copy.state] = slot.folded, slot.pending, slot.adapter, num_fast
        return StepResult(plan.step_id, rows)

    def move_out(self, plan: StepPlan):
        written = [block for swap in plan.swap_outs for block in swap.host_blocks]
        assert len(set(written)) == len(written)
        assert all(0 <= block < self.limits.num_host_blocks for block in written)
        for swap in plan.swap_outs:
            if swap.slot is not None:
                table = self.slots[swap.slot].table
                self.check_part(table, swap.block_ids)
            for block, host_block in zip(swap.block_ids, swap.host_blocks, strict=True):
                self.host[host_block] = list(self.kv[block]), list(self.drafter_kv[block])

    def check_part(self, table, block_ids):
        """They are a table's, after those that lie behind the window."""
        if not self.limits.sliding_window:
            assert list(block_ids) == table[: len(block_ids)]
        # Entries behind the window may name blocks that it has again.
        first = len(table) - 1 - table[::-1].index(block_ids[0])
        assert list(block_ids) == table[first : first + len(block_ids)]

    def move_in(self, plan: StepPlan):
        admitted = {admission.slot for admission in plan.admissions}
        for swap in plan.swap_ins:
            slot = self.slots[swap.slot]
            if swap.slot not in admitted:
                # All blocks are its own now.
                slot.num_cached = 0
                self.check_part(slot.table, swap.block_ids)
            for block, host_block in zip(swap.block_ids, swap.host_blocks, strict=True):
                kv, drafter_kv = self.host[host_block]
                self.kv[block], self.drafter_kv[block] = list(kv), list(drafter_kv)

    def admit(self, admission: Admission):
        prompt = admission.prompt_token_ids
        num_cached, fast_end = admission.num_cached, self.limits.fast_form.end(len(prompt))
        cached = num_cached, num_cached
        self.slots[admission.slot] = Slot(
            list(prompt), len(prompt), *cached, self.version, admission.adapter, fast_end
        )

    def run_row(self, row: ScheduledRequest, failed: bool) -> RequestResult:
        slot = self.slots[row.slot]
        start, num_tokens = slot.num_computed, len(slot.tokens)
        self.check_form(row, slot)
        if row.replays:
            return self.replay(row, slot)
        if row.samples:
            assert start + row.num_query == num_tokens
        in_output = num_tokens > slot.prompt_len
        if in_output:
            assert (row.num_query, row.samples) == (1, True)
        else:
            chunk_end = start + row.num_query
            assert row.num_query <= self.limits.longest_chunk
            assert row.samples == (chunk_end == slot.prompt_len)
            assert row.draft_limit == 0
        self.check_readable(slot)
        for position in range(start, start + row.num_query):
            self.write(self.kv, slot, position, slot.tokens[position])
        self.fold(slot, start + row.num_query)
        if not row.samples:
            slot.num_computed += row.num_query
            self.draft(slot, start)
            return RequestResult(0, 0, 0, ())
        proposed = self.proposed_drafts(slot) if in_output else []
        drafts = proposed[: row.draft_limit]
        slot.pending = tuple(drafts)
        for index, draft in enumerate(drafts):
            self.write(self.kv, slot, num_tokens + index, draft)
        window = self.limits.sliding_window or num_tokens
        first = max(0, num_tokens - window)
        seen = [self.read(self.kv, slot, position) for position in range(first, num_tokens)]
        emitted = [next_token(seen)]
        for draft in drafts:
            if draft != emitted[-1]:
                break
            visible = (seen + emitted)[-window:] if self.limits.sliding_window else seen + emitted
            emitted.append(next_token(visible))
        slot.tokens.extend(emitted)
        slot.num_computed = len(slot.tokens) - 1
        self.draft(slot, start)
        self.accepted += len(emitted) - 1
        return RequestResult(
            len(drafts), len(proposed), len(emitted) - 1, tuple(emitted), failed=failed
        )

    def check_form(self, row: ScheduledRequest, slot):
        """By position alone; in the fast one at multiples alone, or the whole rest of it."""
        start, end = slot.num_computed, slot.num_computed + row.num_query
        fast, form = start < slot.fast_end, self.limits.fast_form
        assert row.expanded_to == (end if fast and form.expands else 0)
        if fast:
            assert end <= slot.fast_end
            assert start % form.multiple == 0
            assert end % form.multiple == 0 or end == slot.fast_end
            self.fast += 1
            self.replayed_fast += row.replays

    def replay(self, row: ScheduledRequest, slot):
        """Its tokens stand; it emits nothing."""
        assert not row.samples
        start, end = slot.num_computed, slot.num_computed + row.num_query
        assert end < len(slot.tokens)
        self.replayed += row.num_query
        for position in range(start, end):
            self.write(self.kv, slot, position, slot.tokens[position])
        self.fold(slot, end)
        slot.num_computed = end
        self.draft(slot, start)
        return RequestResult(0, 0, 0, ())

    def fold(self, slot, end):
        """What is pending below the first row runs again; it must be what was committed."""
        start = slot.num_computed
        before = (slot.folded + slot.pending)[:start]
        if self.limits.num_kept_states:
            assert before == tuple(slot.tokens[:start]), "the state is of another prefix"
        slot.folded, slot.pending = tuple(slot.tokens[:end]), ()

    def proposed_drafts(self, slot):
        count = self.rng.randint(0, self.limits.num_speculative_tokens)
        right = list(reference(slot.tokens, count, self.limits.sliding_window))
        wrong = self.rng.randint(0, len(right))
        if wrong < len(right):
            right[wrong] = (right[wrong] + 1) % VOCAB
        return right

    def draft(self, slot, start):
        """A drafter whose KV depends on later tokens, and that writes ahead."""
        end = slot.num_computed
        for position in range(start, end):
            self.write(self.drafter_kv, slot, position, self.drafter_entry(slot, position))
        for position in range(end, end + 1 + self.limits.lookahead_slots):
            self.write(self.drafter_kv, slot, position, GARBAGE)

    def drafter_entry(self, slot, position):
        return tuple(slot.tokens[position : position + 1 + self.limits.lookahead_tokens])

    def check_readable(self, slot):
        window = self.limits.sliding_window or slot.num_computed + 1
        for position in range(max(0, slot.num_computed - window + 1), slot.num_computed):
            assert self.read(self.kv, slot, position) == slot.tokens[position]
            expected = self.drafter_entry(slot, position)
            assert self.read(self.drafter_kv, slot, position) == expected

    def read(self, memory, slot, position):
        block, offset = divmod(position, self.limits.block_size)
        value, version, adapter, fast = memory[slot.table[block]][offset]
        assert fast == (position < slot.fast_end), "a request reads KV in another form"
        assert adapter == slot.adapter, "a request reads KV of another adapter"
        assert version >= slot.version, "a request reads KV of weights before its own"
        return value

    def write(self, memory, slot, position, value):
        assert position >= slot.num_cached, "a shared block was written"
        block, offset = divmod(position, self.limits.block_size)
        fast = position < slot.fast_end
        memory[slot.table[block]][offset] = value, self.version, slot.adapter, fast


class FakeFile:
    """Copies end some time later, and what is read is now and then wrong."""

    def __init__(self, host, rng):
        self.host, self.rng = host, rng
        self.num_blocks = rng.choice([0, 4, 20])
        self.places, self.started = {}, deque()
        self.written = self.read_back = 0

    def write(self, place, host_block):
        self.places[place] = self.host[host_block]
        self.written += 1
        self.started.append((place, host_block, False))

    def read(self, place, host_block):
        self.host[host_block] = GARBAGE
        self.started.append((place, host_block, True))

    def finished(self, *, wait=False):
        ended = []
        while self.started and (self.rng.random() < 0.5 or (wait and not ended)):
            place, host_block, reads = self.started.popleft()
            is_right = self.rng.random() > 0.05
            if reads and is_right:
                self.host[host_block] = self.places[place]
            self.read_back += reads
            if not reads:
                # The block must not be needed any more.
                self.host[host_block] = GARBAGE if is_right else self.host[host_block]
            ended.append((place, is_right))
        return ended


class Driver:
    """An engine's loop, one call at a time, with every promise checked after each."""

    def __init__(self, limits, seed):
        self.limits = limits
        self.rng, self.adapters = random.Random(seed), random.Random(seed)
        self.device = FakeDevice(limits, self.rng)
        self.file = FakeFile(self.device.host, self.rng)
        self.scheduler = Scheduler(limits, self.file)
        self.results = deque()
        self.wanted, self.emitted = {}, {}
        self.prompts = {}
        # Prompts that go on a former request's kept tokens, and the length of its prompt.
        self.kept, self.turns = [], {}
        self.known_keys = set()
        self.count = 0
        self.swap_ins = self.hits_in_swap = self.most_lingering = 0
        self.hits_on_emitted = self.hits_on_lingering = self.cuts = self.dropped = 0
        self.restored = self.restored_emitted = self.restored_swapped = self.replayed_hybrids = 0
        self.fast_hits = 0

    def add(self, prompt, max_new, max_drafts=None):
        total = min(len(prompt) + max_new, self.limits.max_model_len)
        needed = self.limits.blocks_for(total + self.limits.lookahead_slots)
        if len(prompt) >= total or needed > self.limits.num_blocks:
            return
        # Ids are used again, as soon as that is allowed.
        name = next(str(i) for i in range(self.count + 1) if str(i) not in self.wanted)
        self.count += 1
        params = SamplingParams(temperature=0.0)
        adapter = int(self.adapters.random() < 0.2)
        request = EngineRequest(
            name, prompt, params, total, num_speculative_tokens=max_drafts, adapter=adapter
        )
        self.scheduler.add(request)
        self.prompts[name] = prompt
        self.note_keys(prompt)
        stop = self.rng.randint(1, total - len(prompt))
        window = self.limits.sliding_window
        self.wanted[name] = reference(prompt, total - len(prompt), window)[:stop]
        self.emitted[name] = ()
        self.check()

    def follow_up(self, tail, max_new):
        """The next turn of a chat: what a former request has kept, and something new."""
        if not self.kept:
            return
        prompt_len, tokens = self.rng.choice(self.kept[-2:])
        self.turns[tokens + tail] = prompt_len
        self.add(tokens + tail, max_new)

    def plan(self, poison=False):
        lingering = {b for state in self.scheduler._lingering for b in state.blocks}
        plan = self.scheduler.plan()
        if plan is None:
            assert self.results or not self.wanted, "nothing runs and nothing ever will"
            return
        rows = sum(row.num_query + row.draft_limit for row in plan.requests)
        assert rows <= self.limits.max_num_batched_tokens
        are_chunks = [row.num_query > 1 or not row.samples for row in plan.requests]
        assert are_chunks == sorted(are_chunks), "windows come before chunks"
        assert plan.requests
        for admission in plan.admissions:
            prompt = admission.prompt_token_ids
            former = self.turns.get(prompt, self.limits.max_model_len)
            self.hits_on_emitted += admission.num_cached > former
            fast_end = self.limits.fast_form.end(len(prompt))
            self.fast_hits += 0 < admission.num_cached <= fast_end
            if self.limits.num_kept_states:
                self.restored += admission.num_cached > 0
                self.restored_emitted += admission.num_cached > former
            self.hits_on_lingering += any(
                assignment.slot == admission.slot and lingering & set(assignment.block_ids)
                for assignment in plan.block_assignments
            )
        admitted = {admission.slot for admission in plan.admissions}
        for swap in plan.swap_ins:
            self.hits_in_swap += swap.slot in admitted
            self.swap_ins += swap.slot not in admitted
            self.restored_swapped += swap.slot in {copy.slot for copy in plan.restored_states}
        if self.limits.num_kept_states:
            self.replayed_hybrids += sum(row.replays for row in plan.requests)
        self.results.append(self.device.run(plan, poison))
        self.check()

    def process(self):
        for update in self.scheduler.process_output(self.results.popleft()):
            name = update.request_id
            if update.failed:
                assert update.token_ids == ()
                self.forget(name)
                continue
            assert len(update.token_ids) == update.num_accepted + 1
            self.emitted[name] += update.token_ids
            if len(self.emitted[name]) >= len(self.wanted[name]):
                wanted = self.wanted[name]
                assert self.emitted[name][: len(wanted)] == wanted
                self.cuts += len(self.emitted[name]) > len(wanted)
                self.release(name, wanted)
        self.most_lingering = max(self.most_lingering, len(self.scheduler._lingering))
        self.check()

    def abort(self, name):
        self.release(name, self.emitted[name])
        self.check()

    def release(self, name, output):
        """Now and then as one that does not say what it keeps."""
        if self.rng.random() < 0.1:
            self.scheduler.release(name)
        else:
            tokens = self.prompts[name] + output
            self.note_keys(tokens)
            self.kept.append((len(self.prompts[name]), tokens))
            self.scheduler.release(name, len(tokens))
        self.forget(name)

    def new_weights(self):
        """Those that have begun keep their KV; nobody else finds it."""
        self.device.version += 1
        self.scheduler.begin_weights(self.device.version)
        self.note_prompts()

    def new_drafter_weights(self):
        """Likewise; tokens, which are the target's, are computed as before."""
        self.scheduler.begin_drafter_weights()
        assert not self.scheduler._pool.prefix_cache.blocks()
        self.note_prompts()

    def note_prompts(self):
        for prompt in self.prompts.values():
            self.note_keys(prompt)
        self.check()

    def forget_prefixes(self):
        self.scheduler.forget_prefixes()
        assert not self.scheduler._pool.prefix_cache.blocks()
        self.check()

    def forget(self, name):
        del self.wanted[name], self.emitted[name], self.prompts[name]

    def note_keys(self, tokens):
        """Only prompts and what was kept may ever be found."""
        sizes = self.limits.block_size, self.limits.lookahead_tokens
        for request in (SimpleNamespace(adapter=0), SimpleNamespace(adapter=1)):
            root = self.scheduler._memory._root(request)
            for form in (b"", b"fast"):
                self.known_keys.update(block_keys(tokens, *sizes, root + form))

    def check(self):
        self.scheduler.check_integrity()
        self.dropped += sum(state.num_dropped for state in self.scheduler._running.values())
        assert self.scheduler._pool.prefix_cache._block_of.keys() <= self.known_keys
        for states in (self.scheduler._running, self.scheduler._swapped):
            for state in states.values():
                num_tokens = len(self.device.slots[state.slot].tokens)
                assert state.bound.lo <= num_tokens <= state.bound.hi
                if not state.num_in_flight:
                    assert state.bound.exact == num_tokens

    def counts(self):
        return {
            "swaps": self.swap_ins,
            "hits_in_swap": self.hits_in_swap,
            "replayed": self.device.replayed,
            "written": self.file.written,
            "read_back": self.file.read_back,
            "hits": self.scheduler.prefix_cache_hits,
            "accepted": self.device.accepted,
            "hits_on_emitted": self.hits_on_emitted,
            "hits_on_lingering": self.hits_on_lingering,
            "cuts": self.cuts,
            "dropped": self.dropped,
            "restored": self.restored,
            "restored_emitted": self.restored_emitted,
            "restored_swapped": self.restored_swapped,
            "replayed_hybrids": self.replayed_hybrids,
            "fast": self.device.fast,
            "fast_hits": self.fast_hits,
            "replayed_fast": self.device.replayed_fast,
        }

    def drain(self, depth):
        for _ in range(2000):
            if not self.scheduler.has_unfinished:
                break
            if len(self.results) < depth:
                self.plan()
            if self.results and (len(self.results) == depth or self.rng.random() < 0.5):
                self.process()
        assert not self.wanted
        assert not self.results
        assert not self.scheduler._swap._owned
        assert self.scheduler.kv_usage == 0
        assert not self.scheduler._lingering


def draw_limits(rng):
    rows = rng.choice([1, 2, 3, 5, 8, 9, 12, 18])
    windows = StepShape(4, rows, rows, 4, rng.choice([1, 2, 9]), rows)
    return SchedulerLimits(
        max_num_seqs=rng.randint(1, 4),
        max_num_batched_tokens=rows,
        longest_chunk=rng.choice([rows, rows, rng.randint(1, 8)]),
        block_size=rng.randint(1, 4),
        num_blocks=rng.randint(5, 16),
        num_host_blocks=(num_host_blocks := rng.choice([0, 4, 6, 8])),
        num_idle_host_blocks=rng.randint(0, num_host_blocks),
        max_model_len=rng.randint(8, 30),
        num_speculative_tokens=rng.choice([0, 1, 2, 4, 8]),
        adaptive_drafts=rng.random() < 0.5,
        reads=StepReads(
            rng.choice([1, 4, 32]),
            dead_rows=rows % 3 > 0,
            free_rows=16 * (rows != 9),
            draft_share=0.3 * (rows % 3 == 0),
        ),
        busy_rows=rng.choice([rows, rows, 3]),
        usual_rows=rng.choice([rows, rows, rows // 2 or 1]),
        lookahead_slots=rng.choice([0, 1, 3]),
        lookahead_tokens=rng.choice([0, 1]),
        sliding_window=rng.choice([0, 0, 0, 0, 1, 4]),
        enable_prefix_caching=rng.random() < 0.8,
        cache_emitted_blocks=rng.random() < 0.9,
        num_kept_states=rng.choice([0, 0, 0, 0, 2, 8]),
        captured_shapes=rng.choice([(), (windows,)]),
    )


def with_fast_prompts(limits, rng):
    """As engines have them: hybrids share no KV without states, and no prompt starves."""
    share = max(1, min(limits.usual_rows, limits.max_num_batched_tokens) // SHARE)
    most = min(share - share // SHARE, limits.longest_chunk)
    recurs = limits.num_kept_states or not limits.enable_prefix_caching
    multiple = rng.randint(1, most) if recurs else 1
    return replace(limits, fast_form=FastForm(rng.choice([2, 4, 7]), multiple))


def draw_prompt(rng):
    """A few beginnings of two tokens, so that prefixes are shared and nearly shared."""
    shared = [rng.choice([(0, 1), (0, 0)])[i % 2] for i in range(rng.randint(0, 9))]
    tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
    return tuple(shared + tail)


LEAST = {
    "swaps": 50,
    "hits_in_swap": 20,
    "replayed": 50,
    "written": 50,
    "read_back": 3,
    "hits": 100,
    "accepted": 100,
    "failed": 5,
    "hits_on_emitted": 50,
    "hits_on_lingering": 5,
    "cuts": 50,
    "dropped": 50,
    "restored": 50,
    "restored_emitted": 10,
    "restored_swapped": 5,
    "replayed_hybrids": 10,
    "fast": 200,
    "fast_hits": 50,
    "replayed_fast": 10,
}


def test_driver_reaches_every_corner():
    """Random runs keep every promise, and see all that ``LEAST`` names, and lingering."""
    totals: Counter[str] = Counter()
    lingering = 0
    for seed in range(300):
        rng = random.Random(seed)
        depth = rng.randint(1, 3)
        limits = draw_limits(rng)
        driver = Driver(limits if seed < 250 else with_fast_prompts(limits, rng), seed)
        for _ in range(60):
            action = rng.random()
            if action < 0.2:
                driver.add(draw_prompt(rng), rng.randint(1, 20), rng.choice([None, None, 0, 1]))
            elif action < 0.32:
                tail = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 3)))
                driver.follow_up(tail, rng.randint(1, 8))
            elif action < 0.35 and driver.wanted:
                driver.abort(rng.choice(list(driver.wanted)))
            elif action < 0.355:
                driver.forget_prefixes()
            elif action < 0.365 and not driver.results:
                driver.new_weights()
            elif action < 0.7 and len(driver.results) < depth:
                before = driver.device.next_step_id
                driver.plan(poison=rng.random() < 0.02)
                totals["failed"] += driver.device.next_step_id > before and any(
                    row.failed for row in driver.results[-1].requests
                )
            elif driver.results:
                driver.process()
        driver.drain(depth)
        lingering = max(lingering, driver.most_lingering)
        totals.update(driver.counts())
    assert lingering > 1
    assert {name: totals[name] for name in LEAST if totals[name] <= LEAST[name]} == {}


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**20), depth=st.integers(1, 3), fast=st.booleans())
    def start(self, seed, depth, fast):
        rng = random.Random(seed)
        limits = draw_limits(rng)
        self.driver = Driver(with_fast_prompts(limits, rng) if fast else limits, seed)
        self.depth = depth

    @rule(seed=st.integers(0, 2**20), max_new=st.integers(1, 20), drafts=st.none() | st.just(1))
    def add(self, seed, max_new, drafts):
        self.driver.add(draw_prompt(random.Random(seed)), max_new, drafts)

    @rule(tail=st.lists(st.integers(0, 4), min_size=1, max_size=3), max_new=st.integers(1, 8))
    def follow_up(self, tail, max_new):
        self.driver.follow_up(tuple(tail), max_new)

    @rule(poison=st.sampled_from([False] * 9 + [True]))
    def plan(self, poison):
        if len(self.driver.results) < self.depth:
            self.driver.plan(poison)

    @precondition(lambda self: self.driver.results)
    @rule()
    def process(self):
        self.driver.process()

    @precondition(lambda self: not self.driver.results)
    @rule()
    def new_weights(self):
        self.driver.new_weights()

    @precondition(lambda self: not self.driver.results)
    @rule()
    def new_drafter_weights(self):
        self.driver.new_drafter_weights()

    @rule()
    def forget_prefixes(self):
        self.driver.forget_prefixes()

    @precondition(lambda self: self.driver.wanted)
    @rule(index=st.integers(0, 20))
    def abort(self, index):
        names = list(self.driver.wanted)
        self.driver.abort(names[index % len(names)])

    @invariant()
    def holds_together(self):
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain(self.depth)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True)
