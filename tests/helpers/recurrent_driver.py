"""Passes over recurrent layers, and their batch invariance, whatever the rule and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.recurrent import Slots, begin_as_on_a_gpu
from helpers.rows import runs_of
from sametoken.ops.backend import AttentionRows, RowRuns
from sametoken.ops.cache_types import Recurrent
from sametoken.ops.model.recurrent.rule import STATE_STRIDE
from sametoken.ops.model.recurrent.triton import TritonPass

KEPT = ("states", "history")
#: Slot, position, token, and whether it is committed; None where the row is dead.
Row = tuple[int, int, int, bool] | None
#: Ids of tokens end here.
NUM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Sequence:
    """Tokens, their outputs row by row [L, T, features], and the memory after the last."""

    tokens: list[int]
    out: Tensor
    cache: Slots


@dataclass(frozen=True, slots=True)
class RecurrentDriver:
    """Layers of one declaration.

    Attributes:
        params: of each layer.
        raw_rows: a layer's raw inputs of tokens [T] int64.
    """

    declared: Recurrent
    params: tuple[object, ...]
    raw_rows: Callable[[Tensor], tuple[Tensor, ...]]
    device: torch.device

    def poisoned(self, num_seqs: int, num_drafts: int, begin_pass=TritonPass.begin) -> Slots:
        return Slots(
            self.declared,
            num_drafts,
            num_slots=num_seqs,
            num_layers=len(self.params),
            begin_pass=begin_pass,
            device=self.device,
        )

    def facts(self, rows: list[Row], cache: Slots) -> Tensor:
        """[4, T] int64; dead rows stand at position 0 of the reserved slot."""
        reserved = (cache.position.shape[0] - 1, 0, 0, False)
        return torch.tensor([row or reserved for row in rows], device=self.device).t().contiguous()

    def passed(self, cache: Slots, facts: Tensor, runs: RowRuns) -> Tensor:
        """Outputs of one pass [L, T, features]."""
        slots, positions, tokens, committed = facts.unbind(0)
        at = AttentionRows(positions, slots, slots, slots[None], runs, committed.bool())
        running, raw = cache.begin(at), self.raw_rows(tokens)
        layers = [cache.run(running, i, params, *raw) for i, params in enumerate(self.params)]
        running.finish()
        return torch.stack(layers)

    def run(self, cache: Slots, rows: list[Row], runs: RowRuns | None = None) -> Tensor:
        """One pass of rows; by default all are one run."""
        return self.passed(cache, self.facts(rows, cache), runs or RowRuns.even(1, len(rows)))

    def sequence(self, length: int = 152) -> Sequence:
        """Rows run one by one; the last position is one where states are stored."""
        assert length % STATE_STRIDE == 0
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(0, NUM_TOKENS, (length,), generator=generator).tolist()
        cache = self.poisoned(1, 0)
        out = [self.run(cache, [(0, p, token, True)]) for p, token in enumerate(tokens)]
        return Sequence(tokens, torch.cat(out, dim=1), cache)

    def require_near_the_reference(
        self, sequence: Sequence, *, atol: float, states_atol: float
    ) -> None:
        oracle = self.poisoned(1, 0, begin_as_on_a_gpu)
        rows = [(0, p, token, True) for p, token in enumerate(sequence.tokens)]
        torch.testing.assert_close(sequence.out, self.run(oracle, rows), rtol=2e-2, atol=atol)
        found, wanted = sequence.cache.states[:, 0], oracle.states[:, 0]
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=states_atol)
        assert torch.equal(sequence.cache.history[:, 0], oracle.history[:, 0])

    def require_chunks(self, sequence: Sequence, chunk: int, *, padded: bool) -> None:
        """Chunks have the bits of single rows."""
        tokens, expected = sequence.tokens, sequence.out
        cache = self.poisoned(3, 0)
        for first in range(0, len(tokens), chunk):
            part = [(2, first + i, token, True) for i, token in enumerate(tokens[first:][:chunk])]
            dead = [None] * (chunk - len(part) if padded else 0)
            out = self.run(cache, [*part, *dead])
            assert torch.equal(out[:, : len(part)], expected[:, first : first + len(part)])
            assert not out[:, len(part) :].any()
        _require_kept(sequence, cache, [2])

    def require_windows(self, sequence: Sequence, batch: int, k: int) -> None:
        """Every slot accepts other numbers of drafts; some windows are short, some skip a step."""
        tokens, expected = sequence.tokens, sequence.out
        cache, generator = self.poisoned(batch, k), torch.Generator().manual_seed(batch + k)

        def below(stop: int) -> int:
            return int(torch.randint(0, stop, (1,), generator=generator))

        done = [0] * batch
        for step in range(200):
            if done == [len(tokens)] * batch:
                break
            rows, windows = [], []
            for slot in range(batch):
                n, left = done[slot], len(tokens) - done[slot]
                # The last row stands alone, so that in the end all is folded.
                if left == 0 or (batch > 1 and (slot + step) % 5 == 0):
                    rows += [None] * (k + 1)
                    continue
                drafts = min(below(k + 1), max(left - 2, 0))
                good = below(drafts + 1)
                wrong = [NUM_TOKENS - 1] * (drafts - good)
                ids = [tokens[n], *tokens[n + 1 : n + 1 + good], *wrong]
                windows.append((len(rows), n, good))
                rows += [(slot, n + i, token, i == 0) for i, token in enumerate(ids)]
                rows += [None] * (k - drafts)
                done[slot] = n + 1 + good
            out = self.run(cache, rows, RowRuns.even(batch, k + 1))
            for at, n, good in windows:
                assert torch.equal(out[:, at : at + good + 1], expected[:, n : n + good + 1])
        assert done == [len(tokens)] * batch
        _require_kept(sequence, cache, range(batch))

    def require_ragged_runs(self, sequence: Sequence) -> None:
        """Windows and a prompt's chunk in one pass, dead rows behind some, none of others."""
        tokens, expected, whole = sequence.tokens, sequence.out, len(sequence.tokens)
        cache, done = self.poisoned(3, 0), [0, 0, 0]
        last = (whole - 6, whole - 3, whole - whole // 2 - 7)
        for counts in ((1, 3, whole // 2), (5, 0, 7), last):
            rows, places = [], []
            lengths = [count + dead for count, dead in zip(counts, (0, 2, 1), strict=True)]
            for slot, (count, length) in enumerate(zip(counts, lengths, strict=True)):
                first = done[slot]
                places.append((len(rows), first, count))
                rows += [(slot, p, tokens[p], True) for p in range(first, first + count)]
                rows += [None] * (length - count)
                done[slot] += count
            out = self.run(cache, [*rows, None], runs_of(lengths, 2, self.device))
            for at, first, count in places:
                assert torch.equal(out[:, at : at + count], expected[:, first : first + count])
        _require_kept(sequence, cache, range(3))

    def require_long_runs(self, sequence: Sequence) -> None:
        """Chunks fold the drafts before them, and drafts behind them stay pending."""
        tokens, expected = sequence.tokens, sequence.out
        whole, wrong = len(tokens), NUM_TOKENS - 1
        cache = self.poisoned(3, 4)
        # Of each slot: committed rows, right drafts, wrong drafts, dead rows.
        passes = (
            [(1, 3, 1, 0), (5, 0, 0, 1), (0, 0, 0, 0)],
            [(131, 2, 2, 1), (33, 0, 0, 2), (1, 0, 0, 0)],
            [(1, 4, 0, 0), (128, 0, 0, 0), (0, 0, 0, 3)],
            [(16, 0, 0, 0), (15, 1, 3, 0), (144, 0, 1, 0)],
        )
        done = [0, 0, 0]
        for counts in passes:
            rows, places = [], []
            for slot, (committed, right, bad, dead) in enumerate(counts):
                first, count = done[slot], committed + right
                places.append((len(rows), first, count))
                ids = [*tokens[first : first + count], *[wrong] * bad]
                rows += [(slot, first + i, token, i < committed) for i, token in enumerate(ids)]
                rows += [None] * dead
                done[slot] += count
            lengths = [sum(each) for each in counts]
            out = self.run(cache, [*rows, None], runs_of(lengths, 0, self.device))
            for at, first, count in places:
                assert torch.equal(out[:, at : at + count], expected[:, first : first + count])
        rest = [(slot, p, tokens[p], True) for slot in range(3) for p in range(done[slot], whole)]
        self.run(cache, rest, runs_of([whole - first for first in done], 0, self.device))
        _require_kept(sequence, cache, range(3))

    def require_captured(self, sequence: Sequence) -> None:
        """The graph reads counts, positions and rows when it is replayed."""
        tokens, expected = sequence.tokens, sequence.out
        cache, width = self.poisoned(2, 3), 4
        facts = self.facts([None] * 2 * width, cache)
        stream, runs = torch.cuda.Stream(), RowRuns.even(2, width)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.passed(cache, facts, runs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.passed(cache, facts, runs)
        position, drafted = 0, 0
        while position + width <= len(tokens):
            good = drafted % width
            window = [tokens[position], *tokens[position + 1 : position + 1 + good]]
            rows = [(1, position + i, token, i == 0) for i, token in enumerate(window)]
            facts.copy_(self.facts([*rows, *[None] * (2 * width - len(rows))], cache))
            graph.replay()
            assert torch.equal(out[:, : good + 1], expected[:, position : position + good + 1])
            assert not out[:, good + 1 :].any()
            position, drafted = position + good + 1, drafted + 1
        assert cache.states[:, 2].isnan().all(), "the reserved slot has been written"


def _require_kept(sequence: Sequence, cache: Slots, slots) -> None:
    """What the slots keep is what the sequence's own does."""
    for slot in slots:
        for name in KEPT:
            wanted = getattr(sequence.cache, name)[:, 0]
            assert torch.equal(getattr(cache, name)[:, slot], wanted)
