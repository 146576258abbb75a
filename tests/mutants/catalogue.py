"""Bugs that other engines have shipped, each as a change of this one that a test must notice.

A mutant that changes tokens is caught by them. Most drafter bugs change no token at all:
those are caught by acceptance, or by a test of one position. Where a guard of the engine
raises before anything goes wrong, the mutant is there twice, the second time without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from sametoken.drafters import eagle
from sametoken.drafters.combined import CascadeDrafter, SharedDrafter
from sametoken.drafters.context import DraftContext
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.drafters.eagle import EagleDrafter
from sametoken.extraction.writer import StateWriter, _Sequence
from sametoken.layers.latent_attention import LatentAttention
from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.heads.nextn import NextNHead
from sametoken.ops.backend import LayerKV
from sametoken.ops.model.attention import triton as attention_triton
from sametoken.ops.model.attention.arithmetic import with_sink
from sametoken.ops.model.attention.kv import as_read
from sametoken.ops.model.recurrent.layout import SlotRows
from sametoken.ops.model.recurrent.row_by_row import RowByRowPass
from sametoken.ops.model.recurrent.rule import Folded
from sametoken.ops.native.layer import NativeLayer
from sametoken.ops.native.recurrent import NativePass, part_table
from sametoken.ops.reference import ComposedKernels, ReferenceKernels
from sametoken.ops.sampling.logits_rules_reference import apply_rules
from sametoken.ops.sampling.sample import has_nan
from sametoken.ops.step import compact, reference
from sametoken.ops.step import triton as in_triton
from sametoken.ops.step.types import HAS_NAN, LayoutTable, StepInputs
from sametoken.runner import async_output, runner, step
from sametoken.runner.adapters import AdaptedSteps, AdaptedTarget
from sametoken.runner.async_output import HostBuffer, OutputRing, PendingOutput
from sametoken.runner.kept_states import CacheStates, KeptStates
from sametoken.runner.routed_experts import RecordingKernels, StepExperts
from sametoken.runner.step import Step
from sametoken.runner.swap import SwapStore
from sametoken.sampling.grammar_masks import Cursor, SlotGrammars
from sametoken.scheduler.block_pool import block_keys
from sametoken.scheduler.kv_memory import KVMemory
from sametoken.scheduler.request_state import RequestState
from sametoken.state import commit
from sametoken.text.grammar.after_reasoning import MatcherAfterReasoning, _Place
from sametoken.types.layout import DRAFT_LIMIT, PLACE, STEP_ID
from sametoken.types.length_bound import LenBound

FEW = "tests/e2e/test_same_tokens.py::test_few_requests"
TWO_RANKS = "tests/e2e/test_tensor_parallel.py::test_the_same_tokens"
ACCEPTANCE = (
    "tests/e2e/test_acceptance.py::test_exactly_the_drafts_before_the_spoilt_one_are_accepted"
)
SELF, LOOKAHEAD = (f"{ACCEPTANCE}[{kind}-1-late-0.0]" for kind in ("self", "lookahead"))
PREFIXES = "tests/e2e/test_acceptance.py::test_shared_prefixes_and_chunk_edges_cost_no_acceptance"
EAGLE_HEAD = (
    "tests/unit/drafters/test_eagle.py"
    "::test_kv_and_drafts_are_those_of_a_run_from_scratch[eagle3-3-0.0-flags4]"
)
MTP_MODULE = (
    "tests/unit/drafters/test_eagle.py"
    "::test_a_module_s_kv_and_drafts_are_those_of_a_run_from_scratch[qwen3_5-3-0.8]"
)
BACKUP_TOKEN = (
    "tests/regression/test_vllm_38419.py::test_a_draft_chain_goes_on_from_the_committed_token[3]"
)
TRAINED_BACKUP_TOKEN = (
    "tests/regression/test_vllm_38419.py::test_so_does_that_of_a_trained_nemotron[3]"
)
TRAINED_COPY = "tests/regression/test_vllm_38556.py::test_so_they_do_over_a_trained_nemotron"
COPY_IN_FLIGHT = (
    "tests/regression/test_vllm_38556.py"
    "::test_requests_come_and_go_while_results_are_on_their_way[late]"
)
STALE_METADATA = "tests/regression/test_vllm_38311.py::test_every_draft_position_is_accepted[1]"
TRIMMED_LENGTHS = (
    "tests/regression/test_tokenspeed_318.py"
    "::test_rejected_drafts_leave_nothing_in_the_module_s_rows[qwen3_5-4]"
)
NEXTN_LENGTHS = TRIMMED_LENGTHS.replace("qwen3_5", "deepseek")
NEXTN = (
    "tests/unit/models/heads/test_nextn.py"
    "::test_logits_and_states_are_those_of_the_definition[reference]"
)
SINKS_ONCE = (
    "tests/unit/ops/model/attention/test_triton.py"
    "::test_sinks_join_once_whatever_the_number_of_splits[None-config1]"
)
SHARED_HEAD = (
    "tests/e2e/test_shared_weight_updates.py::test_a_shared_lm_head_follows_the_target[2-False]"
)
WHOLE_LAYER = (
    "tests/unit/ops/native/test_layer.py::test_a_whole_layer_keeps_every_option[window-bf16]"
)
FLOAT8_ROWS = (
    "tests/unit/ops/model/attention/test_kv.py"
    "::test_a_row_reads_what_is_stored_in_any_step[reference-fp32]"
)
SINKS_BITS = (
    "tests/e2e/test_parity_families.py::test_a_row_has_the_same_bits_in_every_chunk[gpt_oss-dtype0]"
)
EXPANDED = "tests/e2e/test_expanded_prompts.py::test"
ADAPTERS = "tests/e2e/test_lora.py::test"
ADAPTED = f"{ADAPTERS}_drafts_chunks_and_other_adapters_change_no_bit[spec1-compact-3]"
OTHER_PREFIXES = f"{ADAPTERS}_prefixes_are_shared_by_requests_of_one_adapter_alone"
REPLAYED = f"{EXPANDED}_what_is_computed_again_has_the_form_that_it_had"
CONVERSATION = f"{EXPANDED}_a_conversation_reads_no_block_of_another_form"
LATENT_BITS = SINKS_BITS.replace("gpt_oss", "deepseek_v3")
ZERO_DRAFTS = (
    "tests/regression/test_vllm_39273.py::test_a_step_without_drafts_after_accepted_drafts"
)
TRAINED_ZERO_DRAFTS = (
    "tests/regression/test_vllm_39273.py"
    "::test_the_reported_request_on_a_trained_hybrid[nemotron-h-31m-0.8]"
)
SLOT_REUSE = (
    "tests/e2e/test_recurrent_slots.py::test_a_slot_s_next_request_sees_nothing_of_the_last"
)
STRUCTURED = (
    "tests/e2e/test_structured_outputs.py"
    "::test_drafts_of_the_right_form_that_are_wrong_leave_no_trace"
)
EARLY_END = "tests/e2e/test_reasoning_first.py::test_the_end_in_a_rejected_draft_ends_nothing[0]"
EXTRACTED = (
    "tests/unit/extraction/test_writer.py"
    "::test_rows_of_kept_tokens_are_written_and_rows_past_the_end_are_not"
)
TOKEN_MAP = (
    "tests/e2e/test_draft_heads.py::test_a_twin_is_right_wherever_the_map_has_the_token[3-0]"
)
EXPERTS = (
    "tests/e2e/test_routed_experts.py"
    "::test_rows_of_padding_and_of_rejected_drafts_are_not_among_them[static-1]"
)
FORMER_DRAFTS = "tests/e2e/test_acceptance.py::test_a_slot_s_next_request_has_no_drafts_at_first"
KEPT_STATE = "tests/e2e/test_kept_states.py::test_a_chat_goes_on_from_its_last_answer[right]"
LAW = "the law: one truth"
#: Layouts of steps (``helpers.static_steps``).
COMPACT, STATIC, KERNELS = "compact", "static", "kernels"
#: Those in one of which tests that use ``layouts`` run.
LAYOUTS = COMPACT, STATIC
WINDOW = (
    "tests/e2e/test_sliding_window.py"
    "::test_requests_share_the_blocks_that_they_no_longer_see[right-1]"
)
REPLAY = (
    "tests/e2e/test_swap.py"
    "::test_without_room_on_the_host_what_was_lost_is_computed_again[ToyModel-1]"
)
IDLE_PREFIX = "tests/e2e/test_swap.py::test_idle_prefixes_go_to_host_memory_and_return"
NEMOTRON = "tests/e2e/test_nemotron_h_engine.py"
NEMOTRON_TWIN = f"{NEMOTRON}::test_a_module_that_is_its_target_s_twin_is_always_accepted[8-5-1]"
NEMOTRON_END = f"{NEMOTRON}::test_a_request_may_end_at_the_longest_length"
NEMOTRON_KEPT = f"{NEMOTRON}::test_a_kept_state_serves_the_next_turn"
PREEMPTION = "tests/e2e/test_acceptance.py::test_preemption_costs_no_acceptance"


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes:
        issue: where it was met, or the part of the law that it breaks.
        test: the test that must fail.
        oracle: what catches it: "tokens"; "acceptance"; "position", a check of what one row
            reads (unwritten KV is poisoned); or "guard", a check of the engine itself.
        steps: the layout of steps in which the test runs. Compact and static ones share their
            code, except for the rows that drafters catch up on; kernels have their own.
        plant: makes the change.
    """

    name: str
    issue: str
    test: str
    oracle: str
    steps: str
    plant: Callable[[pytest.MonkeyPatch], None]


