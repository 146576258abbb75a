"""The small kernels of a step on a GPU: real shapes, batch invariance bit for bit, CUDA graphs."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace

import pytest
import torch

from helpers.ruled import Ruled, check_rows, greedy, make_scene, random_request
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, QKNorm, RotaryTable
from sametoken.ops.sampling.logits_rules import Truncation
from sametoken.types.layout import (
    NO_REQUESTS,
    TABLE_ROWS,
    StepLayout,
    StepShape,
)
from sametoken.types.plan import (
    Admission,
    ScheduledRequest,
    StepPlan,
)

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from sametoken.layers.norm import RMSNorm
from sametoken.ops.backend import SampledRows
from sametoken.ops.lookup import ngram as ngram_reference
from sametoken.ops.lookup.ngram_triton import lookup
from sametoken.ops.model import activation as activation_reference
from sametoken.ops.model import norm_rope as norm_reference
from sametoken.ops.model import norm_triton, rope_triton
from sametoken.ops.model.activation_triton import clamped_swiglu, gelu_mul, silu_mul, soft_cap
from sametoken.ops.model.embedding_triton import (
    embed_beside,
    embedding,
)
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.sampling import logits_rules_reference as rules_reference
from sametoken.ops.sampling import logits_rules_triton as rules
from sametoken.ops.sampling import sample as sampling_reference
from sametoken.ops.sampling import sample_triton as sampling
from sametoken.ops.sampling import truncation as truncation_reference
from sametoken.ops.sampling import truncation_triton as truncation_op
from sametoken.ops.step import triton as ops
from sametoken.ops.step.types import LayoutTable
from sametoken.ops.triton import TritonKernels
from sametoken.state.sampling import SamplingTable
from sametoken.state.sequences import Sequences

BF16 = torch.bfloat16
QWEN = AttentionShape(32, 8, 128)
SMOL = AttentionShape(9, 3, 64)
ROWS = 384
#: First row and number of rows of the smaller batches that must give the big batch's bits.
COMPANIES = [(0, 1), (383, 1), (5, 2), (100, 4), (17, 33), (128, 256)]


def noise(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to one rounding of bf16."""
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("width", [99, 576, 4096, 5120])
def test_norms(width):
    x, residual, weight = noise(ROWS, width), noise(ROWS, width, seed=1), noise(width, seed=2)
    close(norm_triton.rms_norm(x, weight, 1e-6), norm_reference.rms_norm(x, weight, 1e-6))
    expected, total = norm_reference.add_rms_norm(x, residual, weight, 1e-6)
    normed, summed = norm_triton.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    close(normed, expected)
    assert torch.equal(summed, total)
    # A residual already added by the product before gives the same bits.
    assert torch.equal(norm_triton.rms_norm(total, weight, 1e-6), normed)
    for first, count in COMPANIES:
        some = slice(first, first + count)
        part, _ = norm_triton.add_rms_norm(x[some].clone(), residual[some].clone(), weight, 1e-6)
        assert torch.equal(part, normed[some])
        assert torch.equal(norm_triton.rms_norm(total[some].clone(), weight, 1e-6), normed[some])


@pytest.mark.parametrize("width", [97, 1536, 12288])
@pytest.mark.parametrize("run", [silu_mul, gelu_mul], ids=lambda run: run.__name__)
def test_gated_activations(width, run):
    gate_up = noise(ROWS, 2 * width)
    whole = run(gate_up)
    close(whole.cpu(), getattr(activation_reference, run.__name__)(gate_up.cpu()))
    for first, count in COMPANIES:
        some = slice(first, first + count)
        assert torch.equal(run(gate_up[some].clone()), whole[some])


@pytest.mark.parametrize("width", [97, 2880])
def test_clamped_swiglu(width):
    gate_up = 4 * noise(ROWS, 2 * width)
    whole = clamped_swiglu(gate_up, 1.702, 7.0)
    close(whole.cpu(), activation_reference.clamped_swiglu(gate_up.cpu(), 1.702, 7.0))
    for first, count in COMPANIES:
        some = slice(first, first + count)
        assert torch.equal(clamped_swiglu(gate_up[some].clone(), 1.702, 7.0), whole[some])


