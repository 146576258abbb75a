"""Scenes for the operations of a step: slots, ragged layouts over them, and plain comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from sametoken.ops.step import compact, native, reference
from sametoken.ops.step import triton as in_triton
from sametoken.ops.step.types import LayoutTable
from sametoken.state.sequences import Sequences
from sametoken.types.layout import StepLayout, StepShape
from sametoken.types.plan import ScheduledRequest, StepPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Those whose shapes are static, those that fill in a padded layout, and all of ``StepOps``.
STATIC_OPS = {"reference": reference, "triton": in_triton}
PADDED_OPS = STATIC_OPS | ({} if DEVICE.type == "cuda" else {"native": native})
ALL_OPS = PADDED_OPS | {"compact": compact}
#: What may not be read: no token id, and no address of one.
GARBAGE = 10**15
SLOTS, BLOCK_SIZE, RESERVED_BLOCK = 5, 4, 7777


@dataclass(frozen=True)
class Slot:
    """What a slot holds. Its tokens are ``1000 * slot + position``, its drafts lie above 500."""

    num_tokens: int
    num_computed: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scene:
    """Slots, a step over them, and the shape that it runs in."""

    slots: tuple[Slot, ...]
    rows: tuple[ScheduledRequest, ...]
    k: int
    room: tuple[int, int, int, int] | StepShape = (0, 0, 0, 0)

    @property
    def layout(self) -> StepLayout:
        return StepLayout.of(StepPlan(41, requests=self.rows))

    @property
    def shape(self) -> StepShape:
        shape = self.layout.shape
        if not isinstance(self.room, StepShape):
            return with_room(shape, *self.room)
        assert self.room.holds(shape)
        return self.room

    @property
    def order(self) -> list[int]:
        """Where the plan's rows are among the shape's requests; the others are padding."""
        return order_of(self.layout, self.shape)

    def by_request(self, values: Sequence[int]) -> list[int]:
        """Values of the plan's rows, where the shape has them."""
        found = [0] * self.shape.num_requests
        for place, value in zip(self.order, values, strict=True):
            found[place] = value
        return found

    def table(self, sequences: Sequences, first_place: int = 0) -> LayoutTable:
        columns = self.layout.table(self.shape, sequences.reserved_slot, first_place)
        return LayoutTable(torch.tensor(columns, device=sequences.device), self.shape)

    def sequences(self, max_len: int = 0) -> Sequences:
        """On the device; garbage wherever nothing may be read."""
        longest = max(slot.num_tokens for slot in self.slots) + self.k + 2
        sequences = empty_sequences(len(self.slots), self.k, max(max_len, longest))
        sequences.token_ids[:-1] = GARBAGE
        sequences.draft_ids[:-1] = GARBAGE
        for index, slot in enumerate(self.slots):
            count, drafts = slot.num_tokens, torch.tensor(slot.drafts, dtype=torch.int64)
            sequences.token_ids[index, :count] = 1000 * index + torch.arange(count)
            sequences.draft_ids[index, : len(drafts)] = drafts
            sequences.num_tokens[index] = count
            sequences.num_computed[index] = slot.num_computed
            sequences.num_drafts[index] = len(drafts)
        return on_device(sequences)


def with_room(shape: StepShape, windows: int, chunks: int, rows: int, sampled: int) -> StepShape:
    """A shape with room for more; of windows alone it stays one if no chunk is added."""
    only_windows = shape.all_sampled and not chunks
    if only_windows:
        rows = sampled = windows if shape.max_window == 1 else rows
    return StepShape(
        num_requests=shape.num_requests + windows + chunks,
        num_rows=shape.num_rows + rows,
        num_sampled=shape.num_sampled + sampled,
        num_windows=shape.num_windows + windows,
        max_window=shape.max_window,
        max_rows=shape.max_rows,
    )


def order_of(layout: StepLayout, shape: StepShape) -> list[int]:
    """Of each request, its place in a shape: padding stands behind windows and behind chunks."""
    windows = layout.shape.num_windows
    between = shape.num_windows - windows
    return [b if b < windows else b + between for b in range(len(layout.slots))]


def empty_sequences(num_slots: int, k: int, max_len: int) -> Sequences:
    """Blocks are all different, so that a wrong address shows."""
    sequences = Sequences.allocate(
        max_num_seqs=num_slots,
        max_len=max_len,
        num_drafts=k,
        block_size=BLOCK_SIZE,
        reserved_block=RESERVED_BLOCK,
        device=torch.device("cpu"),
    )
    blocks = sequences.block_table[:-1]
    blocks[:] = torch.randperm(blocks.numel(), generator=torch.Generator().manual_seed(0)).view_as(
        blocks
    )
    return sequences


def on_device(sequences: Sequences) -> Sequences:
    """A copy, where kernels run."""
    tensors = {
        field.name: getattr(sequences, field.name).clone().to(DEVICE)
        for field in fields(sequences)
        if field.name != "block_size"
    }
    return replace(sequences, **tensors)


def row_of(slot: int, held: Slot, num_query: int, limit: int) -> ScheduledRequest:
    """A scheduled request; it samples if it reaches the last committed token."""
    samples = held.num_computed + num_query == held.num_tokens
    return ScheduledRequest(slot, num_query, limit if samples and num_query == 1 else 0, samples)


@st.composite
def scenes(draw, k: int) -> Scene:
    """Windows of any limit, then chunks of which some end their prompt; exact or with room."""
    slots = []
    for _ in range(SLOTS):
        num_tokens = draw(st.integers(1, 24))
        decoding = draw(st.booleans())
        computed = num_tokens - 1 if decoding else draw(st.integers(0, num_tokens - 1))
        count = draw(st.integers(0, k)) if decoding else 0
        # Of few kinds, so that targets often agree.
        drafts = tuple(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
        slots.append(Slot(num_tokens, computed, drafts))
    rows = []
    for index in draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]:
        held = slots[index]
        num_query = draw(st.integers(1, held.num_tokens - held.num_computed))
        rows.append(row_of(index, held, num_query, draw(st.integers(0, k))))
    rows.sort(key=lambda row: row.num_query > 1 or not row.samples)
    room = tuple(draw(st.integers(0, 3)) for _ in range(4))
    return Scene(tuple(slots), tuple(rows), k, room)


def assert_equal(found, expected, where: str = "") -> None:
    """Every tensor of two dataclasses, in value, in dtype and in whether it is there."""
    if is_dataclass(expected):
        for field in fields(expected):
            name = f"{where}.{field.name}"
            assert_equal(getattr(found, field.name), getattr(expected, field.name), name)
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


def integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)