MUTANTS: list[Mutant] = []


def mutant(
    name: str, issue: str, test: str, oracle: str, steps: str = COMPACT, **options: Any
) -> Callable[[Callable], Callable]:
    """Enter what plants a bug, with these options, into the catalogue."""

    def enter(plant: Callable) -> Callable:
        MUTANTS.append(Mutant(name, issue, test, oracle, steps, partial(plant, **options)))
        return plant

    return enter


def substitute(patch: pytest.MonkeyPatch, original: Any, mutant: Any) -> None:
    """Bind a function anew in every module of the package that has imported it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "sametoken":
            for attribute, value in list(vars(module).items()):
                if value is original:
                    patch.setattr(module, attribute, mutant)


def in_every_program(
    patch: pytest.MonkeyPatch,
    name: str,
    make: Callable[[Callable], Callable],
    programs: tuple[Any, ...] = (compact, reference, in_triton),
) -> None:
    """Make a mutant of each program of an operation of the step."""
    for program in programs:
        patch.setattr(program, name, make(getattr(program, name)))


def with_inputs(
    patch: pytest.MonkeyPatch, change: Callable[[StepInputs, LayoutTable], StepInputs]
) -> None:
    """Change the inputs of every step."""

    def make(prepare):
        return lambda sequences, layout: change(prepare(sequences, layout), layout)

    in_every_program(patch, "prepare_inputs", make)


@mutant("another-row-kept-by-the-last-layer", LAW, WINDOW, "tokens")
@mutant("another-row-kept-in-static-shapes", LAW, WINDOW, "tokens", STATIC)
def kept_rows_are_one_too_early(patch: pytest.MonkeyPatch) -> None:
    def change(x, layout):
        kept = x.kept and replace(x.kept, index=(x.kept.index - 1).clamp(min=0))
        return replace(x, kept=kept)

    with_inputs(patch, change)


def optimistic_end(x: StepInputs) -> torch.Tensor:
    """What would be computed if every draft of the step were accepted."""
    return x.num_computed + x.num_query + x.num_drafts


# Lengths


@mutant(
    "optimistic-length-taken-for-exact",
    "vllm#38419",
    "tests/unit/types/test_length_bound.py::test_an_unsettled_length_cannot_be_used_as_an_index",
    "guard",
)
def exact_is_the_upper_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LenBound, "exact", property(lambda self: self.hi))


@mutant("backup-token-from-optimistic-length", "vllm#38419", SELF, "acceptance", STATIC)
def chain_starts_at_the_optimistic_length(patch: pytest.MonkeyPatch) -> None:
    propose = DraftModelDrafter.propose

    def mutant(self, context):
        end = torch.where(context.samples, optimistic_end(context.x), context.end)
        return propose(self, replace(context, end=end, num_tokens=end + 1))

    patch.setattr(DraftModelDrafter, "propose", mutant)


@mutant("backup-token-from-optimistic-length-under-mtp", "vllm#38419", BACKUP_TOKEN, "acceptance")
@mutant("backup-token-on-a-trained-nemotron", "vllm#38419", TRAINED_BACKUP_TOKEN, "acceptance")
def newest_token_is_read_at_the_optimistic_length(patch: pytest.MonkeyPatch) -> None:
    """Where nothing is committed yet, if a draft was rejected."""
    catch_up = DraftContext.catch_up

    def mutant(self):
        found = catch_up(self)
        owner = slice(None) if found.chains.owner is None else found.chains.owner
        token_ids = found.token_ids.clone()
        newest = self.tokens_at(self.slots[owner], optimistic_end(self.x)[owner])
        token_ids[found.chains.last.index] = newest.clamp(min=0)
        return replace(found, token_ids=token_ids)

    patch.setattr(DraftContext, "catch_up", mutant)


@mutant("drafter-lengths-not-trimmed", "tokenspeed#318", LOOKAHEAD, "acceptance")
@mutant(
    "lengths-of-an-mtp-module-not-trimmed", "tokenspeed#318", TRIMMED_LENGTHS, "acceptance", STATIC
)
@mutant("lengths-of-nextn-not-trimmed", "tokenspeed#318", NEXTN_LENGTHS, "acceptance", STATIC)
def end_counts_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    def mutant(*, x, end, **others):
        end = torch.where(x.samples, optimistic_end(x), end)
        return DraftContext(x=x, end=end, **others)

    patch.setattr(step, "DraftContext", mutant)


@mutant("drafter-rows-not-trimmed", "tokenspeed#318", LOOKAHEAD, "acceptance", STATIC)
@mutant("rows-of-an-eagle-head-not-trimmed", "tokenspeed#318", EAGLE_HEAD, "position")
@mutant("rows-of-an-mtp-module-not-trimmed", "tokenspeed#318", MTP_MODULE, "position", STATIC)
@mutant(
    "rejected-rows-extracted",
    LAW,
    "tests/unit/drafters/test_extract.py::test_rows_are_the_committed_ones_whatever_was_drafted[4]",
    "position",
    STATIC,
)
def live_rows_are_all_rows(patch: pytest.MonkeyPatch) -> None:
    """Rejected ones too, with some token wherever there is none; chains go on from the last."""

    def make(catch_up):
        def mutant(sequences, x, end, *, with_newest):
            all_rows = torch.where(x.samples, optimistic_end(x), end)
            found = catch_up(sequences, x, all_rows, with_newest=with_newest)
            chains = catch_up(sequences, x, end, with_newest=with_newest).chains
            return replace(
                found,
                token_ids=found.token_ids.clamp(min=0),
                chains=replace(chains, last=found.chains.last),
            )

        return mutant

    # The compact program takes the reference's rows.
    in_every_program(patch, "catch_up", make, (reference, in_triton))


@mutant("experts-of-rejected-drafts-returned", LAW, EXPERTS, "position")
def experts_of_all_rows_are_returned(patch: pytest.MonkeyPatch) -> None:
    def mutant(self, index, scheduled, num_accepted, of=StepExperts.of):
        return of(self, index, scheduled, scheduled.draft_limit)

    patch.setattr(StepExperts, "of", mutant)


@mutant("experts-of-a-layer-s-slices-mixed", LAW, EXPERTS, "position")
def every_slice_of_a_layer_is_its_first(patch: pytest.MonkeyPatch) -> None:
    next_part = RecordingKernels._next

    def mutant(self, num_rows):
        layer = self._num_filled // len(self._layers[0])
        next_part(self, num_rows)
        return self._layers[layer][:num_rows]

    patch.setattr(RecordingKernels, "_next", mutant)


@mutant("rows-past-the-end-extracted", LAW, EXTRACTED, "position")
def rows_past_the_end_are_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Sequence, "cut", lambda self, num_rows: None)


@mutant("rows-in-flight-extracted", LAW, EXTRACTED, "guard")
def rows_in_flight_are_recorded(patch: pytest.MonkeyPatch) -> None:
    """Those that steps in flight bring after a request has ended."""
    add = StateWriter._add

    def mutant(self, sequence, *rows):
        sequence.ended = False
        add(self, sequence, *rows)

    patch.setattr(StateWriter, "_add", mutant)


@mutant("drafter-lengths-trimmed-in-place", "tokenspeed#318", LOOKAHEAD, "position", STATIC)
@mutant(
    "lengths-of-an-mtp-module-trimmed-in-place",
    "tokenspeed#318",
    TRIMMED_LENGTHS,
    "acceptance",
    STATIC,
)
def lengths_are_trimmed_in_place(patch: pytest.MonkeyPatch) -> None:
    """The rejected drafts are taken off once more, but for the step's first row."""
    catch_up = DraftContext.catch_up

    def mutant(self):
        rejected = optimistic_end(self.x) - self.end
        first = torch.minimum(self.x.num_computed + 1, self.end)
        self.end.copy_(torch.maximum(self.end - rejected, first))
        return catch_up(self)

    patch.setattr(DraftContext, "catch_up", mutant)


