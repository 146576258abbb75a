"""Random loads with memory in plenty: who is served in every step, and who waits how long."""

import random

from sametoken.scheduler.plan_draft import SHARE


class Load:
    """Requests of mixed lengths come and go; every plan is held against the policy."""

    def __init__(self, kit, seed):
        self.kit, self.random = kit, random.Random(seed)
        self.rows = self.random.choice([16, 24, 40])
        self.slots = self.random.choice([4, 8, 12])
        self.scheduler = kit.scheduler(
            max_num_seqs=self.slots,
            max_num_batched_tokens=self.rows,
            longest_chunk=self.rows,
            num_blocks=400,
            max_model_len=200,
            num_speculative_tokens=self.random.choice([0, 3, 8]),
            adaptive_drafts=self.random.random() < 0.5,
            enable_prefix_caching=False,
        )
        self.arrived, self.answered = set(), set()
        self.num_full = self.num_overtaken = 0

    def add(self):
        name = f"r{len(self.arrived)}"
        length = self.random.choice([1, 2, 3, 5, 9, 30, 150])
        self.arrived.add(name)
        total = length + self.random.randint(1, 30)
        self.scheduler.add(self.kit.request(name, length, max_total=total))

    def step(self):
        waiting = list(self.scheduler._waiting)
        running = list(self.scheduler._running.values())
        lacked = {state.request.request_id: state.num_left for state in running}
        lacked |= {n: state.prompt_len for n, state in self.scheduler._waiting.items()}
        decoding = [s.slot for s in running if not s.prefilling and not s.at_limit]
        free_slots = len(self.scheduler._free_slots)
        plan = self.scheduler.plan()
        if plan is None:
            assert not lacked
            return
        name_of = {s.slot: n for n, s in self.scheduler._running.items()}
        rows = {row.slot: row for row in plan.requests}
        total = sum(row.num_query + row.draft_limit for row in plan.requests)
        assert total <= self.rows
        # Every decode is served in every step: there are fewer of them than rows.
        assert set(decoding) <= set(rows)
        chunks = {n: rows[s].num_query for s, n in name_of.items() if s in rows}
        chunks = {n: chunk for n, chunk in chunks.items() if lacked[n]}
        self.check_prompts(chunks, lacked, waiting[:free_slots], total)
        updates = self.scheduler.process_output(
            self.kit.result(plan, self.random.randint(0, 8), proposed=self.random.randint(0, 8))
        )
        self.scheduler.check_integrity()
        for update in updates:
            name = update.request_id
            self.answered.add(name)
            if self.scheduler._running[name].at_limit:
                self.scheduler.release(name)

    def check_prompts(self, chunks, lacked, in_reach, total):
        could = [n for n in lacked if lacked[n] and (n in in_reach or n in self.scheduler._running)]
        if not could:
            return
        prompt_rows = sum(chunks.values())
        left_over = [n for n in could if chunks.get(n, 0) < lacked[n]]
        if not left_over:
            return
        # Not all prompts ended, so the step is full, and prompts had their share.
        self.num_full += 1
        assert total == self.rows
        assert prompt_rows >= self.rows // SHARE
        oldest = left_over[0]
        before = sum(chunks[n] for n in could[: could.index(oldest)])
        room = prompt_rows - before
        overtakers = [n for n in could[could.index(oldest) + 1 :] if n in chunks]
        self.num_overtaken += len(overtakers)
        taken = chunks.get(oldest, 0)
        assert taken == room - sum(chunks[n] for n in overtakers)
        assert taken >= room - room // SHARE
        for name in overtakers:
            assert chunks[name] == lacked[name], "whoever overtakes ends"


def test_every_step_of_a_random_load_keeps_the_policy(kit):
    num_full = num_overtaken = 0
    for seed in range(40):
        load = Load(kit, seed)
        for _ in range(150):
            if load.random.random() < 0.25:
                load.add()
            load.step()
        for _ in range(600):
            if not load.scheduler.has_unfinished:
                break
            load.step()
        assert not load.scheduler.has_unfinished
        assert load.answered == load.arrived
        num_full += load.num_full
        num_overtaken += load.num_overtaken
    assert num_full > 500
    assert num_overtaken > 100


def test_small_prompts_behind_a_huge_one_start_within_one_step_and_it_keeps_three_quarters(kit):
    scheduler = kit.scheduler(
        max_num_seqs=64,
        max_num_batched_tokens=64,
        num_blocks=800,
        max_model_len=2000,
        enable_prefix_caching=False,
    )
    scheduler.add(kit.request("huge", 1900, max_total=1901))
    answered, steps = set(), 0
    while scheduler.num_running == 0 or scheduler._running["huge"].prefilling:
        scheduler.add(kit.request(f"small {steps}", 8, max_total=9))
        plan, updates = kit.step(scheduler)
        steps += 1
        names = {update.request_id for update in updates}
        assert f"small {steps - 1}" in names, "answered in the step after it came"
        answered |= names - {"huge"}
        for name in names - {"huge"}:
            scheduler.release(name)
        if steps > 1 and scheduler._running["huge"].prefilling:
            assert max(row.num_query for row in plan.requests) >= 48
    assert len(answered) == steps
    assert steps <= 1900 // 48 + 1


def test_nobody_starves_in_a_crowd_of_more_requests_than_rows(kit):
    scheduler = kit.scheduler(
        max_num_seqs=24, max_num_batched_tokens=8, num_blocks=400, num_speculative_tokens=4
    )
    for index in range(60):
        scheduler.add(kit.request(f"r{index}", 1 + index % 11, max_total=30))
    missed = {}
    for _ in range(4000):
        if not scheduler.has_unfinished:
            break
        plan, _ = kit.step(scheduler, accept=1)
        served = {row.slot for row in plan.requests}
        for name, state in list(scheduler._running.items()):
            missed[name] = 0 if state.slot in served else missed.get(name, 0) + 1
            assert state.prefilling or missed[name] <= 2 * 24 // 8 + 1, name
            if state.at_limit:
                scheduler.release(name)
    assert not scheduler.has_unfinished
