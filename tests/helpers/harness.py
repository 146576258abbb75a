"""An engine over a toy or tiny target, with every part open to a test."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import cycle
from types import SimpleNamespace

import torch

from helpers.recorded import emitted_rows, noted, watched
from helpers.recurrent import poison
from helpers.static_steps import STEPS, captured_shapes_of, chosen_steps, launcher_of
from helpers.toy import ToyHead
from sametoken.drafters.base import Drafts, NoDrafter
from sametoken.drafters.context import Coupling
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.drafters.state_head import StateDrafter
from sametoken.engine.core import EngineCore
from sametoken.ops.cache_types import common_window
from sametoken.ops.reference import ReferenceKernels
from sametoken.runner.async_output import OutputRing
from sametoken.runner.kept_states import KeptStateStore
from sametoken.runner.logits_processing import LogitsProcessing
from sametoken.runner.runner import StepRunner
from sametoken.runner.step import Step
from sametoken.runner.stream import ImmediateStream, LaggingStream
from sametoken.runner.swap import SwapStore
from sametoken.sampling.grammar_masks import SlotGrammars
from sametoken.scheduler.draft_limits import StepReads
from sametoken.scheduler.limits import SchedulerLimits
from sametoken.scheduler.scheduler import Scheduler
from sametoken.scheduler.swap_space import NO_FILE, BlockFile
from sametoken.state.caches import ModelCache
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import NO_HISTORY, Sequences, TokenHistory
from sametoken.types.plan import Admission, StepPlan
from sametoken.types.request import EngineRequest
from sametoken.types.sampling_params import SamplingParams

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """Sizes of a test engine; small enough that every limit is met.

    With ``captures``, draft limits of static steps follow captured shapes.
    """

    num_drafts: int = 3
    steps_in_flight: int = 1
    max_num_seqs: int = 3
    max_num_batched_tokens: int = 24
    prefill_chunk_size: int = 8
    usual_rows: int = 0
    block_size: int = 4
    num_blocks: int = 60
    num_host_blocks: int = 60
    num_idle_host_blocks: int = 0
    max_model_len: int = 96
    prefix_caching: bool = True
    cache_emitted: bool = True
    rows_per_weight_read: int = 32
    free_rows: int = 16
    draft_share: float = 0.0
    num_kept_states: int = 0
    captures: bool = False


@dataclass
class Parts:
    """What a test may replace before the engine is put together, or look at after."""

    sequences: Sequences
    table: SamplingTable
    kernels: ReferenceKernels
    shape: Shape
    expected: dict[int, list[int]] = field(default_factory=dict)


class ScriptedDrafter:
    """Proposes right or wrong tokens by a script: it knows what each slot will emit."""

    kv_caches: tuple[ModelCache, ...] = ()
    lookahead_slots = 0
    lookahead_tokens = 0

    def __init__(self, parts: Parts, script: str, seed: int = 0) -> None:
        self.parts, self.script, self.random = parts, script, random.Random(seed)
        self.turn = 0

    def propose(self, context) -> Drafts:
        batch, k = context.slots.shape[0], context.num_speculative_tokens
        draft_ids = torch.zeros((batch, k), dtype=torch.int64)
        num_drafts = torch.zeros(batch, dtype=torch.int64)
        for b, slot in enumerate(context.slots.tolist()):
            if slot == self.parts.sequences.reserved_slot:
                continue
            self.turn += 1
            n = int(context.num_tokens[b])
            truth = self.parts.expected[slot][n : n + k]
            drafts = self._script(truth + [0] * (k - len(truth)))[: context.num_wanted]
            draft_ids[b, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
            num_drafts[b] = len(drafts) if bool(context.samples[b]) else 0
        return Drafts(draft_ids, num_drafts)

    def _script(self, truth: list[int]) -> list[int]:
        wrong = [(token + 1) % 7 for token in truth]
        if self.script == "right":
            return truth
        if self.script == "wrong":
            return wrong
        if self.script == "alternating":
            return truth if self.turn % 2 else wrong
        if self.script == "empty":
            return truth if self.turn % 3 == 0 else []
        if self.script == "mixed":
            good = self.random.randint(0, len(truth))
            return (truth[:good] + wrong[good:])[: self.random.randint(0, len(truth))]
        raise ValueError(self.script)


def draft_model(parts: Parts, model) -> DraftModelDrafter:
    """A drafter that runs ``model`` over KV of its own, coupled with the target's noise."""
    kv = allocate(model.caches, parts.shape, parts.shape.num_drafts)
    coupling = Coupling(parts.kernels.sample, parts.table)
    return DraftModelDrafter(model, kv, parts.shape.num_drafts, coupling)