@mutant("drafter-positions-advanced-in-place", "tokenspeed#318", SELF, "position", STATIC)
def positions_are_advanced_in_place(patch: pytest.MonkeyPatch) -> None:
    """A chain that steps its positions forward in the context's own tensor."""
    propose = DraftModelDrafter.propose

    def mutant(self, context):
        context.end.add_(1)
        return propose(self, context)

    patch.setattr(DraftModelDrafter, "propose", mutant)


# Commit


@mutant("rejected-drafts-committed", LAW, f"{FEW}[mixed]", "position", KERNELS)
def rejected_drafts_are_committed(patch: pytest.MonkeyPatch) -> None:
    def make(commit):
        return lambda sequences, x, _, next_token: commit(sequences, x, x.num_drafts, next_token)

    in_every_program(patch, "commit", make)


@mutant("kv-of-rejected-drafts-addressable", LAW, f"{FEW}[mixed]", "position")
def rejected_kv_counts_as_computed(patch: pytest.MonkeyPatch) -> None:
    def make(commit):
        def mutant(sequences, x, num_accepted, next_token):
            lengths = commit(sequences, x, num_accepted, next_token)
            sequences.num_computed[x.slots] = optimistic_end(x)
            return lengths

        return mutant

    in_every_program(patch, "commit", make)


