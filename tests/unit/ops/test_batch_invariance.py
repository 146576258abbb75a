"""Batch invariance: a row's bits depend on that row's inputs and on the KV it may see."""

from __future__ import annotations

import functools

import pytest
import torch

from sametoken.layers.norm import RMSNorm
from sametoken.ops.backend import AttentionShape, QKNorm, RotaryTable, Routing
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=[NativeKernels(), ReferenceKernels()], ids=lambda k: k.name)
def kernels(request):
    return request.param


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request):
    return request.param


def normal(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_independent(function, *columns):
    """Each row of ``function`` alone, in every batch, and in another order."""
    whole = function(*columns)
    total = len(whole)
    assert not whole.isnan().any()
    for start, size in [(0, 1), (total - 1, 1), (3, 2), (1, 5), (2, 8), (7, 13), (5, 33)]:
        part = slice(start % total, start % total + size)
        assert torch.equal(function(*(c[part] for c in columns)), whole[part]), (start, size)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1))
    assert torch.equal(function(*(c[order] for c in columns)), whole[order])
    for threads in (2, 16):
        torch.set_num_threads(threads)
        assert torch.equal(function(*columns), whole)
        assert torch.equal(function(*(c[:1] for c in columns)), whole[:1])


@pytest.mark.parametrize(
    ("n", "k", "rows"),
    [(96, 576, 300), (577, 130, 70), (64, 1536, 70), (33, 65, 300), (8, 43, 70), (3, 43, 70)],
)
def test_linear(kernels, dtype, rows, n, k):
    weight = kernels.pack(normal(n, k, dtype=dtype))
    bias, x = normal(n, dtype=dtype, seed=1), normal(rows, k, dtype=dtype, seed=2)
    assert_rows_independent(weight.matmul, x)
    assert_rows_independent(lambda x: weight.matmul(x, bias), x)
    if n % 2 == 0:
        assert_rows_independent(weight.gated_matmul, x)


def test_logits(kernels, dtype):
    weight = kernels.pack(normal(4999, 96, dtype=dtype))
    x = normal(70, 96, dtype=dtype, seed=2)
    assert_rows_independent(lambda x: weight.matmul(x, out_dtype=torch.float32), x)


def test_reference_products_run_on_one_thread(monkeypatch, dtype):
    """On some CPUs alone the tests above show that a library parts sums among threads."""
    threads, linear = [], torch.nn.functional.linear

    def noting(*given):
        threads.append(torch.get_num_threads())
        return linear(*given)

    monkeypatch.setattr(torch.nn.functional, "linear", noting)
    torch.set_num_threads(2)
    weight = ReferenceKernels().pack(normal(64, 96, dtype=dtype))
    weight.matmul(normal(9, 96, dtype=dtype, seed=2))
    assert threads == [1, 1]
    assert torch.get_num_threads() == 2


def test_native_logits_round_to_linear():
    """One accumulation order for all products of a dtype."""
    kernels = NativeKernels()
    weight = kernels.pack(normal(500, 96, dtype=torch.bfloat16))
    x = normal(9, 96, dtype=torch.bfloat16, seed=2)
    assert torch.equal(weight.matmul(x, out_dtype=torch.float32).bfloat16(), weight.matmul(x))


@pytest.mark.parametrize("hidden", [576, 101, 1])
def test_row_operations(kernels, dtype, hidden):
    x, weight = normal(300, hidden, dtype=dtype), normal(hidden, dtype=dtype, seed=1)
    residual = normal(300, hidden, dtype=dtype, seed=2)

    def added(x, residual):
        normed, total = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
        return torch.cat((normed, total), dim=1)

    assert_rows_independent(lambda x: kernels.rms_norm(x, weight, 1e-5), x)
    assert_rows_independent(added, x, residual)
    assert_rows_independent(kernels.sigmoid_mul, x, residual)
    gate_up = torch.cat((x, residual), dim=1)
    assert_rows_independent(kernels.gelu_mul, gate_up)
    assert_rows_independent(lambda x: kernels.clamped_swiglu(x, 1.7, 0.9), gate_up)
    assert_rows_independent(lambda x: kernels.soft_cap(x, 2.5), x.float())
    for exact in (weight, weight.float()):
        gated = functools.partial(kernels.gated_rms_norm, weight=exact, eps=1e-5)
        assert_rows_independent(gated, x, residual)