def state_head(parts: Parts, model) -> StateDrafter:
    """A head without KV that knows what the toy ``model`` will say."""
    coupling = Coupling(parts.kernels.sample, parts.table)
    head = ToyHead(parts.kernels, (), (), None, model)
    return StateDrafter(head, parts.shape.num_drafts, coupling)


def build(
    model,
    shape: Shape,
    *,
    make_drafter: Callable[[Parts], object] | None = None,
    oracle: Callable[[Admission], list[int]] | None = None,
    stream=None,
    kernels=None,
    history: TokenHistory = NO_HISTORY,
    steps: str | None = None,
    make_file: Callable[[SwapStore], BlockFile] | None = None,
) -> EngineCore:
    """Put an engine together by hand; ``steps`` is one of ``STEPS``."""
    kernels = kernels or ReferenceKernels()
    steps = steps or chosen_steps()
    k = shape.num_drafts if make_drafter else 0
    max_len = shape.max_model_len + k + 2
    sequences = Sequences.allocate(
        max_num_seqs=shape.max_num_seqs,
        max_len=max_len,
        num_drafts=k,
        block_size=shape.block_size,
        reserved_block=shape.num_blocks,
        device=CPU,
    )
    table = SamplingTable.allocate(shape.max_num_seqs, CPU)
    parts = Parts(sequences, table, kernels, shape)
    drafter = make_drafter(parts) if make_drafter else NoDrafter()
    kv = allocate(model.caches, shape, k)
    for cache in drafter.kv_caches:
        poison(cache)
    limits = SchedulerLimits(
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        longest_chunk=shape.prefill_chunk_size,
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        num_host_blocks=shape.num_host_blocks,
        num_idle_host_blocks=shape.num_idle_host_blocks,
        max_model_len=shape.max_model_len,
        num_speculative_tokens=k,
        adaptive_drafts=True,
        reads=StepReads(
            shape.rows_per_weight_read,
            dead_rows=not shape.draft_share,
            free_rows=shape.free_rows,
            draft_share=shape.draft_share,
            catch_up_share=shape.draft_share / 2,
        ),
        busy_rows=10 * shape.rows_per_weight_read,
        usual_rows=shape.usual_rows or shape.max_num_batched_tokens,
        lookahead_slots=drafter.lookahead_slots,
        lookahead_tokens=drafter.lookahead_tokens,
        sliding_window=common_window(model.caches) or 0,
        enable_prefix_caching=shape.prefix_caching,
        cache_emitted_blocks=shape.cache_emitted,
        num_kept_states=shape.num_kept_states,
        captured_shapes=captured_shapes_of(steps, shape.max_num_seqs, k) if shape.captures else (),
    )
    if stream is None:
        stream = ImmediateStream() if shape.steps_in_flight == 1 else LaggingStream()
    ring = OutputRing.allocate(shape.steps_in_flight + 1, shape.max_num_seqs, k)
    step = Step(
        sequences=sequences,
        model=model,
        kv=kv,
        kernels=kernels,
        ops=STEPS[steps],
        table=table,
        drafter=drafter,
        results=ring.rows,
        # Some heads read states after the last layer.
        all_states=bool(drafter.kv_caches),
    )
    processing = LogitsProcessing(sequences, model, kernels, table, SlotGrammars(sequences))
    accepted_logits: list[tuple[int, int, torch.Tensor]] = []

    def note(x, raw, verified) -> None:
        for slot, position, row in emitted_rows(x, verified):
            accepted_logits.append((slot, position, raw[row]))

    def see(admission) -> None:
        if oracle is not None:
            parts.expected[admission.slot] = [*admission.prompt_token_ids, *oracle(admission)]

    step = noted(step, note)
    caches = (kv, *drafter.kv_caches)
    swap = SwapStore(caches, 2**24, pinned=False)
    states = KeptStateStore(caches, shape.num_kept_states)
    for memory in (memory for one in states.caches for memory in one.kept):
        memory.fill_(float("nan"))
    runner = StepRunner(
        step=step,
        processing=watched(processing, see),
        launcher=launcher_of(step, steps),
        swap=swap,
        kept_states=states,
        stream=stream,
        ring=ring,
        history=history,
    )
    resolved = SimpleNamespace(steps_in_flight=shape.steps_in_flight)
    scheduler = Scheduler(limits, make_file(swap) if make_file else NO_FILE)
    core = EngineCore(resolved, scheduler, runner)
    core.parts, core.accepted_logits = parts, accepted_logits
    return core