@mutant("padding-committed", LAW, f"{FEW}[right]", "position", STATIC)
def padding_commits(patch: pytest.MonkeyPatch) -> None:
    """A row of padding counts as one that samples."""

    def make(commit):
        def mutant(sequences, x, num_accepted, next_token):
            samples = x.samples | (x.slots == sequences.reserved_slot)
            return commit(sequences, replace(x, samples=samples), num_accepted, next_token)

        return mutant

    in_every_program(patch, "commit", make)


@mutant("drafts-of-a-former-request", "vllm#39273", FORMER_DRAFTS, "acceptance", STATIC)
def a_slot_keeps_its_drafts(patch: pytest.MonkeyPatch) -> None:
    original = commit.admit

    def mutant(sequences, admission):
        kept = sequences.num_drafts[admission.slot].data_ptr()
        return [one for one in original(sequences, admission) if one.part.data_ptr() != kept]

    substitute(patch, original, mutant)


# Results on their way to the host


def read_at_once(self: PendingOutput) -> Any:
    result = self.buffer.read(self.plan)
    self.ring.release(self.buffer)
    return result


@mutant("host-copy-read-in-flight", "vllm#38556", f"{ACCEPTANCE}[self-3-late-0.0]", "guard")
@mutant("host-copy-read-in-flight-of-a-hybrid", "vllm#38556", COPY_IN_FLIGHT, "guard")
def copy_is_read_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingOutput, "wait", read_at_once)


@mutant("host-copy-read-in-flight-unchecked", "vllm#38556", f"{FEW}[right]", "tokens", STATIC)
@mutant("host-copy-read-in-flight-of-a-hybrid-unchecked", "vllm#38556", COPY_IN_FLIGHT, "tokens")
@mutant("host-copy-read-in-flight-of-a-trained-nemotron", "vllm#38556", TRAINED_COPY, "tokens")
def copy_is_read_in_flight_unchecked(patch: pytest.MonkeyPatch) -> None:
    """A buffer then holds zeros, or what an earlier step left in it."""
    copy_is_read_in_flight(patch)
    patch.setattr(async_output, "NOT_LANDED", 0)
    patch.setattr(HostBuffer, "clear", lambda self: None)
    read = HostBuffer.read

    def mutant(self, plan):
        with pytest.MonkeyPatch.context() as unchecked:
            unchecked.setattr(async_output, "_require_result_of", lambda step_id, found: None)
            return read(self, plan)

    patch.setattr(HostBuffer, "read", mutant)


@mutant("one-host-buffer-for-all-steps", "vllm#38556", f"{ACCEPTANCE}[self-3-ahead-0.0]", "guard")
def all_steps_share_a_buffer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OutputRing, "acquire", lambda self: self.free[0])
    patch.setattr(OutputRing, "release", lambda self, buffer: None)


# Inputs


@mutant("stale-inputs-replayed", "vllm#38311", f"{FEW}[right]", "guard", STATIC)
@mutant(
    "stale-inputs-replayed-unchecked",
    "vllm#38311",
    f"{FEW}[right]",
    "position",
    KERNELS,
    checked=False,
)
def inputs_are_replayed(patch: pytest.MonkeyPatch, *, checked: bool = True) -> None:
    """As a graph does that keeps the tensors of the step it was captured in."""
    kept: dict[Any, StepInputs] = {}

    def replay(x, layout):
        former = replace(kept.setdefault(layout.shape, x), places=x.places)
        return former if checked else replace(former, step_ids=x.step_ids)

    with_inputs(patch, replay)


@mutant("stale-layout-replayed", "vllm#38311", f"{FEW}[right]", "guard", STATIC)
@mutant(
    "stale-layout-replayed-unchecked",
    "vllm#38311",
    f"{FEW}[right]",
    "tokens",
    checked=False,
)
def layouts_are_replayed(patch: pytest.MonkeyPatch, *, checked: bool = True) -> None:
    """Rows lie where those of an earlier step with as many rows did."""
    kept: dict[Any, torch.Tensor] = {}

    def mutant(table, shape):
        former = kept.setdefault(shape, table).clone()
        fresh = (PLACE,) if checked else (PLACE, STEP_ID)
        former[fresh, :] = table[fresh, :]
        return LayoutTable(former, shape)

    patch.setattr(runner, "LayoutTable", mutant)


@mutant("windows-of-another-layout", "vllm#38311", f"{FEW}[mixed]", "tokens", KERNELS)
def windows_of_another_layout_are_delivered(patch: pytest.MonkeyPatch) -> None:
    """What is right on the device is told from where an earlier step's windows lay."""
    kept: dict[int, torch.Tensor] = {}

    def make(deliver):
        def mutant(x, verdict, results):
            starts = kept.setdefault(len(x.slots), x.window_starts.clone())
            inside = starts.clamp(max=max(len(verdict.tokens) - 1, 0))
            deliver(replace(x, window_starts=inside), verdict, results)

        return mutant

    in_every_program(patch, "deliver", make)


