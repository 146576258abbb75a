"""Drives a drafter through the engine's step, with no scheduler, over targets that a test foresees.

Everything a drafter must not read is poisoned before it proposes: its KV from the first
position of the step on, and tokens above the committed length.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from helpers.recorded import noted
from helpers.recurrent import poison
from helpers.static_steps import STEPS, chosen_steps, launcher_of
from sametoken.drafters.base import Drafts
from sametoken.drafters.context import Coupling, DraftContext
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.step.reference import write_tables
from sametoken.ops.step.types import NUM_COUNTS
from sametoken.runner.step import Step
from sametoken.state.caches import ModelCache
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.state.slots import admit, assign_blocks
from sametoken.types.layout import StepLayout
from sametoken.types.plan import Admission, BlockAssignment, ScheduledRequest, StepPlan
from sametoken.types.sampling_params import SamplingParams

CPU = torch.device("cpu")
BLOCK_SIZE = 4
MAX_LEN = 48
MAX_BLOCKS = MAX_LEN // BLOCK_SIZE
NOT_A_TOKEN = -7


@dataclass
class Counts:
    """What was offered and accepted while no draft was spoilt; prefix-cache hits."""

    offered: int = 0
    accepted: int = 0
    cached: int = 0


@dataclass
class Bench:
    """Slots, a target and its KV; the drafter is set once its KV is allocated.

    Plans want ``num_wanted`` drafts in turn.
    """

    target: object
    k: int
    num_slots: int = 3
    temperature: float = 0.0
    seed: int = 0
    spoil: float = 0.5
    first_token: int | None = None
    drafter: object = None
    kernels: ReferenceKernels = field(default_factory=ReferenceKernels)
    counts: Counts = field(default_factory=Counts)
    steps: str = field(default_factory=chosen_steps)
    num_wanted: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.num_blocks = 2 * self.num_slots * MAX_BLOCKS
        self.sequences = Sequences.allocate(
            max_num_seqs=self.num_slots,
            max_len=MAX_LEN,
            num_drafts=self.k,
            block_size=BLOCK_SIZE,
            reserved_block=self.num_blocks,
            device=CPU,
        )
        self.table = SamplingTable.allocate(self.num_slots, CPU)
        self.kv = self.allocate(self.target.caches)
        self.coupling = Coupling(self.kernels.sample, self.table)
        width = NUM_COUNTS + self.k + 1
        self.results = torch.zeros(self.num_slots, width, dtype=torch.int64)
        self.blocks = {}
        self.step_id = 0

    def allocate(self, caches) -> ModelCache:
        cache = ModelCache.allocate(
            caches,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=self.num_slots,
            num_drafts=self.k,
            device=CPU,
        )
        return poison(cache)

    def admit(self, slot: int, prompt: list[int], cached: tuple[int, ...] = ()) -> None:
        """Give a slot to a request: after cached blocks, random ones that nobody holds."""
        self.blocks.pop(slot, None)
        held = {block for blocks in self.blocks.values() for block in blocks}.union(cached)
        free = [block for block in range(self.num_blocks) if block not in held]
        self.blocks[slot] = [*cached, *self.random.sample(free, MAX_BLOCKS - len(cached))]
        params = SamplingParams(temperature=self.temperature, seed=self.random.randrange(2**40))
        admission = Admission(slot, tuple(prompt), len(cached) * BLOCK_SIZE, params)
        blocks = assign_blocks(self.sequences, BlockAssignment(slot, 0, tuple(self.blocks[slot])))
        write_tables([*admit(self.sequences, admission), *self.table.admit(admission), blocks])

    def tokens(self, slot: int) -> list[int]:
        return self.sequences.token_ids[slot, : int(self.sequences.num_tokens[slot])].tolist()

    def cached(self, cache: ModelCache, slot: int, stop: int) -> torch.Tensor:
        """KV of positions below ``stop``: [layers, 2, stop, heads, head_dim], a copy."""
        where = torch.arange(stop)
        blocks = torch.tensor(self.blocks[slot])[where // BLOCK_SIZE]
        found = [memory[:, blocks, :, where % BLOCK_SIZE] for memory in cache.blocks]
        return torch.stack(found, dim=1).permute(2, 1, 0, 3, 4).clone()

    def run(self, steps: int, vocab: int, check: Callable[[DraftContext, Drafts], None]) -> None:
        """Random steps: chunked prompts, mixed draft limits, slots taken up again."""
        for slot in range(self.num_slots):
            self._admit_random(slot, vocab)
        for _ in range(steps):
            for slot in range(self.num_slots):
                full = int(self.sequences.num_tokens[slot]) > MAX_LEN - 2 * self.k - 2
                if full or self.random.random() < 0.1:
                    self._admit_random(slot, vocab)
            slots = [s for s in range(self.num_slots) if self.random.random() < 0.8]
            self.random.shuffle(slots)
            if slots:
                self._step([self._row(slot) for slot in slots], vocab, check)

    def _admit_random(self, slot: int, vocab: int) -> None:
        prompt = [self.random.randrange(vocab) for _ in range(self.random.randint(1, 14))]
        if self.first_token is not None:
            prompt[0] = self.first_token
        others = [s for s in self.blocks if s != slot and self._shareable(s)]
        if not others or self.random.random() < 0.5:
            self.admit(slot, prompt)
            return
        # A prefix-cache hit: full blocks of another slot, whose key covers the tokens that
        # the drafter's KV looks ahead to.
        other = self.random.choice(others)
        count = self.random.randint(1, min(self._shareable(other), 3))
        covered = count * BLOCK_SIZE + self.drafter.lookahead_tokens
        prompt = self.tokens(other)[:covered] + prompt
        self.admit(slot, prompt, tuple(self.blocks[other][:count]))
        self.counts.cached += 1

    def _shareable(self, slot: int) -> int:
        return int(self.sequences.num_computed[slot]) // BLOCK_SIZE

    def _row(self, slot: int) -> ScheduledRequest:
        left = int(self.sequences.num_tokens[slot] - self.sequences.num_computed[slot])
        query = self.random.randint(1, left)
        return ScheduledRequest(slot, query, self.random.randint(0, self.k), query == left)

    def _step(self, rows: list[ScheduledRequest], vocab: int, check: Callable) -> None:
        self.step_id += 1
        plan = StepPlan(
            self.step_id,
            requests=tuple(sorted(rows, key=_is_chunk)),
            num_wanted=self.num_wanted[self.step_id % len(self.num_wanted)],
        )
        step = Step(
            sequences=self.sequences,
            model=self.target,
            kv=self.kv,
            kernels=self.kernels,
            ops=STEPS[self.steps],
            table=self.table,
            drafter=_Checked(self, vocab, check),
            results=self.results,
            all_states=True,
        )
        drafts = step.ops.known_drafts(self.sequences, [row.slot for row in plan.requests])
        launcher = launcher_of(noted(step, self._count), self.steps)
        layout = StepLayout.of(plan, drafts, all_states=step.all_states)
        launcher.run(layout, 0, _NoProcessing())

    def _count(self, x, raw, verified) -> None:
        if not self.spoil:
            self.counts.offered += int(x.num_drafts.sum())
            self.counts.accepted += int(verified.num_accepted.sum())

    def poison(self, context: DraftContext) -> None:
        for b, slot in requests_of(context):
            self.sequences.token_ids[slot, int(self.sequences.num_tokens[slot]) :] = NOT_A_TOKEN
            blocks = torch.tensor(self.blocks[slot])
            where = torch.arange(int(context.x.num_computed[b]), MAX_LEN)
            for cache in self.drafter.kv_caches:
                for memory in cache.blocks:
                    memory[:, blocks[where // BLOCK_SIZE], :, where % BLOCK_SIZE] = torch.nan

    def spoilt(self, context: DraftContext, drafts: Drafts, vocab: int) -> Drafts:
        """The drafts, some of them with a wrong token at a random place."""
        ids = drafts.draft_ids.clone()
        for b, _ in requests_of(context):
            if self.random.random() < self.spoil:
                at = self.random.randrange(self.k)
                ids[b, at] = (ids[b, at] + 1) % vocab
        return Drafts(ids, drafts.num_drafts)


def require_all_accepted(bench: Bench, steps: int, vocab: int) -> None:
    bench.run(steps, vocab, lambda context, drafts: None)
    assert bench.counts.accepted == bench.counts.offered > 30


def require_lookahead_slots(bench: Bench, steps: int, vocab: int, beyond: int) -> None:
    """KV is written so far above the committed tokens, as the drafter says, and no further."""
    assert bench.drafter.lookahead_slots == max(beyond, 0)

    def check(context: DraftContext, drafts: Drafts) -> None:
        (cache,) = bench.drafter.kv_caches
        for b, slot in requests_of(context):
            written = int(context.end[b])
            if context.samples[b]:
                written = int(context.num_tokens[b]) + beyond
            keys = bench.cached(cache, slot, MAX_LEN)[0, 0, :, 0, 0]
            assert not keys[:written].isnan().any()
            assert keys[written:].isnan().all()

    bench.run(steps, vocab, check)


def requests_of(context: DraftContext) -> list[tuple[int, int]]:
    """Place and slot of each request, without padding."""
    padding = context.sequences.reserved_slot
    return [(b, slot) for b, slot in enumerate(context.slots.tolist()) if slot != padding]


def _is_chunk(row: ScheduledRequest) -> bool:
    return row.num_query > 1 or not row.samples


@dataclass
class _Checked:
    """The bench's drafter between what poisons, checks and spoils."""

    bench: Bench
    vocab: int
    check: Callable[[DraftContext, Drafts], None]

    def propose(self, context: DraftContext) -> Drafts:
        self.bench.poison(context)
        drafts = self.bench.drafter.propose(context)
        assert drafts.draft_ids.shape == (len(context.slots), self.bench.k)
        assert not drafts.num_drafts[~context.samples].any()
        self.check(context, drafts)
        return self.bench.spoilt(context, drafts, self.vocab)


class _NoProcessing:
    """``StepLogitsProcessor`` of requests without logits options."""

    def start_masks(self) -> None:
        pass

    def process(self, output) -> None:
        pass

    def gather_logprobs(self, tokens) -> None:
        pass