def test_soft_cap():
    logits = 60 * noise(ROWS, 9999, dtype=torch.float32)
    whole = soft_cap(logits, 30.0)
    expected = activation_reference.soft_cap(logits.cpu(), 30.0)
    torch.testing.assert_close(whole.cpu(), expected, rtol=0, atol=2e-5)
    for first, count in COMPANIES:
        some = slice(first, first + count)
        assert torch.equal(soft_cap(logits[some].clone(), 30.0), whole[some])


@pytest.mark.parametrize("width", [99, 576, 4096])
def test_embedding(width):
    matrix = noise(1000, width)
    token_ids = torch.arange(0, 1000, 3, device="cuda")
    assert torch.equal(embedding(token_ids, matrix), matrix[token_ids])


@pytest.mark.parametrize("norm_dtype", [BF16, torch.float32])
@pytest.mark.parametrize("width", [99, 576, 4096])
def test_embed_beside(width, norm_dtype):
    matrix, hidden = noise(1000, width), noise(ROWS, width, seed=1)
    token_ids = torch.arange(ROWS, device="cuda") * 7 % 1000
    kernels = ReferenceKernels()
    left, right = (
        RMSNorm(kernels, noise(width, dtype=norm_dtype, seed=seed), eps)
        for seed, eps in ((2, 1e-6), (3, 1e-2))
    )
    whole = embed_beside(token_ids, matrix, left, hidden, right)
    close(whole, kernels.embed_beside(token_ids, kernels.pack(matrix), left, hidden, right))
    embedded = norm_triton.rms_norm(embedding(token_ids, matrix), left.weight, left.eps)
    normed = norm_triton.rms_norm(hidden, right.weight, right.eps)
    assert torch.equal(whole, torch.cat((embedded, normed), dim=1))
    for first, count in COMPANIES:
        some = slice(first, first + count)
        part = embed_beside(token_ids[some].clone(), matrix, left, hidden[some].clone(), right)
        assert torch.equal(part, whole[some])


@pytest.mark.parametrize("width", [99, 576, 4096])
def test_rows_taken(width):
    states = noise(ROWS, width)
    for rows in (torch.arange(0, ROWS, 7, device="cuda"), torch.tensor([383, 0, 0], device="cuda")):
        assert torch.equal(TritonKernels().take_rows(states, rows), states[rows])