@mutant("dead-rows-judged", LAW, f"{FEW}[empty]", "acceptance", STATIC)
def limits_are_taken_for_drafts(patch: pytest.MonkeyPatch) -> None:
    """A window has as many drafts as the layout has room for: dead rows are judged."""

    def judge_dead_rows(x, layout):
        return replace(x, num_drafts=layout.row(DRAFT_LIMIT) * x.samples)

    with_inputs(patch, judge_dead_rows)


@mutant("count-of-drafts-of-a-former-request", "vllm#39273", FORMER_DRAFTS, "acceptance", STATIC)
def slots_tell_what_a_former_step_proposed(patch: pytest.MonkeyPatch) -> None:
    proposed: dict[int, int] = {}

    def former(x, layout):
        slots, now = x.slots.tolist(), x.num_proposed.tolist()
        before = [proposed.get(slot, count) for slot, count in zip(slots, now, strict=True)]
        proposed.update(zip(slots, now, strict=True))
        return replace(x, num_proposed=torch.tensor(before))

    with_inputs(patch, former)


@mutant("stale-attention-metadata-of-the-drafter", "vllm#38311", SELF, "acceptance", STATIC)
@mutant("stale-attention-metadata-of-an-mtp-module", "vllm#38311", STALE_METADATA, "acceptance")
def drafter_rows_are_replayed(patch: pytest.MonkeyPatch) -> None:
    """Positions and addresses of an earlier step with as many rows."""
    kept: dict[Any, Any] = {}

    def replayed(name):
        find = getattr(DraftContext, name)

        def mutant(self, *chains):
            found = find(self, *chains)
            key = name, len(found.rows.slots)
            return replace(found, rows=kept.setdefault(key, found.rows))

        patch.setattr(DraftContext, name, mutant)

    for name in ("catch_up", "catch_up_with_newest", "advanced"):
        replayed(name)


# Recurrent state


def with_parts(patch: pytest.MonkeyPatch, change: Callable[[SlotRows, Folded], SlotRows]) -> None:
    """Change what kernels run of a slot, in PyTorch and in C, and not what is noted of it."""
    run_slot, begin = RowByRowPass._run_slot, NativePass.begin

    def run_mutant(self, part, *rest):
        return run_slot(self, change(part, self.folded), *rest)

    def begin_mutant(rows, folded, library):
        found = begin(rows, folded, library)
        parts = tuple(change(part, folded) for part in found.row_by_row.parts)
        return replace(found, table=part_table(parts))

    patch.setattr(RowByRowPass, "_run_slot", run_mutant)
    patch.setattr(NativePass, "begin", begin_mutant)


@mutant("slot-0-read-on-a-zero-draft-step", "vllm#39273", ZERO_DRAFTS, "tokens")
@mutant("slot-0-read-on-a-trained-nemotron", "vllm#39273", TRAINED_ZERO_DRAFTS, "tokens")
def a_step_without_drafts_does_not_fold(patch: pytest.MonkeyPatch) -> None:
    """It goes on from the state of its last window's first position."""

    def change(part, folded):
        return replace(part, num_folded=0, num_lasting=1) if part.num_rows == 1 else part

    with_parts(patch, change)


@mutant("recurrent-state-of-rejected-drafts", "vllm#39273", ZERO_DRAFTS, "tokens")
def rejected_drafts_are_folded(patch: pytest.MonkeyPatch) -> None:
    """All that is pending is folded, as if every draft had been accepted."""

    def change(part, folded):
        if part.starts:
            return part
        pending = int(folded.num_pending[part.slot])
        more = pending - part.num_folded
        return replace(part, num_folded=pending, num_lasting=part.num_lasting + more)

    with_parts(patch, change)


@mutant("recurrent-state-of-a-former-request", "the law: recurrent state", SLOT_REUSE, "tokens")
def a_slot_keeps_its_recurrent_state(patch: pytest.MonkeyPatch) -> None:
    """The next request's first row goes on from the last one's state."""
    run_slot = RowByRowPass._run_slot

    def mutant(self, part, *rest):
        if part.starts and self.folded.position[part.slot] > 0:
            part = replace(part, starts=False)
        return run_slot(self, part, *rest)

    patch.setattr(RowByRowPass, "_run_slot", mutant)


# Sampling


@mutant(
    "noise-keyed-by-step-instead-of-position",
    "the law: keyed sampling",
    f"{FEW}[right]",
    "tokens",
)
def noise_is_keyed_by_step(patch: pytest.MonkeyPatch) -> None:
    verify = Step._verify

    def mutant(self, computed):
        x = computed.x
        positions = torch.full_like(x.sampled.positions, int(x.step_ids[0]))
        x = replace(x, sampled=replace(x.sampled, positions=positions))
        return verify(self, replace(computed, x=x))

    patch.setattr(Step, "_verify", mutant)


@mutant(
    "nan-behind-an-accepted-draft-voids-its-window",
    "the law: faults",
    "tests/e2e/test_nan.py::test_nan_behind_an_accepted_draft_takes_no_token[stop_token_ids1]",
    "tokens",
)
def a_fault_behind_a_draft_is_the_window_s(patch: pytest.MonkeyPatch) -> None:
    def make(verify):
        def mutant(keys, x, chances=None):
            found = verify(keys, x, chances)
            at = (x.window_starts[:-1] + found.num_accepted).clamp(max=len(keys) - 2)
            led_there = found.tokens[at] == x.sampled.token_ids[at + 1]
            behind = (found.num_accepted < x.num_drafts) & led_there & has_nan(keys.amax(1))[at + 1]
            return replace(
                found,
                num_accepted=found.num_accepted.masked_fill(behind, 0),
                faults=found.faults.masked_fill(behind, HAS_NAN),
            )

        return mutant

    in_every_program(patch, "verify", make)