def test_rows_of_nan_change_no_other_row(kernels, dtype):
    """Dead rows hold anything; experts that they ask for exist."""
    weight = kernels.pack(normal(64, 40, dtype=dtype))
    down = kernels.pack(normal(40, 32, dtype=dtype))
    experts = kernels.pack_experts([weight] * 3, [down] * 3)
    norm = normal(40, dtype=dtype, seed=2)

    def routed(x):
        chosen, weights = kernels.moe_gate(x[:, :3].contiguous(), Routing(2, True))
        assert ((chosen >= 0) & (chosen < 3)).all()
        return experts(x, chosen, weights)

    live = torch.arange(50) % 7 == 3
    for function in (
        weight.matmul,
        lambda x: weight.matmul(x, out_dtype=torch.float32),
        weight.gated_matmul,
        lambda x: kernels.rms_norm(x, norm, 1e-5),
        lambda x: kernels.add_rms_norm(x.clone(), x.clone(), norm, 1e-5)[0],
        lambda x: kernels.gated_rms_norm(x, x, norm, 1e-5),
        lambda x: kernels.sigmoid_mul(x, x),
        kernels.gelu_mul,
        lambda x: kernels.clamped_swiglu(x, 1.7, 0.9),
        lambda x: kernels.soft_cap(x.float(), 2.5),
        routed,
    ):
        x = normal(50, 40, dtype=dtype, seed=1)
        expected = function(x)
        x[~live] = torch.nan
        assert torch.equal(function(x)[live], expected[live])


def test_sigmoid_routers(kernels):
    """No row's scores are the remainder of a library's vectors."""
    routing = Routing(3, True, "sigmoid", num_groups=4, top_groups=2, group_best=2)
    bias = normal(8, dtype=torch.float32, seed=1)
    for rows in (1, 2, 41):
        logits = normal(rows, 8, dtype=torch.float32, seed=rows)
        assert_rows_independent(lambda x: kernels.moe_gate(x, routing, bias)[1], logits)


def test_embedding(kernels, dtype):
    weight = kernels.pack(normal(99, 40, dtype=dtype))
    assert_rows_independent(weight.rows, torch.arange(70) % 99)


def test_embed_beside(kernels, dtype):
    weight = kernels.pack(normal(99, 40, dtype=dtype))
    norms = [RMSNorm(kernels, normal(40, dtype=dtype, seed=seed), 1e-5) for seed in (1, 2)]

    def beside(ids, hidden):
        return kernels.embed_beside(ids, weight, norms[0], hidden, norms[1])

    assert_rows_independent(beside, torch.arange(70) % 99, normal(70, 40, dtype=dtype, seed=3))


def test_sample(kernels):
    logits = normal(40, 9001, dtype=torch.float32)
    temperature = torch.arange(40) % 4 / 2.0
    seeds, positions = torch.arange(40) * 7919, torch.arange(40) + 2**33
    assert_rows_independent(kernels.sample, logits, temperature, seeds, positions)
    token_ids = torch.arange(9001) * 3 + 1
    mapped = functools.partial(kernels.sample, token_ids=token_ids)
    assert_rows_independent(mapped, logits, temperature, seeds, positions)


@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_and_cache(kernels, dtype, make_scene, with_norm):
    shape = AttentionShape(4, 2, 40)
    slots, positions = [0] * 40 + [1] * 30, [*range(40), *range(5, 35)]
    history = torch.zeros(2, 2, 40, 2, 40, dtype=dtype)
    angles = normal(40, 8, dtype=torch.float32)
    rotary = RotaryTable(angles.cos(), angles.sin())
    weights = normal(2, 40, dtype=dtype, seed=3)
    norm = QKNorm(weights[0], weights[1], 1e-6) if with_norm else None

    def rotated(qkv, slot, position):
        scene = make_scene(shape, history, [0, 0], 16, seed=int(position.sum()))
        rows = scene.rows(slot.tolist(), position.tolist())
        q = kernels.rope_and_cache(qkv, shape, rotary, rows, scene.kv, norm)
        blocks, offsets = rows.kv_slots // 16, rows.kv_slots % 16
        written = [cache[blocks, :, offsets] for cache in (scene.kv.keys, scene.kv.values)]
        return torch.cat([part.flatten(1) for part in (q, *written)], dim=1)

    qkv = normal(70, shape.q_size + 2 * shape.kv_size, dtype=dtype, seed=4)
    assert_rows_independent(rotated, qkv, torch.tensor(slots), torch.tensor(positions))