def rope_scene(shape: AttentionShape) -> tuple[torch.Tensor, RotaryTable, AttentionRows, QKNorm]:
    qkv = noise(ROWS, shape.q_size + 2 * shape.kv_size)
    angles = noise(1000, shape.head_dim // 2, dtype=torch.float32, seed=1)
    positions = torch.arange(3, 3 + ROWS, device="cuda")
    kv_slots = torch.randperm(ROWS, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    rows = AttentionRows(positions, positions, kv_slots, positions[None])
    norm = QKNorm(noise(shape.head_dim, seed=2), noise(shape.head_dim, seed=3), 1e-6)
    return qkv, RotaryTable(angles.cos(), angles.sin()), rows, norm


def empty_kv(shape: AttentionShape) -> LayerKV:
    size = (2, ROWS // 16, shape.num_kv_heads, 16, shape.head_dim)
    memory = torch.full(size, torch.nan, dtype=BF16, device="cuda")
    return LayerKV(memory[0], memory[1])


def token_major(cache: torch.Tensor, kv_slots: torch.Tensor) -> torch.Tensor:
    """[T, kv_heads, head_dim]: the cache at each row's address."""
    return cache.transpose(1, 2).flatten(0, 1)[kv_slots]


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("shape", [QWEN, SMOL, AttentionShape(40, 5, 80)])
def test_rope_and_cache(shape, with_norm):
    qkv, rotary, rows, norm = rope_scene(shape)
    norm = norm if with_norm else None
    expected_kv, whole_kv = empty_kv(shape), empty_kv(shape)
    expected = norm_reference.rope_and_cache(qkv, shape, rotary, rows, expected_kv, norm)
    whole = rope_triton.rope_and_cache(qkv, shape, rotary, rows, whole_kv, norm)
    # A rotation may cancel, so the error is bounded by the operands, not by the result.
    torch.testing.assert_close(whole, expected, rtol=2**-7, atol=2e-2)
    torch.testing.assert_close(whole_kv.keys, expected_kv.keys, rtol=2**-7, atol=2e-2)
    assert torch.equal(whole_kv.values, expected_kv.values)
    for first, count in COMPANIES:
        some = slice(first, first + count)
        part_rows = AttentionRows(
            rows.positions[some].clone(), rows.slots, rows.kv_slots[some].clone(), rows.block_table
        )
        kv = empty_kv(shape)
        part = rope_triton.rope_and_cache(qkv[some].clone(), shape, rotary, part_rows, kv, norm)
        assert torch.equal(part, whole[some])
        for mine, all_of_them in ((kv.keys, whole_kv.keys), (kv.values, whole_kv.values)):
            addresses = rows.kv_slots[some]
            assert torch.equal(token_major(mine, addresses), token_major(all_of_them, addresses))


@pytest.mark.parametrize("vocab_size", [49152, 151936, 50257])
def test_sampling(vocab_size):
    logits = noise(ROWS, vocab_size, dtype=torch.float32) * 4
    seeds = torch.arange(ROWS, device="cuda") * 2**40 + 7
    positions = torch.arange(ROWS, device="cuda") * 1000
    temperature = torch.tensor([0.0, 0.6, 1.0], device="cuda").repeat(ROWS // 3)
    whole = sampling.sample(logits, temperature, seeds, positions)
    greedy = temperature == 0
    assert torch.equal(whole[greedy], logits[greedy].argmax(dim=-1))
    always_greedy = sampling.sample(logits, torch.zeros_like(temperature), seeds, positions)
    assert torch.equal(always_greedy, logits.argmax(dim=-1))
    for first, count in COMPANIES:
        some = slice(first, first + count)
        part = sampling.sample(logits[some], temperature[some], seeds[some], positions[some])
        assert torch.equal(part, whole[some])
    expected = sampling_reference.sample(logits, temperature, seeds, positions)
    differing = (whole != expected).nonzero().squeeze(1)
    # Two libraries' logarithms may part a near tie, no more.
    assert differing.numel() <= 1
    for row in differing.tolist():
        noise_row = sampling_reference.gumbel_noise(seeds[[row]], positions[[row]], vocab_size)[0]
        values = logits[row] / temperature[row] + noise_row
        assert (values[whole[row]] - values[expected[row]]).abs() < 1e-4


@pytest.mark.parametrize(("columns", "vocab_size"), [(32000, 128256), (777, 50257)])
@pytest.mark.parametrize("rows", [3, 96])
def test_sampling_of_mapped_columns(columns, vocab_size, rows):
    logits = noise(rows, columns, dtype=torch.float32) * 4
    logits[::2] = logits[::2].round()
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(columns))
    token_ids = order[:columns].sort().values.cuda()
    full = torch.full((rows, vocab_size), -torch.inf, device="cuda")
    full[:, token_ids] = logits
    temperature = torch.tensor([0.0, 0.6, 1.0], device="cuda").repeat(rows // 3)
    seeds = torch.arange(rows, device="cuda") * 2**40 + 7
    positions = torch.arange(rows, device="cuda") * 1000
    found = sampling.sample(logits, temperature, seeds, positions, token_ids)
    assert torch.equal(found, sampling.sample(full, temperature, seeds, positions))


def truncation_of(*slots: tuple[float, int, float, float]) -> Truncation:
    columns = torch.tensor(slots, dtype=torch.float64, device="cuda").t().contiguous()
    return Truncation(columns[0].float(), columns[1].long(), columns[2], columns[3])


CUTS = (
    (0.6, 20, 0.95, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.5, 3000, 0.99, 0.0),
    (0.8, 50, 1.0, 0.0),
    (0.0, 1, 0.1, 1.0),
    (1.0, 0, 1.0, 0.0),
    (3.0, 0, 0.8, 0.0001),
)


@pytest.mark.parametrize("vocab_size", [49152, 151936, 50257])
def test_truncation(vocab_size):
    logits = noise(ROWS, vocab_size, dtype=torch.float32) * 4
    # Of bf16 logits many are equal.
    logits[::3] = logits[::3].bfloat16().float()
    truncation, slots = truncation_of(*CUTS), torch.arange(ROWS, device="cuda") % len(CUTS)
    whole, expected = logits.clone(), logits.clone()
    truncation_op.truncate(whole, slots, truncation)
    truncation_reference.truncate(expected, slots, truncation)
    kept = whole != -torch.inf
    assert torch.equal(whole[kept], logits[kept])
    cut_rows = ~kept.all(dim=-1)
    assert torch.equal(cut_rows, (truncation.temperature[slots] > 0) & (slots != 6))
    assert torch.equal(whole[slots == 4], expected[slots == 4])
    # Exponentials in fp32 and fp64 may part where a prefix all but reaches the goal, no more.
    both = kept & (expected != -torch.inf)
    differing = (both != kept).any(dim=-1) | (both != (expected != -torch.inf)).any(dim=-1)
    left = logits.clone()
    no_top_p = Truncation(
        truncation.temperature,
        truncation.top_k,
        torch.ones_like(truncation.top_p),
        truncation.min_p,
    )
    truncation_reference.truncate(left, slots, no_top_p)
    scaled = left[differing].double() / truncation.temperature[slots[differing], None]
    reached = (scaled.softmax(dim=-1) * both[differing]).sum(dim=-1)
    assert ((reached - truncation.top_p[slots[differing]]).abs() < 5e-6).all()
    assert differing.sum() < ROWS // 4
    for first, count in COMPANIES:
        some = slice(first, first + count)
        part = logits[some].clone()
        truncation_op.truncate(part, slots[some].clone(), truncation)
        assert torch.equal(part, whole[some])


def test_truncation_in_a_graph():
    logits, slots = noise(8, 151936, dtype=torch.float32), torch.arange(8, device="cuda")
    truncation = truncation_of(*CUTS)
    expected, static = logits.clone(), logits.clone()
    truncation_op.truncate(expected, slots, truncation)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        truncation_op.truncate(static, slots, truncation)
    assert torch.equal(static, logits)
    graph.replay()
    assert torch.equal(static, expected)


@pytest.fixture
def no_waiting():
    """Calls what it is given, where waiting for the device is an error."""

    def guarded(call, *arguments):
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings():
                # Setting it warns, once, that it is a prototype.
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("error")
            return call(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return guarded


def check_rules(scene, logits: torch.Tensor, no_waiting) -> torch.Tensor:
    """The reference's bits, without waiting for the device."""
    expected = scene.apply(rules_reference, logits)
    found = no_waiting(scene.apply, rules, logits)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    return found


@pytest.mark.parametrize("gaps", [(0,), (0, 3, 1)])
@pytest.mark.parametrize("vocab_size", [49152, 151936, 50257])
def test_rules(no_waiting, vocab_size, gaps):
    rng = random.Random(vocab_size)
    # Tokens that recur, and tokens from all over the vocabulary.
    requests = [random_request(rng, vocab_size, (6, vocab_size)[i % 2]) for i in range(64)]
    scene = make_scene(requests, "cuda", gaps=gaps)
    logits = noise(len(scene.owners), vocab_size, dtype=torch.float32) * 4
    logits[::3] = logits[::3].bfloat16().float()
    logits[5::7] = -torch.inf
    whole = check_rules(scene, logits, no_waiting)
    assert torch.equal(whole, check_rules(scene, logits, no_waiting))
    some = [row for row, owner in enumerate(scene.owners) if owner is not None][::9]
    check_rows(logits[some], whole[some], replace(scene, owners=[scene.owners[r] for r in some]))
    for first, count in [(0, 1), (63, 1), (5, 2), (17, 33)]:
        part = make_scene(requests[first : first + count], "cuda")
        rows = [
            row
            for row, owner in enumerate(scene.owners)
            if owner is not None and any(owner[0] is one for one in requests[first : first + count])
        ]
        assert torch.equal(check_rules(part, logits[rows], no_waiting), whole[rows])


@pytest.mark.parametrize("length", [1, 4096, 131_000])
def test_penalties_of_a_long_history(no_waiting, length):
    vocab_size = 151936
    tokens = torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(1))
    tokens[::3] %= 50
    tokens = tuple(tokens.tolist())
    params = greedy(frequency_penalty=0.37, presence_penalty=-0.2, repetition_penalty=1.07)
    requests = [
        Ruled(tokens[: length // 2 + 1], tokens[length // 2 + 1 :], (3, 3, 99), params),
        Ruled((5,), (5,) * (length - 1), (5,), params),
        Ruled(tokens),
        Ruled((5,) * length, (), (7,) * 64, params),
    ]
    scene = make_scene(requests, "cuda", max_len=length + 66)
    check_rules(scene, noise(len(scene.owners), vocab_size, dtype=torch.float32), no_waiting)


def test_many_bad_words_biases_and_stuck_rows(no_waiting):
    """What one thread of a program stores, others see."""
    vocab_size = 151936
    words = tuple((1, 2 + 3 * i, 7 * i) for i in range(5000)) + tuple((1, i) for i in range(5000))
    allowed = greedy(allowed_token_ids=list(range(0, 5000, 2)), logit_bias={0: 0.5, 4998: 2.0})
    biased = greedy(logit_bias={i: i / 7 for i in range(0, vocab_size, 50)})
    everything = tuple((i,) for i in range(vocab_size - 1))
    requests = [
        Ruled((3,), (1,), (2, 1, 5), allowed, bad_words=words),
        Ruled((3,), (1,), (1, 1), biased, bad_words=words),
        Ruled((3,), (1,), params=biased, bad_words=(*everything, (1, vocab_size - 1))),
    ]
    scene = make_scene(requests, "cuda")
    logits = noise(len(scene.owners), vocab_size, dtype=torch.float32)
    after = check_rules(scene, logits, no_waiting)
    check_rows(logits, after, scene)
    assert (after[[0, 2, -1]] != -torch.inf).sum(dim=-1).tolist() == [1, 1, 1]


def test_admission_waits_for_nothing(no_waiting):
    table = SamplingTable.allocate(4, torch.device("cuda"))
    params = greedy(allowed_token_ids=[1, 2], logit_bias={1: 2.0}, presence_penalty=1.0)
    for slot in (0, 3, 0):
        admission = Admission(slot, (1,), 0, params, (7,), ((1, 2),))
        no_waiting(ops.write_tables, no_waiting(table.admit, admission))
    assert table.rules.counter_of.tolist() == [0, -1, -1, 1, -1]


def test_poisoned_rows():
    logits = noise(64, 151936, dtype=torch.float32)
    logits[7, 151935] = torch.nan
    logits[63, 0] = torch.nan
    slots = torch.arange(64, device="cuda")
    temperature = torch.zeros(64, device="cuda")
    at = SampledRows(None, slots, slots, slots, slots)
    best = sampling.token_keys(logits, temperature, slots, at).amax(dim=1)
    assert sampling_reference.has_nan(best).nonzero().squeeze(1).tolist() == [7, 63]
    assert (sampling_reference.token_of(best) < 151936).all()


@pytest.mark.parametrize("length", [2, 1023, 1024, 1025, 30001])
def test_lookup(length):
    generator = torch.Generator().manual_seed(length)
    token_ids = torch.randint(0, 12, (8, 32768), generator=generator)
    slots = torch.tensor([5, 0, 7, 1])
    lengths = torch.tensor([length, max(length // 2, 1), length, max(length - 1, 1)])
    expected = ngram_reference.lookup(token_ids, slots, lengths, min_length=2, max_length=10, k=9)
    actual = lookup(
        token_ids.cuda(), slots.cuda(), lengths.cuda(), min_length=2, max_length=10, k=9
    )
    assert torch.equal(actual[0].cpu(), expected[0])
    assert torch.equal(actual[1].cpu(), expected[1])


VOCABULARY, K, SLOTS = 3000, 4, 6


class ToyLoop:
    """A decode step on a target that knows the last token alone, with a static layout table."""

    def __init__(self, k: int) -> None:
        self.k = k
        # Few tokens are likely, so that prompt lookup finds matches.
        self.table = noise(VOCABULARY, VOCABULARY, dtype=torch.float32, seed=9)
        self.table[:, :6] += 12
        self.sequences = Sequences.allocate(
            max_num_seqs=SLOTS,
            max_len=512,
            num_drafts=k,
            block_size=16,
            reserved_block=400,
            device=torch.device("cuda"),
        )
        self.sequences.num_tokens[:SLOTS] = 1
        self.sequences.token_ids[:SLOTS, 0] = torch.arange(SLOTS, device="cuda")
        self.temperature = torch.tensor([0.0, 0.2, 0.5, 1.0, 0.0, 0.7, 0.0], device="cuda")
        self.seeds = torch.arange(SLOTS + 1, device="cuda") + 100
        requests, rows = SLOTS + 2, (SLOTS + 2) * (k + 1)
        self.shape = StepShape(requests, rows, rows, requests, k + 1, k + 1)
        table = torch.empty(TABLE_ROWS, self.shape.table_width, dtype=torch.int64, device="cuda")
        self.layout = LayoutTable(table, self.shape)
        self.lay_out(NO_REQUESTS)
        self.accepted = torch.zeros((), dtype=torch.int64, device="cuda")

    def lay_out(self, layout: StepLayout) -> None:
        self.layout.table.copy_(torch.tensor(layout.table(self.shape, SLOTS, 0)))

    def step(self) -> None:
        x = ops.prepare_inputs(self.sequences, self.layout)
        logits = self.table[x.token_ids]
        keys = sampling.token_keys(logits, self.temperature, self.seeds, x.sampled)
        verified = ops.verify(keys, x)
        lengths = ops.commit(self.sequences, x, verified.num_accepted, verified.next_token)
        self.accepted += verified.num_accepted.sum()
        if self.k:
            drafts = lookup(
                self.sequences.token_ids,
                x.slots,
                lengths.num_tokens,
                min_length=1,
                max_length=3,
                k=self.k,
            )
            ops.publish(self.sequences, x, *drafts)

    def run(self, batches: list[list[int]]) -> None:
        """Capture one step on padding alone, then replay it for every batch."""
        self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        for step_id, batch in enumerate(batches):
            rows = tuple(ScheduledRequest(slot, 1, self.k, True) for slot in batch)
            self.lay_out(StepLayout.of(StepPlan(step_id, requests=rows)))
            graph.replay()
        torch.cuda.synchronize()


def test_a_captured_step_emits_the_same_tokens_with_and_without_drafts():
    batches = [[(step + i) % SLOTS for i in range(1 + step % SLOTS)] for step in range(60)]
    plain, speculative = ToyLoop(0), ToyLoop(K)
    plain.run(batches * 3)
    speculative.run(batches)
    assert int(speculative.accepted) > 50
    for loop in (plain, speculative):
        assert loop.sequences.num_tokens[SLOTS] == 0
        assert loop.sequences.num_computed[SLOTS] == 0
        assert not loop.sequences.token_ids[SLOTS].any()
    for slot in range(SLOTS):
        lengths = [int(loop.sequences.num_tokens[slot]) for loop in (plain, speculative)]
        common = min(lengths)
        assert common > 30
        assert torch.equal(
            plain.sequences.token_ids[slot, :common],
            speculative.sequences.token_ids[slot, :common],
        )