@mutant(
    "penalties-without-the-rows-own-prefix", "the law: sampling", f"{FEW}[right]", "tokens", STATIC
)
def penalties_see_committed_tokens_alone(patch: pytest.MonkeyPatch) -> None:
    """Every row is judged as its window's first."""

    def mutant(logits, rows, committed, rules):
        first = rows.positions - rows.offsets
        rows = replace(rows, positions=first, offsets=torch.zeros_like(first))
        apply_rules(logits, rows, committed, rules)

    patch.setattr(ComposedKernels, "apply_rules", staticmethod(mutant))


# Grammars


@mutant("grammar-mask-of-the-first-row-for-all", "the law: sampling", STRUCTURED, "tokens")
def every_row_has_the_first_row_s_mask(patch: pytest.MonkeyPatch) -> None:
    fill = Cursor.fill

    def mutant(self, masks, drafts):
        fill(self, masks, drafts)
        masks[1:] = masks[0]

    patch.setattr(Cursor, "fill", mutant)


@mutant("grammar-advanced-over-rejected-drafts", "the law: sampling", STRUCTURED, "tokens")
def the_matcher_keeps_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    """It goes on from the drafts that were tried, accepted or not."""

    def mutant(self, masks, drafts):
        self.matcher.fill(masks, 0)
        for row, draft in enumerate(drafts):
            if not self.matcher.accept(draft):
                break
            self.position += 1
            self.matcher.fill(masks, row + 1)

    patch.setattr(Cursor, "fill", mutant)


@mutant(
    "grammar-of-a-former-request",
    "the law: sampling",
    "tests/e2e/test_structured_outputs.py::test_a_slot_s_next_request_starts_its_own_grammar",
    "tokens",
)
def a_slot_keeps_its_grammar(patch: pytest.MonkeyPatch) -> None:
    admit = SlotGrammars.admit

    def mutant(self, admission):
        if admission.slot not in self._cursors:
            admit(self, admission)

    patch.setattr(SlotGrammars, "admit", mutant)


@mutant("grammar-begun-by-a-rejected-end", "the law: sampling", EARLY_END, "tokens")
def a_draft_ends_the_reasoning(patch: pytest.MonkeyPatch) -> None:
    """The copy that tries drafts and the matcher share the fact that the reasoning has ended."""

    class Telling(MatcherAfterReasoning):
        def _take(self, token_id: int) -> None:
            super()._take(token_id)
            if self.place is _Place.IN_TEXT:
                self.origin.place = self.place

    def mutant(self):
        ahead = Telling(self.inner.copy(), self.reasoning, self.place, self.newest)
        ahead.origin = self
        return ahead

    patch.setattr(MatcherAfterReasoning, "copy", mutant)


# Draft heads


@mutant("columns-of-a-token-map-taken-for-tokens", LAW, TOKEN_MAP, "acceptance")
def draft_columns_are_taken_for_tokens(patch: pytest.MonkeyPatch) -> None:
    load = MTPCheckpoint.load

    def mutant(self, shared, **options):
        return replace(load(self, shared, **options), token_ids=None)

    patch.setattr(MTPCheckpoint, "load", mutant)


# KV of drafters


@mutant(
    "cascade-leaves-the-model-s-kv-behind",
    LAW,
    "tests/e2e/test_cascade.py::test_the_model_s_kv_is_whole_after_turns_of_the_lookup[1]",
    "position",
)
def a_cascade_s_model_misses_turns(patch: pytest.MonkeyPatch) -> None:
    """Where the lookup has drafts for every row, the model's KV is left behind."""
    propose = CascadeDrafter.propose

    def mutant(self, context):
        first = self._lookup.propose(context)
        live = context.slots != context.sequences.reserved_slot
        return first if bool(first.num_drafts[live].all()) else propose(self, context)

    patch.setattr(CascadeDrafter, "propose", mutant)


@mutant(
    "prefix-key-without-lookahead", "docs/decisions/0003", f"{PREFIXES}[lookahead-4]", "acceptance"
)
def prefix_keys_do_not_look_ahead(patch: pytest.MonkeyPatch) -> None:
    def mutant(token_ids, block_size, lookahead_tokens, root=b""):
        return block_keys(token_ids, block_size, 0, root)

    substitute(patch, block_keys, mutant)


@mutant("chunk-edge-placeholder-token", LAW, f"{PREFIXES}[lookahead-4]", "acceptance")
@mutant("chunk-edge-placeholder-under-an-eagle-head", LAW, EAGLE_HEAD, "position")
@mutant("chunk-edge-placeholder-under-an-mtp-module", LAW, MTP_MODULE, "position", STATIC)
@mutant("chunk-border-under-nemotron-s-module", "vllm#35447", NEMOTRON_TWIN, "acceptance")
def a_chunk_ends_in_a_placeholder(patch: pytest.MonkeyPatch) -> None:
    """The token after a prefill chunk, which is the prompt's next one."""
    catch_up = DraftContext.catch_up

    def mutant(self):
        found = catch_up(self)
        ends = zip(self.slots.tolist(), self.end.tolist(), self.samples.tolist(), strict=True)
        edges = {(slot, end - 1) for slot, end, samples in ends if not samples}
        places = zip(found.rows.slots.tolist(), found.rows.positions.tolist(), strict=True)
        at_edge = torch.tensor([place in edges for place in places], dtype=torch.bool)
        return replace(found, token_ids=found.token_ids.masked_fill(at_edge, 0))

    patch.setattr(DraftContext, "catch_up", mutant)


@mutant(
    "drafter-kv-left-behind-by-preemption",
    "docs/decisions/0002",
    f"{PREEMPTION}[self]",
    "acceptance",
)
def drafter_kv_is_not_swapped(patch: pytest.MonkeyPatch) -> None:
    start = SwapStore.__init__

    def mutant(self, caches, *sizes, **options):
        start(self, caches[:1], *sizes, **options)

    patch.setattr(SwapStore, "__init__", mutant)


@mutant("lost-kv-taken-for-computed", LAW, REPLAY, "position")
def a_restart_does_not_reach_the_device(patch: pytest.MonkeyPatch) -> None:
    substitute(patch, commit.restart, lambda sequences, slot: [])