@pytest.mark.parametrize(
    ("shape", "sinks"),
    [
        (AttentionShape(9, 3, 64), None),
        (AttentionShape(7, 1, 40), None),
        (AttentionShape(4, 4, 40), None),
        (AttentionShape(4, 2, 40, sliding_window=9), None),
        (AttentionShape(4, 2, 40), torch.tensor([0.3, 2.0, -1.0, 6.0])),
    ],
)
def test_attention_is_one_function_for_prefill_decode_and_verify(
    kernels, dtype, make_scene, shape, sinks
):
    """Stretches of two slots as prefill chunks, windows and single rows."""
    length, stretches = 530, ((0, 20), (245, 262), (500, 530))
    history = normal(2, 2, length, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    q = normal(2, length, shape.num_heads, shape.head_dim, dtype=dtype, seed=1)

    def attend(parts, lengths, block_size, seed):
        """Rows of ``parts`` (slot, first, last), KV above ``lengths`` being NaN."""
        scene = make_scene(shape, history, lengths, block_size, seed)
        slots = [slot for slot, first, last in parts for _ in range(first, last)]
        positions = [p for _, first, last in parts for p in range(first, last)]
        rows = scene.rows(slots, positions)
        return kernels.attention(q[slots, positions], shape, rows, scene.kv, sinks)

    together = attend([(s, *span) for s in (0, 1) for span in stretches], [length] * 2, 16, 0)
    assert not together.isnan().any()
    whole = torch.full((2, length, shape.q_size), float("nan"), dtype=dtype)
    positions = [p for span in stretches for p in range(*span)]
    whole[0, positions], whole[1, positions] = together.chunk(2)
    for first, last in stretches:
        alone = attend([(1, first, last)], [0, last], 16, 1)
        assert torch.equal(alone, whole[1, first:last])
    for position in (0, 1, 15, 16, 255, 256, 257, 511, 512, 529):
        alone = attend([(1, position, position + 1)], [0, position + 1], 5, 2)
        assert torch.equal(alone[0], whole[1, position]), position
    for first, size in ((0, 5), (250, 9), (255, 2), (500, 30), (505, 17)):
        window = attend([(0, 3, 4), (1, first, first + size)], [length] * 2, 32, 3)
        assert torch.equal(window[0], whole[0, 3])
        assert torch.equal(window[1:], whole[1, first : first + size]), (first, size)
    torch.set_num_threads(2)
    assert torch.equal(attend([(1, 500, 530)], [0, length], 16, 4), whole[1, 500:])


def test_attention_ignores_later_rows_of_its_own_window(kernels, dtype, make_scene):
    """A draft whose keys and values are NaN leaves the rows before it untouched."""
    shape = AttentionShape(6, 2, 64)
    history = normal(2, 1, 300, 2, 64, dtype=dtype)
    q = normal(8, 6, 64, dtype=dtype, seed=1)
    for first in (0, 40, 250, 292):
        clean = make_scene(shape, history, [first + 8], 16, 0)
        poisoned = make_scene(shape, history, [first + 5], 16, 0)
        rows = clean.rows([0] * 8, range(first, first + 8))
        wanted = kernels.attention(q, shape, rows, clean.kv)
        found = kernels.attention(q, shape, rows, poisoned.kv)
        assert torch.equal(found[:5], wanted[:5])
        assert found[5:].isnan().all()


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(
    kernels, dtype, make_scene, number
):
    shape = AttentionShape(4, 2, 40, sliding_window=100)
    history = normal(2, 1, 382, 2, 40, dtype=dtype)
    q = normal(6, 4, 40, dtype=dtype, seed=1)

    def attend():
        scene = make_scene(shape, history, [382], 16, 0)
        # Of these two see position 280, and three are in its split.
        rows = scene.rows([0] * 6, [3, 279, 280, 379, 380, 381])
        return kernels.attention(q, shape, rows, scene.kv).view(6, 4, 40)

    clean = attend()
    history[1, 0, 280, 1, 7] = number
    found = attend()
    assert not found[2:4, 2:, 7].isfinite().any()
    found[2:4, 2:, 7] = clean[2:4, 2:, 7]
    assert torch.equal(found, clean)


def test_attention_of_every_head_size(make_scene):
    native, reference = NativeKernels(), ReferenceKernels()
    for dim in range(8, 1032, 8):
        shape = AttentionShape(3, 1, dim)
        history = normal(2, 1, 45, 1, dim, dtype=torch.bfloat16, seed=dim)
        q = normal(9, 3, dim, dtype=torch.bfloat16, seed=1)
        scene = make_scene(shape, history, [45], 16, 0)
        rows = scene.rows([0] * 9, range(36, 45))
        whole = native.attention(q, shape, rows, scene.kv)
        wanted = reference.attention(q, shape, rows, scene.kv)
        torch.testing.assert_close(whole, wanted, rtol=2**-7, atol=2**-7)
        before = make_scene(shape, history, [39], 5, 1)
        alone = native.attention(q[2:3], shape, before.rows([0], [38]), before.kv)
        assert torch.equal(alone[0], whole[2]), dim


def test_attention_in_batches_of_partial_results(make_scene):
    """Enough rows and splits that the native kernel takes its tiles in several batches."""
    kernels, shape = NativeKernels(), AttentionShape(16, 1, 256)
    history = normal(2, 1, 2304, 1, 256, dtype=torch.bfloat16)
    scene = make_scene(shape, history, [2304], 16, 0)
    q = normal(128, 16, 256, dtype=torch.bfloat16, seed=1)
    rows = scene.rows([0] * 128, range(2176, 2304))
    whole = kernels.attention(q, shape, rows, scene.kv)
    for row in (0, 77, 127):
        alone = scene.rows([0], [2176 + row])
        assert torch.equal(
            kernels.attention(q[row : row + 1], shape, alone, scene.kv)[0], whole[row]
        )
