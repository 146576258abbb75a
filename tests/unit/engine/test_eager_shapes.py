"""Start-up compiles what steps without a graph launch: else a request waits for a compiler."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from sametoken.engine.build_gpu import captured_shapes, eager_shapes
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, SampledRows
from sametoken.ops.launch_sizes import ROW_MULTIPLE
from sametoken.ops.model.attention import hopper
from sametoken.ops.step.types import LayoutTable
from sametoken.types.layout import TABLE_ROWS, StepShape, padded

HEADS = [
    AttentionShape(*sizes)
    for sizes in [
        (32, 8, 128), (16, 4, 128), (16, 8, 128), (9, 3, 64), (16, 4, 256), (64, 8, 64),
        (4, 1, 128), (8, 1, 128), (40, 8, 128), (28, 4, 128), (14, 2, 64), (32, 32, 128),
        (8, 4, 256),
    ]
]  # fmt: skip
#: Requests, drafts, rows of a step and the longest sequence.
ENGINES = [(256, 0, 4096, 33024), (256, 3, 4096, 33024), (64, 7, 8192, 131072), (8, 0, 2048, 8192)]


class Launches:
    """In place of a kernel: what it would be compiled for."""

    def __init__(self, name: str, forms: set) -> None:
        self._name, self._forms = name, forms

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            absent = tuple(argument is None for argument in arguments)
            self._forms.add((self._name, absent, tuple(sorted(constants.items()))))

        return launch


def forms_of(monkeypatch, shapes, heads: AttentionShape, engine) -> set:
    """The kernels of attention in these steps, over tensors without memory."""
    forms: set = set()
    for name in ("rows_kernel", "splits_kernel"):
        monkeypatch.setattr(hopper, name, Launches(name, forms))
    # Kept rows read what the kernel before has written, and are compiled apart.
    monkeypatch.setattr(hopper, "pdl_options", lambda q, early=False: {"early": early})
    max_num_seqs, _, _, max_len = engine
    numbers = partial(torch.empty, dtype=torch.int64, device="meta")
    memory = torch.empty(1, heads.num_kv_heads, 64, heads.head_dim, device="meta").bfloat16()
    table, counters = numbers(max_num_seqs + 1, -(-max_len // 64)), numbers(hopper.MAX_COUNTERS)
    for shape in shapes:
        layout = LayoutTable(numbers(TABLE_ROWS, shape.table_width), shape)
        rows, sampled = numbers(shape.num_rows), numbers(shape.num_sampled)
        index = None if shape.all_sampled else sampled
        kept = layout.kept(SampledRows(index, *[sampled] * 4), table)
        for asked in (AttentionRows(rows, rows, rows, table, layout.runs), kept):
            if asked is not None:
                size = (len(asked.positions), heads.num_heads, heads.head_dim)
                q = torch.empty(size, dtype=torch.bfloat16, device="meta")
                hopper.attention(q, heads, asked, LayerKV(memory, memory), counters)
    return forms


def steps_of(engine) -> list[StepShape]:
    """Shapes of steps with prompts, as an eager launcher pads them."""
    max_num_seqs, k, max_rows, _ = engine
    draw, drawn = random.Random(0), []
    while len(drawn) < 200:
        prompts = draw.randint(1, min(draw.choice([1, 2, 4, max_num_seqs]), max_num_seqs))
        windows = draw.randint(0, max_num_seqs - prompts)
        longest = draw.choice([1, 4, 7, 10, 12, 16, 20, 30, 64, 100, 200, 512, max_rows])
        lengths = [draw.randint(1, longest) for _ in range(prompts)]
        drafts = [draw.randint(0, k) for _ in range(windows)]
        sampled = prompts + windows + sum(drafts)
        rows = sum(lengths) + windows + sum(drafts)
        if rows <= max_rows:
            widest = max(drafts, default=0) + 1
            shape = StepShape(
                windows + prompts, rows, min(sampled, rows), windows, widest, max(lengths)
            )
            drawn.append(padded(shape, ROW_MULTIPLE))
    return drawn


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=lambda one: f"{one.num_heads}-{one.num_kv_heads}")
def test_start_up_compiles_the_attention_of_every_step(monkeypatch, heads, engine):
    named = (*captured_shapes(*engine[:3]), *eager_shapes(*engine[:3]))
    compiled = forms_of(monkeypatch, named, heads, engine)
    assert forms_of(monkeypatch, steps_of(engine), heads, engine) <= compiled