@mutant("evicted-block-saved-a-step-late", LAW, IDLE_PREFIX, "tokens")
def blocks_are_saved_when_others_write_them(patch: pytest.MonkeyPatch) -> None:
    save, late = SwapStore.move_out, []

    def mutant(self, plan):
        for earlier in late:
            save(self, earlier)
        late[:] = [plan]

    patch.setattr(SwapStore, "move_out", mutant)


@mutant("block-freed-behind-a-window-too-early", LAW, WINDOW, "tokens")
def a_window_s_first_position_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    position = RequestState.next_position.fget
    early = property(lambda self: position(self) + 2)
    patch.setattr(RequestState, "next_position", early)


@mutant("state-kept-unfolded", "docs/decisions/0024", KEPT_STATE, "tokens")
def what_is_pending_in_a_kept_state_is_lost(patch: pytest.MonkeyPatch) -> None:
    restore = CacheStates.restore

    def mutant(self, copy):
        restore(self, copy)
        self.folded.position[copy.slot] = copy.position
        self.folded.num_pending[copy.slot] = 0

    patch.setattr(CacheStates, "restore", mutant)


@mutant("state-kept-a-step-late", "docs/decisions/0024", KEPT_STATE, "tokens")
def states_are_kept_after_the_next_step(patch: pytest.MonkeyPatch) -> None:
    """And said to be what they should have been, since a state of later rows is refused."""
    late = []

    def mutant(self, plan, num_computed):
        for copy in late:
            for cache in self.caches:
                for slots, kept in zip(cache.slots, cache.kept, strict=True):
                    kept[:, copy.state] = slots[:, copy.slot]
                cache.folded_positions[copy.state] = copy.position
        late[:] = plan.kept_states

    patch.setattr(KeptStates, "keep", mutant)


@mutant("snapshot-committed-but-never-written", "docs/decisions/0024", NEMOTRON_KEPT, "tokens")
def a_kept_state_is_not_written(patch: pytest.MonkeyPatch) -> None:
    """The table says that it is there."""
    keep = CacheStates.keep

    def mutant(self, copy, num_computed):
        keep(replace(self, kept=tuple(memory.clone() for memory in self.kept)), copy, num_computed)
        # Freed memory of an earlier engine may hold the very states that are missing.
        for memory in self.kept:
            memory.zero_()

    patch.setattr(CacheStates, "keep", mutant)


@mutant("stale-drafts-near-max-model-len", "vllm#38711", NEMOTRON_END, "acceptance")
def drafts_of_an_earlier_step_are_offered_near_the_end(patch: pytest.MonkeyPatch) -> None:
    propose, former = EagleDrafter.propose, {}

    def mutant(self, context):
        found, shape = propose(self, context), context.slots.shape
        near_the_end = (context.num_tokens + 2 * context.num_speculative_tokens > 48).any()
        if not (near_the_end and shape in former):
            former[shape] = found
        return former[shape]

    patch.setattr(EagleDrafter, "propose", mutant)


@mutant("rank-runs-drafts-of-its-own", LAW, f"{TWO_RANKS}[llama-self-3-6-16]", "tokens")
def a_rank_runs_drafts_of_its_own(patch: pytest.MonkeyPatch) -> None:
    propose = SharedDrafter.propose

    def mutant(self, context):
        drafts = propose(self, context)
        if self._parallel.rank == 0:
            return drafts
        return replace(drafts, draft_ids=(drafts.draft_ids + 1) % 7)

    patch.setattr(SharedDrafter, "propose", mutant)


@mutant("rank-commits-a-token-of-its-own", LAW, f"{TWO_RANKS}[llama-ngram-2-6-32]", "tokens")
def rank_0_s_verdict_stays_its_own(patch: pytest.MonkeyPatch) -> None:
    verify = Step._verify

    def mutant(self, computed):
        verdict = verify(self, computed)
        if self.parallel.rank == 0:
            return verdict
        return replace(verdict, next_token=(verdict.next_token + 1) % 7)

    patch.setattr(Step, "_verify", mutant)


@mutant("draft-head-keeps-the-lm-head-of-older-weights", LAW, SHARED_HEAD, "acceptance")
def no_shared_lm_head_is_known(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eagle, "SharedHead", lambda weight, made_of: None)


# A layer in one call


@mutant("whole-layer-without-its-window", LAW, WHOLE_LAYER, "position")
def a_layer_in_one_call_sees_more(patch: pytest.MonkeyPatch) -> None:
    """Few rows see positions that the same rows in a longer chunk do not."""
    init = NativeLayer.__init__

    def mutant(self, library, parts, dtype) -> None:
        everything = replace(parts.shape, sliding_window=None)
        init(self, library, replace(parts, shape=everything), dtype)

    patch.setattr(NativeLayer, "__init__", mutant)


# Attention sinks


@triton.jit
def _twice_in_merges(acc, total, peak, sink, scale, KV_LEFT: tl.constexpr):
    """Twice the weight where the results of several programs are merged, one query at a time."""
    if acc.shape[1] == 1:
        sink += 0.6931472
    return with_sink(acc, total, peak, sink, scale, KV_LEFT)


@mutant("sink-added-twice-by-the-merge-of-splits", LAW, SINKS_ONCE, "position")
def merges_add_a_sink_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention_triton, "with_sink", _twice_in_merges)


@mutant("sink-left-out-by-rows-alone", LAW, SINKS_BITS, "tokens")
def rows_alone_have_no_sinks(patch: pytest.MonkeyPatch) -> None:
    attention = ReferenceKernels.attention

    def mutant(self, q, shape, rows, kv, sinks=None):
        return attention(q, shape, rows, kv, sinks if len(q) > 1 else None)

    patch.setattr(ReferenceKernels, "attention", mutant)


# Keys and values in float8


