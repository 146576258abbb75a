"""Logits rows of requests with rules, dead rows among them, and what the rules make of them.

For tests of the kernels on a CPU and on a GPU.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sametoken.errors import RequestError
from sametoken.ops.backend import SampledRows
from sametoken.ops.step.reference import write_tables
from sametoken.sampling.admission import require_choosable
from sametoken.state.sampling import SamplingTable
from sametoken.types.plan import Admission
from sametoken.types.sampling_params import SamplingParams

FORBIDDEN = -np.inf


def greedy(**rules) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=None, **rules)


@dataclass(frozen=True)
class Ruled:
    """A request, the tokens it has, and the drafts of its window."""

    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    params: SamplingParams = field(default_factory=greedy)
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def window(self) -> int:
        return len(self.drafts) + 1


@dataclass(frozen=True)
class Committed:
    token_ids: Tensor
    prompt_len: Tensor


@dataclass(frozen=True)
class Scene:
    """A step's rows; ``owners`` says whose each one is and its place, None for a dead row."""

    rows: SampledRows
    committed: Committed
    table: SamplingTable
    owners: list[tuple[Ruled, int] | None]

    def apply(self, implementation, logits: Tensor) -> Tensor:
        out = logits.clone()
        implementation.apply_rules(out, self.rows, self.committed, self.table.rules)
        return out


def make_scene(requests, device="cpu", gaps=(0,), max_len=64, slots=None) -> Scene:
    """Windows in the order of ``requests``, with ``gaps`` of dead rows before and after them."""
    count = len(requests) + 2
    slots = slots or [count - 1 - index for index in range(len(requests))]
    table = SamplingTable.allocate(count, torch.device(device))
    # What is not committed would be seen: every row holds every id that may stand above.
    token_ids = torch.arange(max_len).remainder(3).repeat(count + 1, 1)
    prompt_len = torch.zeros(count + 1, dtype=torch.int64)
    columns: list[tuple[int, int, int, int]] = []
    owners: list[tuple[Ruled, int] | None] = []

    def dead(index):
        for place in range(gaps[index % len(gaps)]):
            columns.append((count, 0, 0, place))
            owners.append(None)

    for index, (slot, one) in enumerate(zip(slots, requests, strict=True)):
        admission = Admission(slot, one.prompt, 0, one.params, one.stop_ids, one.bad_words)
        write_tables(table.admit(admission))
        tokens = one.prompt + one.output
        token_ids[slot, : len(tokens)] = torch.tensor(tokens)
        prompt_len[slot] = len(one.prompt)
        dead(index)
        for place, token in enumerate((tokens[-1], *one.drafts)):
            columns.append((slot, len(tokens) - 1 + place, token, place))
            owners.append((one, place))
    dead(len(requests))
    rows = torch.tensor(columns, dtype=torch.int64).t().contiguous().to(device)
    committed = Committed(token_ids.to(device), prompt_len.to(device))
    return Scene(SampledRows(None, *rows.unbind(0)), committed, table, owners)


def random_request(rng: random.Random, vocab_size: int, likely: int) -> Ruled:
    """Any mix of rules over the ``likely`` lowest ids, of which some recur."""

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(likely) for _ in range(rng.randint(low, high)))

    while True:
        params = greedy(
            min_tokens=rng.choice([0, 0, 3, 8]),
            presence_penalty=rng.choice([0, 0, -0.7, 1.1]),
            frequency_penalty=rng.choice([0, 0, -0.3, 0.6]),
            repetition_penalty=rng.choice([1, 1, 0.7, 1.3]),
            logit_bias=rng.choice([None, {i: rng.uniform(-9, 9) for i in ids(1, 5)}]),
            allowed_token_ids=rng.choice([None, None, None, ids(1, 9)]),
        )
        stop_ids = rng.choice([(), ids(1, 3), (vocab_size + 5, *ids(1, 2))])
        bad_words = tuple(ids(1, 4) for _ in range(rng.choice([0, 0, 2, 9])))
        try:
            require_choosable(params, vocab_size, stop_ids, bad_words)
        except RequestError:
            continue
        return Ruled(ids(1, 8), ids(0, 20), ids(0, 4), params, stop_ids, bad_words)


def random_logits(count: int, vocab_size: int, seed: int) -> Tensor:
    """Halves, so that ties are common; a third are -inf, and one is infinity."""
    generator = torch.Generator().manual_seed(seed)
    logits = (6 * torch.randn(count, vocab_size, generator=generator)).round() / 2
    logits[torch.rand(count, vocab_size, generator=generator) < 0.33] = -torch.inf
    logits[0, -1] = torch.inf
    return logits


def expected_row(logits: Tensor, request: Ruled, place: int) -> Tensor:
    """One row by the book, id by id: its prefix is prompt, output and the drafts before it."""
    params = request.params
    output = request.output + request.drafts[:place]
    values = _masked(list(logits.cpu().numpy()), request, output)
    for token_id, bias in (params.logit_bias or {}).items():
        values[token_id] = values[token_id] + np.float32(bias)
    for token_id in {*request.prompt, *output} if params.has_penalties else ():
        value, factor = values[token_id], np.float32(params.repetition_penalty)
        value = value / factor if value > 0 else value * factor
        if token_id in output:
            count = np.float32(output.count(token_id))
            value = value - count * np.float32(params.frequency_penalty)
            value = value - np.float32(params.presence_penalty)
        values[token_id] = value
    return torch.tensor(np.array(values, dtype=np.float32))


def _masked(values, request, output):
    ids = range(len(values))
    allowed = set(request.params.allowed_token_ids or ids)
    allowed -= {word[0] for word in request.bad_words if len(word) == 1}
    is_early = len(output) < request.params.min_tokens
    if is_early:
        allowed -= set(request.stop_ids)
    left = set(allowed)
    for word in request.bad_words:
        before = len(word) - 1
        if before and output[max(len(output) - before, 0) :] == word[:-1]:
            left -= {word[-1]}
    has_masks = (
        request.params.allowed_token_ids is not None
        or request.bad_words
        or (request.params.min_tokens and request.stop_ids)
    )
    if has_masks and all(values[i] == FORBIDDEN for i in left):
        return [np.float32(0.0 if i == min(allowed) else FORBIDDEN) for i in ids]
    return [value if i in left else np.float32(FORBIDDEN) for i, value in enumerate(values)]


def check_rows(before: Tensor, after: Tensor, scene: Scene) -> None:
    """Every row by the book, bit for bit; dead rows as they were."""
    for index, owner in enumerate(scene.owners):
        want = before[index].cpu() if owner is None else expected_row(before[index], *owner)
        assert torch.equal(after[index].cpu().view(torch.int32), want.view(torch.int32)), index