def allocate(caches, shape: Shape, k: int) -> ModelCache:
    """What layers keep in an engine of that shape, full of NaN."""
    cache = ModelCache.allocate(
        caches,
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        max_num_seqs=shape.max_num_seqs,
        num_drafts=k,
        device=CPU,
    )
    return poison(cache)


def request(
    request_id: str, prompt, max_tokens: int = 12, max_drafts: int | None = None, **params
) -> EngineRequest:
    params.setdefault("temperature", 0.0)
    params.setdefault("seed", 0)
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=sampling,
        max_total_tokens=len(prompt) + max_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        num_speculative_tokens=max_drafts,
    )


def requests_of(prompts, max_tokens: int, *temperatures: float, **params) -> list[EngineRequest]:
    """One of each prompt, with a seed of its own; the temperatures, by default 0, take turns."""
    turns = cycle(temperatures or (0.0,))
    return [
        request(f"r{i}", prompt, max_tokens, temperature=temperature, seed=i, **params)
        for i, (prompt, temperature) in enumerate(zip(prompts, turns, strict=False))
    ]


@dataclass
class Ran:
    """Emitted tokens by request, cut at the length limit, and the counters."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    offered: int = 0
    accepted: int = 0


def run(core: EngineCore, requests, max_steps: int = 2000) -> Ran:
    """Drive requests to their length limits."""
    ran = Ran()
    limits = {}
    for item in requests:
        core.add_request(item)
        limits[item.request_id] = item.max_total_tokens - len(item.prompt_token_ids)
        ran.tokens[item.request_id] = []
    for _ in range(max_steps):
        if not core.has_unfinished:
            core.scheduler.check_integrity()
            return ran
        collect(core, ran, limits)
    raise AssertionError("the engine does not finish")


@lru_cache(maxsize=256)
def alone(model, prompt: tuple[int, ...], params: SamplingParams, kernels=None) -> list[int]:
    """What a request says by itself, without drafts, and eight tokens more."""
    shape = Shape(max_num_seqs=1, prefix_caching=False, cache_emitted=False)
    core = build(model, shape, kernels=kernels, steps="compact")
    item = replace(request("alone", prompt, params.max_tokens + 8), params=params)
    return run(core, [item]).tokens["alone"]


def truth(model, items, kernels=None) -> dict[str, list[int]]:
    """What each of these requests says by itself."""
    said = {one: alone(model, one.prompt_token_ids, one.params, kernels) for one in items}
    return {one.request_id: tokens[: one.params.max_tokens] for one, tokens in said.items()}


def scripted(model, script: str, kernels=None) -> dict:
    """Options of ``build``: drafts by a script, which knows what requests say by themselves."""
    return {
        "make_drafter": lambda parts: ScriptedDrafter(parts, script),
        "oracle": lambda asked: alone(model, asked.prompt_token_ids, asked.params, kernels),
    }


def swapped_by(core: EngineCore, monkeypatch) -> list:
    """What an engine swaps out from now on; grows as it runs."""
    swap, swapped = core._runner.swap, []
    move_out = swap.move_out
    monkeypatch.setattr(swap, "move_out", lambda p: (swapped.extend(p.swap_outs), move_out(p)))
    return swapped


def counted(core: EngineCore, part: str) -> list[int]:
    """Lengths of a part of every plan that the engine makes from now on; grows as it runs."""
    return _noted(core, lambda plan: len(getattr(plan, part)))


def replayed_by(core: EngineCore) -> list[int]:
    """How many positions every plan from now on computes again, as their KV was lost."""
    return _noted(core, lambda plan: sum(one.num_query for one in plan.requests if one.replays))


def _noted(core: EngineCore, count: Callable[[StepPlan], int]) -> list[int]:
    plan, counts = core.scheduler.plan, list[int]()

    def noting() -> StepPlan | None:
        made = plan()
        counts.append(count(made) if made else 0)
        return made

    core.scheduler.plan = noting
    return counts


def collect(core: EngineCore, ran: Ran, limits: dict[str, int]) -> None:
    """One engine step; requests that reach their limit are released."""
    for update in core.step():
        ran.offered += update.num_drafts
        ran.accepted += update.num_accepted
        out = ran.tokens[update.request_id]
        out.extend(update.token_ids)
        if len(out) >= limits[update.request_id]:
            del out[limits[update.request_id] :]
            core.release(update.request_id)