@mutant("rows-of-the-same-step-read-unrounded", "docs/decisions/0035", FLOAT8_ROWS, "position")
def own_step_is_read_before_rounding(patch: pytest.MonkeyPatch) -> None:
    """As where a prompt's attention takes K and V from registers, and memory keeps them rounded."""
    write, read = ReferenceKernels.rope_and_cache, ReferenceKernels.attention
    unrounded: list[LayerKV] = []

    def writes(self, qkv, shape, rotary, rows, kv, qk_norm):
        q = write(qkv, shape, rotary, rows, kv, qk_norm)
        wide = LayerKV(as_read(kv.keys, kv.k_scales), as_read(kv.values, kv.v_scales))
        write(qkv, shape, rotary, rows, wide, qk_norm)
        unrounded[:] = [wide]
        return q

    def reads(self, q, shape, rows, kv, sinks=None):
        return read(q, shape, rows, *unrounded, sinks)

    patch.setattr(ReferenceKernels, "rope_and_cache", writes)
    patch.setattr(ReferenceKernels, "attention", reads)


# Latent attention


@mutant("prompts-expanded-beside-absorbed-decode", "sglang#12000", LATENT_BITS, "tokens")
def prompts_expand_their_keys(patch: pytest.MonkeyPatch) -> None:
    """Several rows at once meet keys and values of every head, a row alone meets latents."""
    absorbed = LatentAttention.__call__

    def mutant(self, x, rows, memory, kept=None):
        whole = absorbed(self, x, rows, memory, kept)
        if len(x) == 1:
            return whole
        shape, fused = self.shape, self.projection(x)
        q, latent = fused.split((fused.shape[1] - shape.width, shape.width), dim=-1)
        q = self.queries(q).unflatten(-1, (shape.num_heads, -1)).contiguous()
        turned = q[..., -shape.rope_dim :]
        self.kernels.latent_rope_and_cache(
            turned.clone(), latent, self.rotary, rows, memory, turned
        )
        values = [self._expanded(q[i], rows, memory, i) for i in range(len(x))]
        return self.output(torch.stack(values).flatten(1))

    def expanded(self, q, rows, memory, i):
        blocks = memory.vectors[rows.block_table[rows.slots[i]]]
        seen = blocks.flatten(0, 1)[: int(rows.positions[i]) + 1]
        latents, turned = seen[:, : self.shape.rank], seen[:, self.shape.rank :]
        keys = torch.einsum("jr,hrn->jhn", latents, self.absorb.matrices)
        keys = torch.cat((keys, turned[:, None].expand(-1, self.shape.num_heads, -1)), -1)
        weights = (torch.einsum("hn,jhn->hj", q, keys) * self.shape.scale).softmax(-1)
        values = torch.einsum("jr,hvr->jhv", latents, self.expand.matrices)
        return torch.einsum("hj,jhv->hv", weights, values)

    patch.setattr(LatentAttention, "_expanded", expanded, raising=False)
    patch.setattr(LatentAttention, "__call__", mutant)


@mutant("a-prompt-s-last-token-expanded-in-a-replay", "docs/decisions/0044", REPLAYED, "tokens")
def the_last_token_is_expanded(patch: pytest.MonkeyPatch) -> None:
    def mutant(self, num_query):
        expanded = self.expands and self.position < self.prompt_len
        return self.position + num_query if expanded else 0

    patch.setattr(RequestState, "expands_to", mutant)


@mutant("absorbed-answers-serve-expanded-prompts", "docs/decisions/0044", CONVERSATION, "tokens")
def blocks_of_answers_are_cached(patch: pytest.MonkeyPatch) -> None:
    index = KVMemory.index_kept

    def mutant(self, request, num_kept_tokens):
        expands, request.expands = request.expands, False
        index(self, request, num_kept_tokens)
        request.expands = expands

    patch.setattr(KVMemory, "index_kept", mutant)


@mutant("nextn-embedding-at-position-0-not-zeroed", "docs/decisions/0031", NEXTN, "position")
def the_first_embedding_is_kept(patch: pytest.MonkeyPatch) -> None:
    inputs = NextNHead._inputs

    def mutant(self, token_ids, hidden, rows):
        return inputs(self, token_ids, hidden, replace(rows, positions=rows.positions + 1))

    patch.setattr(NextNHead, "_inputs", mutant)


@mutant("experts-weighed-by-corrected-scores", "docs/decisions/0031", NEXTN, "position")
def the_bias_weighs_too(patch: pytest.MonkeyPatch) -> None:
    """Weights are renormalised with the bias that should only choose."""
    gate = ComposedKernels.moe_gate

    def mutant(logits, routing, bias=None, out=None):
        chosen, _ = gate(logits, routing, bias, out)
        weights = (logits.sigmoid() + (0 if bias is None else bias)).gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * routing.scale

    patch.setattr(ComposedKernels, "moe_gate", staticmethod(mutant))


@mutant("prefixes-of-another-adapter", "docs/decisions/0045", OTHER_PREFIXES, "tokens")
def keys_know_no_adapter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVMemory, "_root", lambda self, request: b"")


@mutant("a-slot-keeps-its-former-adapter", "docs/decisions/0045", ADAPTED, "tokens")
def adapters_are_admitted_once(patch: pytest.MonkeyPatch) -> None:
    admit, seen = AdaptedSteps.admit, set()

    def mutant(self, admission):
        first = (id(self), admission.slot) not in seen
        seen.add((id(self), admission.slot))
        return admit(self, admission) if first else []

    patch.setattr(AdaptedSteps, "admit", mutant)


@mutant("rows-read-the-adapters-of-requests-in-order", "docs/decisions/0045", ADAPTED, "tokens")
def adapters_by_place(patch: pytest.MonkeyPatch) -> None:
    """The n-th request of a step gets what the n-th slot has."""

    def mutant(self, token_ids, rows, cache, kept=None):
        _, places = rows.slots.unique_consecutive(return_inverse=True)
        self._rows.begin(self._by_slot.index_select(0, places))
        return self._target.forward(token_ids, rows, cache)

    patch.setattr(AdaptedTarget, "forward", mutant)


#: Tests with the steps in which they must fail, and in which the suite runs them.
NAMED = {(one.test, one.steps) for one in MUTANTS}
