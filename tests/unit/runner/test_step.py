"""A step as a whole: what it says of logits, over recurrent state, and on several ranks."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.harness import Shape, build, request, run
from helpers.hybrid_toy import HybridToy
from helpers.lookups import ngram_drafter
from helpers.one_step import Row, case_of
from helpers.static_steps import STEPS, DeviceChoices
from helpers.step_scenes import DEVICE, Scene, Slot, row_of
from helpers.thread_ranks import run_ranks
from sametoken.drafters.base import Drafts, NoDrafter
from sametoken.models.base import HiddenStates
from sametoken.ops.lookup.ngram_triton import lookup
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.model.recurrent.rule import STATE_STRIDE
from sametoken.ops.model.recurrent.triton import TritonPass
from sametoken.ops.sampling import sample as reference
from sametoken.ops.step import compact
from sametoken.ops.step import triton as in_triton
from sametoken.ops.step.reference import write_tables
from sametoken.ops.step.types import NUM_COUNTS, Chances
from sametoken.ops.triton import TritonKernels
from sametoken.runner.step import Step
from sametoken.state.sampling import SamplingTable
from sametoken.types.plan import Admission
from sametoken.types.sampling_params import SamplingParams

VOCAB_SIZE = 5
each_kind = pytest.mark.parametrize("steps", STEPS)
token_ids = st.integers(0, VOCAB_SIZE - 1)
rows_of_a_step = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(token_ids, min_size=1, max_size=4).map(tuple),
            "output": st.lists(token_ids, max_size=3).map(tuple),
            "drafts": st.lists(token_ids, max_size=5).map(tuple),
            "temperature": st.sampled_from([0.0, 0.3, 1.0]),
            "penalty": st.sampled_from([1.0, 1.0, 1.5]),
            "seed": st.integers(0, 2**63 - 1),
            "samples": st.sampled_from([True, True, True, False]),
        }
    ),
    min_size=1,
    max_size=5,
)


def random_logits(count, seed, vocab_size=VOCAB_SIZE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, vocab_size, generator=generator) * 2


def row_from(spec) -> Row:
    params = SamplingParams(
        temperature=spec["temperature"], seed=spec["seed"], repetition_penalty=spec["penalty"]
    )
    drafts = spec["drafts"] if spec["samples"] else ()
    return Row(spec["prompt"], spec["output"], drafts, params, samples=spec["samples"])


def plainly(row: Row, processed, raw) -> tuple[tuple[int, ...], bool]:
    """Emitted tokens of one window and whether it is poisoned, one row after the other.

    A poisoned row after the first ends the window, and is the first of the next.
    """
    emitted: list[int] = []
    for r, values in enumerate(processed):
        if raw[r].isnan().any():
            return tuple(emitted), r == 0
        position = len(row.prompt) + len(row.output) + r
        arguments = ([row.params.temperature], [row.params.seed], [position])
        emitted.append(reference.sample(values[None], *map(torch.tensor, arguments)).item())
        if r == len(row.drafts) or emitted[-1] != row.drafts[r]:
            return tuple(emitted), False
    return (), False


@each_kind
@settings(max_examples=20)
@given(rows_of_a_step, st.integers(0, 2**31), st.sets(st.integers(0, 20), max_size=2))
def test_verdicts_agree_with_a_plain_loop(steps, specs, seed, nan_rows):
    case = case_of([row_from(spec) for spec in specs])
    logits = random_logits(case.num_logits, seed)
    logits[[row for row in nan_rows if row < case.num_logits], 1] = math.nan
    ran = case.run(logits, steps=steps)
    start = 0
    for index, row in enumerate(case.rows):
        own = slice(start, start + row.window)
        start += row.window
        emitted, poisoned = plainly(row, ran.processed[own], logits[own])
        assert ran.failed[index] == poisoned
        if not poisoned:
            assert ran.tokens[index] == emitted
            assert ran.verified.num_accepted[index] == max(len(emitted) - 1, 0)


@each_kind
def test_a_poisoned_window_leaves_its_neighbours_alone(steps):
    rows, logits = [Row((1,), drafts=(2, 2))] * 3, random_logits(9, 4)
    clean = case_of(rows).run(logits, steps=steps)
    logits[3, 0] = math.nan
    ran = case_of(rows).run(logits, steps=steps)
    assert ran.failed == [False, True, False]
    assert ran.tokens[::2] == clean.tokens[::2]


@each_kind
def test_an_infinite_logit_is_not_poison(steps):
    logits = torch.zeros(1, 6)
    logits[0, 0], logits[0, 3] = -math.inf, math.inf
    ran = case_of([Row((1, 1))]).run(logits, steps=steps)
    assert ran.failed == [False]
    assert ran.tokens == [(3,)]


def test_a_greedy_step_makes_no_noise(monkeypatch):
    monkeypatch.setattr(reference, "gumbel_noise", None)
    ran = case_of([Row((1, 1), drafts=(1, 2))]).run(torch.eye(6)[1:4])
    assert ran.tokens == [(1, 2, 3)]


def test_a_new_request_inherits_nothing_of_its_slot():
    former = SamplingParams(
        seed=3, top_k=1, min_p=0.5, top_p=0.1, logprobs=2, prompt_logprobs=1,
        repetition_penalty=5.0, logit_bias={0: 50.0}, min_tokens=9,
    )  # fmt: skip
    case = case_of([Row((1, 1), params=former, stop_ids=(1,))], slots=[1])
    logits = random_logits(1, 3)
    expected = case_of([Row((1, 1))], slots=[1]).run(logits)
    write_tables(case.table.admit(Admission(1, (1, 1), 0, SamplingParams(temperature=0.0))))
    ran = case.run(logits)
    assert ran.tokens == expected.tokens
    assert ran.buffer.logprobs is None
    assert not case.table.rules.edits
    assert not case.table.rules.counters


@each_kind
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_drafts_accepted_by_chance_are_emitted_before_the_target_s_own_token(rate, steps):
    rows = [
        Row((1, 2, 3), (4,), (5, 6, 7)),
        Row((1, 2)),
        Row((9, 8), (7, 6), (5, 4)),
        Row((1, 2, 3, 4), num_query=2, samples=False),
    ]
    case, logits = case_of(rows), random_logits(8, 0, vocab_size=11)
    own = logits.argmax(dim=-1).tolist()
    chances = Chances(torch.full((4,), rate), case.table.seed)
    ran = case.run(logits, steps=steps, chances=chances)
    accepted = [rows[0].drafts, (), rows[2].drafts] if rate else [()] * 3
    starts = (0, 4, 5)
    assert ran.tokens == [
        *(
            (*drafts, own[start + len(drafts)])
            for drafts, start in zip(accepted, starts, strict=True)
        ),
        (),
    ]
    assert not any(ran.failed)


class Stubborn(ModuleType):
    """Accepts nothing and says 4 for ever."""

    def __getattr__(self, name):
        return getattr(compact, name)

    def verify(self, keys, x, chances=None):
        verified = compact.verify(keys, x, chances)
        nothing = torch.zeros_like(verified.num_accepted)
        return dataclasses.replace(verified, num_accepted=nothing, next_token=nothing + 4)


def test_every_rank_commits_what_rank_0_decides():
    """Whatever the others would have said; nobody asks them."""
    rows = [Row((1, 1), drafts=(1, 2, 0)), Row((1,), drafts=(3,)), Row((2, 2), drafts=(1,))]
    logits = torch.eye(VOCAB_SIZE)[[1, 2, 3, 4, 2, 2, 1, 0]]
    alone = case_of(rows)
    expected = alone.run(logits)
    assert expected.tokens == [(1, 2, 3), (2,), (1, 0)]

    def work(parallel):
        case = case_of(rows)
        ops = Stubborn("stubborn") if parallel.rank else compact
        ran = case.run(logits, parallel=parallel, ops=ops)
        return case.sequences, ran.verified.num_accepted.tolist()

    for sequences, accepted in run_ranks(3, work):
        assert accepted == [2, 0, 1]
        for fact in ("token_ids", "num_tokens", "num_computed"):
            assert torch.equal(getattr(sequences, fact), getattr(alone.sequences, fact))


PROMPTS = {"a": [3, 1, 4, 1, 5, 9, 2], "b": [7, 8, 7]}
GREEDY = {name: {"temperature": 0.0} for name in PROMPTS}
CUT = {
    "a": {"temperature": 9.0, "top_k": 3, "top_p": 0.8, "seed": 1},
    "b": {"temperature": 4.0, "top_p": 0.7, "min_p": 0.1, "seed": 1},
}


class DevicePasses(DeviceChoices):
    """As ``DeviceChoices``, with recurrent layers by the kernels of captured steps too."""

    def begin_pass(self, rows, folded) -> TritonPass:
        return TritonPass.begin(rows, folded)


def hybrid_tokens(params, k: int, steps: str, kernels: DeviceChoices):
    """What a target with recurrent state alone says, how much was accepted, and its step."""
    shape = Shape(num_drafts=k, prefill_chunk_size=5, prefix_caching=False, cache_emitted=False)
    drafter = (lambda parts: ngram_drafter(k, 1, 2, lookup)) if k else None
    model = HybridToy(pull=9.0, kernels=kernels)
    core = build(model, shape, make_drafter=drafter, kernels=kernels, steps=steps)
    items = [request(name, PROMPTS[name], 7, **params[name]) for name in PROMPTS]
    return run(core, items), core._runner.step


@pytest.mark.parametrize(("params", "k"), [(GREEDY, 0), (CUT, 2)], ids=["greedy-0", "cut-2"])
def test_chunks_and_windows_over_recurrent_state_say_what_plain_decoding_says(params, k):
    """Static shapes by the kernels of captured steps, recurrent state too."""
    plain, _ = hybrid_tokens(params, 0, "compact", DeviceChoices())
    ran, step = hybrid_tokens(params, k, "kernels", DevicePasses())
    assert ran.tokens == plain.tokens
    assert (ran.accepted > 0) == (k > 0)
    folded, sequences = step.kv.folded, step.sequences
    for held in step.kv.slots:
        assert held[:, sequences.reserved_slot].isnan().all(), "the reserved slot is written"
    # What is folded is at most what is computed: of a window, its accepted drafts are pending.
    computed = sequences.num_computed
    assert (folded.position <= computed).all()
    assert (folded.position + folded.num_pending >= computed).all()
    assert k or not (folded.position % STATE_STRIDE).any()


def test_those_cuts_decide_tokens():
    uncut = {name: {**CUT[name], "top_k": 0, "top_p": 1.0, "min_p": 0.0} for name in CUT}
    free, cut = (hybrid_tokens(params, 0, "compact", DeviceChoices())[0] for params in (uncut, CUT))
    assert free.tokens != cut.tokens


class Noted(TorchDispatchMode):
    """Names of PyTorch's operations; views, empty memory and the interpreter's own are free."""

    FREE = frozenset(
        ("empty", "new_empty", "empty_like", "unbind", "view", "slice", "select", "set_", "copy_")
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # What is empty launches nothing.
        if not (isinstance(result, torch.Tensor) and result.numel() == 0):
            self.names.add(func.overloadpacket.__name__)
        return result


class Still:
    """A target and a drafter that have answered before they are asked."""

    kv_caches, lookahead_slots, lookahead_tokens = (), 0, 0

    def __init__(self, rows: int, batch: int, k: int) -> None:
        self.hidden = torch.randn(rows, 11, device=DEVICE)
        ones = torch.ones(batch, k + 1, dtype=torch.int64, device=DEVICE)
        self.drafts = Drafts(ones[:, 1:].contiguous(), ones[:, 0].contiguous())

    def forward(self, token_ids, rows, kv, kept=None):
        return HiddenStates(self.hidden[: len((kept or rows).slots)], self.hidden[:, :0])

    def compute_logits(self, hidden):
        return hidden

    def propose(self, context):
        return self.drafts


@pytest.mark.parametrize("chunk", [0, 6])
@pytest.mark.parametrize("synthetic", [False, True])
@pytest.mark.parametrize("k", [0, 2])
def test_no_kernel_of_pytorch_runs_beside_the_model_and_the_drafter(k, synthetic, chunk):
    """Each would cost a captured step PDL between two launches."""
    slots = (Slot(9, 8, (1, 2)[:k]), Slot(9, 8), Slot(20, 4))
    rows = [row_of(0, slots[0], 1, k), row_of(1, slots[1], 1, k)]
    rows += [row_of(2, slots[2], chunk, 0)] if chunk else []
    scene = Scene(slots, tuple(rows), k, (1, 1 if chunk else 0, 2, 2))
    sequences, shape = scene.sequences(), scene.shape
    still = Still(shape.num_rows, shape.num_requests, k)
    table = SamplingTable.allocate(len(slots), DEVICE)
    step = Step(
        sequences=sequences,
        model=still,
        kv=None,
        kernels=TritonKernels(GemmTable()),
        ops=in_triton,
        table=table,
        drafter=still if k else NoDrafter(),
        results=torch.zeros(4, NUM_COUNTS + k + 1, dtype=torch.int64),
        chances=Chances(torch.ones(k, device=DEVICE), table.seed) if synthetic else None,
    )
    layout = scene.table(sequences)
    with Noted() as noted:
        step.verify_and_propose(step.forward(layout))
    assert step.results[: len(rows), 0].tolist() == [41] * len(rows)
    assert noted.names - Noted.FREE == set()
