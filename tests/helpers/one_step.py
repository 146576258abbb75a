"""One step over requests that are written down, run as an engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from helpers.recorded import noted
from helpers.static_steps import STEPS, DeviceChoices, launcher_of
from helpers.toy import toy_config
from sametoken.drafters.base import NoDrafter
from sametoken.layers.parallel import SINGLE_RANK
from sametoken.layers.residual import kept_of
from sametoken.models.base import HiddenStates
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.step.reference import write_tables
from sametoken.ops.step.types import Chances, StepInputs, VerifyResult
from sametoken.runner.async_output import HostBuffer, OutputRing
from sametoken.runner.logits_processing import LogitsProcessing
from sametoken.runner.step import Step
from sametoken.sampling.grammar_masks import SlotGrammars
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences
from sametoken.state.slots import admit
from sametoken.types.layout import StepLayout
from sametoken.types.plan import Admission, ScheduledRequest, StepPlan
from sametoken.types.sampling_params import SamplingParams

CPU = torch.device("cpu")
GARBAGE = 3  # What lies above num_tokens: a valid id, so that reading it is not an error.


@dataclass(frozen=True)
class Row:
    """One request: what is committed in its slot and what its window offers."""

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_query: int = 1
    samples: bool = True
    num_computed: int | None = None
    grammar: object | None = None
    prompt_temperature: float = 1.0

    @property
    def window(self) -> int:
        return len(self.drafts) + 1 if self.samples else 0

    def admission(self, slot: int) -> Admission:
        return Admission(
            slot, self.prompt, 0, self.params, self.stop_ids, self.bad_words, self.grammar,
            prompt_temperature=self.prompt_temperature,
        )  # fmt: skip


class Said:
    """A target whose logits are given by slot and position, and else by a function of the token."""

    caches = ()

    def __init__(self, vocab_size: int, by_token: Callable[[Tensor], Tensor] | None) -> None:
        self.config = toy_config(vocab_size)
        self.rows: dict[tuple[int, int], Tensor] = {}
        self._by_token = by_token

    def forward(self, token_ids, rows, kv, kept=None) -> HiddenStates:
        last = torch.stack((rows.slots, rows.positions, token_ids), dim=1).double()
        return HiddenStates(kept_of(last, kept), last[:, :0])

    def compute_logits(self, hidden) -> Tensor:
        is_dead, at = hidden[:, :1].isnan(), hidden.nan_to_num(0).long()
        if self._by_token is not None:
            return self._by_token(at[:, 2]).masked_fill(is_dead, torch.nan)
        logits = torch.full((len(at), self.config.vocab_size), torch.nan)
        for row, (slot, position, _) in zip(logits, at.tolist(), strict=True):
            if (slot, position) in self.rows:
                row.copy_(self.rows[slot, position])
        return logits.masked_fill(is_dead, torch.nan)


@dataclass(frozen=True)
class Ran:
    """What became of a step: what ``verify`` gave, and logits as tokens were chosen of them."""

    x: StepInputs
    verified: VerifyResult
    processed: Tensor
    buffer: HostBuffer
    tokens: list[tuple[int, ...]]
    failed: list[bool]
    mask_fault: list[int]


class Keeping(DeviceChoices):
    """Keeps the logits of which tokens are chosen."""

    def __init__(self, kernels) -> None:
        self.kept, self._kernels = None, kernels

    def truncate(self, *arguments) -> None:
        self._kernels.truncate(*arguments)

    def sample(self, *arguments) -> Tensor:
        return self._kernels.sample(*arguments)

    def token_keys(self, logits, *arguments) -> Tensor:
        self.kept = logits.clone()
        return self._kernels.token_keys(logits, *arguments)


@dataclass(frozen=True)
class Case:
    """Requests in their slots, before a step over all of them."""

    rows: tuple[Row, ...]
    slots: tuple[int, ...]
    sequences: Sequences
    table: SamplingTable
    grammars: SlotGrammars

    @property
    def num_logits(self) -> int:
        return sum(row.window for row in self.rows)

    @property
    def plan(self) -> StepPlan:
        pairs = zip(self.slots, self.rows, strict=True)
        return StepPlan(
            0,
            requests=tuple(
                ScheduledRequest(s, r.num_query, len(r.drafts), r.samples) for s, r in pairs
            ),
        )

    def run(
        self,
        logits: Tensor | None = None,
        *,
        by_token: Callable[[Tensor], Tensor] | None = None,
        vocab_size: int = 0,
        steps: str = "compact",
        chances: Chances | None = None,
        parallel=SINGLE_RANK,
        ops=None,
        logprobs_mode: str = "raw_logprobs",
    ) -> Ran:
        """One whole step in one of ``STEPS``; the logits of its windows are given."""
        vocab_size = logits.shape[1] if logits is not None else vocab_size
        model = Said(vocab_size, by_token)
        kernels = Keeping(DeviceChoices() if steps == "kernels" else ReferenceKernels())
        ring = OutputRing.allocate(1, len(self.rows), self.sequences.num_speculative_tokens)
        seen: list = []
        step = Step(
            sequences=self.sequences,
            model=model,
            kv=None,
            kernels=kernels,
            ops=ops or STEPS[steps],
            table=self.table,
            drafter=NoDrafter(),
            results=ring.rows,
            chances=chances,
            parallel=parallel,
        )
        step = noted(step, lambda x, raw, verified: seen.append((x, verified)))
        if logits is not None:
            model.rows.update(self._by_place(logits))
        processing = LogitsProcessing(
            self.sequences, model, kernels, self.table, self.grammars, parallel, logprobs_mode
        )
        known = step.ops.known_drafts(self.sequences, list(self.slots))
        all_states = processing.scores_prompts(self.plan)
        layout, buffer = StepLayout.of(self.plan, known, all_states=all_states), ring.acquire()
        launcher_of(step, steps).run(layout, 0, processing.of_step(layout, buffer))
        ((x, verified),) = seen
        results = buffer.read(self.plan).requests
        count = self.num_logits
        verified = replace(verified, tokens=verified.tokens[:count])
        return Ran(
            x=x,
            verified=verified,
            processed=kernels.kept[:count],
            buffer=buffer,
            tokens=[row.token_ids for row in results],
            failed=[row.failed for row in results],
            mask_fault=[int(row.mask_fault) for row in results],
        )

    def _by_place(self, logits: Tensor):
        index = 0
        for slot, row in zip(self.slots, self.rows, strict=True):
            first = len(row.prompt) + len(row.output) - 1
            for offset in range(row.window):
                yield (slot, first + offset), logits[index]
                index += 1


def case_of(rows: Sequence[Row], slots: Sequence[int] | None = None) -> Case:
    """Commit the rows' tokens to their slots, descending unless given; windows come first."""
    rows = sorted(rows, key=lambda row: row.num_query > 1 or not row.samples)
    count = len(rows) + 2
    slots = slots or [count - 1 - index for index in range(len(rows))]
    width = max(len(row.drafts) for row in rows) + 1
    longest = max(len(row.prompt) + len(row.output) for row in rows) + width + 1
    sequences = Sequences.allocate(
        max_num_seqs=count,
        max_len=longest,
        num_drafts=width,
        block_size=4,
        reserved_block=0,
        device=CPU,
    )
    sequences.token_ids[:-1] = GARBAGE
    sequences.draft_ids[:-1] = GARBAGE
    table, grammars = SamplingTable.allocate(count, CPU), SlotGrammars(sequences)
    for slot, row in zip(slots, rows, strict=True):
        admission = row.admission(slot)
        write_tables(admit(sequences, admission) + table.admit(admission))
        grammars.admit(admission)
        num_tokens = len(row.prompt) + len(row.output)
        first = num_tokens - row.num_query if row.num_computed is None else row.num_computed
        sequences.token_ids[slot, :num_tokens] = torch.tensor(row.prompt + row.output)
        sequences.num_tokens[slot] = num_tokens
        sequences.num_computed[slot] = first
        sequences.num_drafts[slot] = len(row.drafts)
        sequences.draft_ids[slot, : len(row.drafts)] = torch.tensor(row.drafts, dtype=torch.int64)
    return Case(tuple(rows), tuple(slots), sequences, table, grammars)
