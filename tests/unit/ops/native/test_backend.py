"""The C kernels against the PyTorch reference: odd shapes, both dtypes, poisoned memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.examples import FIXED
from helpers.poisoned import poisoned
from sametoken.errors import InvariantError, UnsupportedError
from sametoken.ops.backend import (
    AttentionRows,
    AttentionShape,
    LayerKV,
    QKNorm,
    RotaryTable,
    SampledRows,
)
from sametoken.ops.model import activation
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.native.library import load_library
from sametoken.ops.native.weights import gated
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.sampling.sample import has_nan, has_no_valid_token, make_keys, token_of

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
native, reference = NativeKernels(), ReferenceKernels()

BF16, FP32 = torch.bfloat16, torch.float32
few = settings(FIXED, max_examples=40)
dtypes = st.sampled_from([BF16, FP32])
counts = st.integers(1, 70)
seeds = st.integers(0, 2**31)


def normal(*shape, dtype, seed=0):
    """Random values with NaN just before and after them in memory."""
    generator = torch.Generator().manual_seed(seed)
    return poisoned(torch.randn(shape, generator=generator).to(dtype))


def assert_close(found, wanted, *, fp32=1e-5):
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    tolerance = fp32 if found.dtype == FP32 else 2**-7
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@few
@given(counts, st.integers(1, 130), st.integers(1, 130), dtypes, st.booleans(), seeds)
def test_matmul(t, n, k, dtype, with_bias, seed):
    x, weight = normal(t, k, dtype=dtype, seed=seed), normal(n, k, dtype=dtype, seed=seed + 1)
    weight /= k**0.5
    bias = normal(n, dtype=dtype, seed=seed + 2) if with_bias else None
    packed, plain = native.pack(weight), reference.pack(weight)
    assert (packed.out_features, packed.in_features) == (n, k)
    assert_close(packed.matmul(x, bias), plain.matmul(x, bias))
    sums = [one.matmul(x, out_dtype=FP32) for one in (packed, plain)]
    assert_close(*sums)


@few
@given(counts, st.integers(1, 130), st.integers(1, 130), dtypes, seeds)
def test_rows_are_read_from_the_packed_weight(t, n, k, dtype, seed):
    weight = normal(n, k, dtype=dtype, seed=seed)
    ids = torch.randint(0, n, (t,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(native.pack(weight).rows(ids), weight[ids])


def test_a_packed_weight_is_the_only_copy():
    packed = native.pack(normal(64, 33, dtype=BF16))  # whole groups of columns on any CPU
    assert packed.nbytes == packed.panels.numel() == 64 * 34 * 2


@pytest.mark.parametrize("token_id", [-1, 7])
def test_rows_refuse_ids_outside_the_vocabulary(token_id):
    with pytest.raises(InvariantError, match=r"vocabulary 0\.\.6"):
        native.pack(normal(7, 4, dtype=FP32)).rows(torch.tensor([0, token_id]))


@few
@given(counts, st.integers(1, 300), dtypes, seeds)
def test_norms(t, h, dtype, seed):
    x, weight = normal(t, h, dtype=dtype, seed=seed), normal(h, dtype=dtype, seed=seed + 1)
    residual = normal(t, h, dtype=dtype, seed=seed + 2)
    assert_close(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    wanted, wanted_sum = reference.add_rms_norm(x, residual, weight, 1e-5)
    found, found_sum = native.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(found_sum, wanted_sum)
    assert_close(found, wanted)


@few
@given(counts, st.integers(1, 300), dtypes, st.sampled_from([1.0, 30.0]), seeds)
def test_silu_mul(t, size, dtype, spread, seed):
    gate_up = normal(t, 2 * size, dtype=dtype, seed=seed) * spread
    assert_close(gated(load_library().silu_mul, gate_up), activation.silu_mul(gate_up))


@few
@given(counts, st.integers(1, 300), dtypes, st.sampled_from([1.0, 30.0]), seeds)
def test_gelu_mul_clamped_swiglu_and_soft_cap(t, size, dtype, spread, seed):
    gate_up = normal(t, 2 * size, dtype=dtype, seed=seed) * spread
    assert_close(native.gelu_mul(gate_up), reference.gelu_mul(gate_up))
    for limit in (0.4, 7.0):
        wanted = reference.clamped_swiglu(gate_up, 1.702, limit)
        assert_close(native.clamped_swiglu(gate_up, 1.702, limit), wanted)
    logits = gate_up.float()
    found = native.soft_cap(logits, 7.5)
    torch.testing.assert_close(found, reference.soft_cap(logits, 7.5), rtol=0, atol=5e-6)


@few
@given(counts, st.integers(1, 130), dtypes, st.floats(0.1, 30), seeds)
def test_gates(t, size, dtype, spread, seed):
    """The gate is a part of a wider projection."""
    x = normal(t, size, dtype=dtype, seed=seed)
    gate = (spread * normal(t, size + 3, dtype=dtype, seed=seed + 1))[:, 3:]
    assert_close(native.sigmoid_mul(x, gate), reference.sigmoid_mul(x, gate))
    for weight_dtype in (dtype, FP32):
        weight = normal(size, dtype=weight_dtype, seed=seed + 2)
        wanted = reference.gated_rms_norm(x, gate, weight, 1e-5)
        assert_close(native.gated_rms_norm(x, gate, weight, 1e-5), wanted, fp32=1e-4)
    wanted = x.double() * gate.double().sigmoid()
    assert_close(reference.sigmoid_mul(x, gate), wanted.to(dtype))


@pytest.mark.parametrize("kernels", [native, reference])
def test_fp32_weights_of_norms_are_not_rounded(kernels):
    """The three norms of bf16 rows, by a weight that bf16 cannot hold."""
    x = normal(5, 64, dtype=BF16)
    weight = 1.0 + normal(64, dtype=BF16, seed=1).float() / 1024
    assert not torch.equal(weight.bfloat16().float(), weight)
    exact = reference.rms_norm(x.float(), weight, 1e-6).bfloat16()
    assert torch.equal(kernels.rms_norm(x, weight, 1e-6), exact)
    assert not torch.equal(kernels.rms_norm(x, weight.bfloat16(), 1e-6), exact)
    residual = torch.zeros_like(x)
    assert torch.equal(kernels.add_rms_norm(x.clone(), residual, weight, 1e-6)[0], exact)
    shape = AttentionShape(2, 1, 16)
    rotary = RotaryTable(torch.ones(9, 4), torch.zeros(9, 4))
    kv = LayerKV(*torch.zeros(2, 2, 1, 16, 16, dtype=BF16))
    rows = AttentionRows(torch.arange(5), torch.zeros(5).long(), torch.arange(5), torch.zeros(1, 1))
    q_weight = weight[:16].clone()
    q = kernels.rope_and_cache(x, shape, rotary, rows, kv, QKNorm(q_weight, q_weight, 1e-6))
    heads = reference.rms_norm(x.float().view(-1, 16), q_weight, 1e-6).view(5, 4, 16).bfloat16()
    assert torch.equal(q, heads[:, :2])
    assert torch.equal(kv.keys[0, 0, :5], heads[:, 2])


def test_silu_mul_saturates_as_the_reference():
    gate = torch.tensor([[-3e38, -1e3, -88.0, -0.0, 0.0, 88.0, 1e3, 3e38, float("nan")]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    found, wanted = gated(load_library().silu_mul, gate_up), activation.silu_mul(gate_up)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-37, equal_nan=True)


heads = st.tuples(st.integers(1, 8), st.integers(1, 3), st.integers(1, 32)).map(
    lambda g: AttentionShape(g[0] * g[1], g[1], 8 * g[2])
)


@settings(few, max_examples=25)
@given(heads, st.data())
def test_rope_and_cache(make_scene, shape, data):
    dtype, seed = data.draw(dtypes), data.draw(seeds)
    block_size = data.draw(st.sampled_from([1, 3, 16]))
    half = data.draw(st.integers(1, shape.head_dim // 2))
    positions = data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=8, unique=True))
    slots = data.draw(st.lists(st.integers(0, 2), min_size=len(positions), max_size=len(positions)))
    history = torch.zeros(2, 3, 40, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    one, other = (make_scene(shape, history, [0, 0, 0], block_size, seed) for _ in range(2))
    rows = one.rows(slots, positions)
    angles = normal(40, half, dtype=FP32, seed=seed)
    rotary = RotaryTable(angles.cos(), angles.sin())
    qkv = normal(len(positions), shape.q_size + 2 * shape.kv_size, dtype=dtype, seed=seed)
    q_weight, k_weight = (normal(shape.head_dim, dtype=dtype, seed=s) for s in (1, 2))
    norm = QKNorm(q_weight, k_weight, 1e-6) if data.draw(st.booleans()) else None

    found = native.rope_and_cache(qkv, shape, rotary, rows, one.kv, norm)
    assert_close(found, reference.rope_and_cache(qkv, shape, rotary, rows, other.kv, norm))
    untouched = other.kv.keys.isnan()
    assert torch.equal(one.kv.keys.isnan(), untouched)
    assert_close(one.kv.keys[~untouched], other.kv.keys[~untouched])
    assert torch.equal(one.kv.values.nan_to_num(9), other.kv.values.nan_to_num(9))


@settings(few, max_examples=20)
@given(heads, st.data())
def test_attention(make_scene, shape, data):
    dtype, seed = data.draw(dtypes), data.draw(seeds)
    block_size = data.draw(st.sampled_from([1, 5, 16, 512]))
    slots, positions, lengths = [], [], []
    for slot in range(data.draw(st.integers(1, 3))):
        first, count = data.draw(st.integers(0, 600)), data.draw(st.integers(1, 23))
        slots += [slot] * count
        positions += range(first, first + count)
        lengths.append(first + count)
    window = data.draw(st.sampled_from([None, 1, 9, 257, 700]))
    factor = data.draw(st.sampled_from([None, 0.11]))
    shape = replace(shape, sliding_window=window, score_factor=factor)
    size = (2, len(lengths), max(lengths), shape.num_kv_heads, shape.head_dim)
    history = normal(*size, dtype=dtype, seed=seed)
    for slot in range(len(lengths) if window else 0):
        # What no row of the slot sees may be anything.
        history[:, slot, : max(0, positions[slots.index(slot)] + 1 - window)] = torch.nan
    scene = make_scene(shape, history, lengths, block_size, seed)
    rows = scene.rows(slots, positions)
    q = normal(len(slots), shape.num_heads, shape.head_dim, dtype=dtype, seed=seed + 1)
    level = data.draw(st.sampled_from([None, 0.0, 4.0, 200.0, -200.0]))
    sinks = None if level is None else level + normal(shape.num_heads, dtype=FP32, seed=seed + 2)
    found = native.attention(q, shape, rows, scene.kv, sinks)
    assert_close(found, reference.attention(q, shape, rows, scene.kv, sinks))
    assert level != 200.0 or not found.any()


@pytest.mark.parametrize("kernels", [native, reference], ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_attention_of_large_scores(kernels, dtype, make_scene):
    shape = AttentionShape(2, 1, 64)
    history = normal(2, 1, 300, 1, 64, dtype=dtype)
    scene = make_scene(shape, history, [300], 16, 0)
    q = (1000 * history[0, 0, 123, 0].float()).to(dtype).expand(1, 2, 64).contiguous()
    found = kernels.attention(q, shape, scene.rows([0], [299]), scene.kv)
    assert torch.equal(found.view(2, 64), history[1, 0, 123].expand(2, 64))


@pytest.mark.parametrize("kernels", [native, reference], ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_weights_of_bf16_values_are_rounded_once_or_not_and_those_of_others_never(
    kernels, dtype, make_scene
):
    """64 values weigh e^-0.5 against two that outweigh them almost, so the weights' errors stay."""
    shape = AttentionShape(1, 1, 16)
    history = torch.zeros(2, 1, 66, 1, 16, dtype=dtype)
    history[0, 0, :64, 0, 0], history[1, 0, :64, 0] = -2, -1
    history[1, 0, 64, 0], history[1, 0, 65, 0] = 38.75, 0.068
    q = torch.eye(16, dtype=dtype)[None, :1].contiguous()
    scene = make_scene(shape, history, [66], 16, 0)
    found = kernels.attention(q, shape, scene.rows([0], [65]), scene.kv)
    last, weight = float(history[1, 0, 65, 0, 0]), torch.tensor(math.exp(-0.5))
    # Matrix units multiply weights in bf16; their total is not rounded.
    weights = [weight, weight.to(dtype)] if kernels is native else [weight]
    wanted = [(38.75 + last - 64 * float(one)) / (2 + 64 * float(weight)) for one in weights]
    assert any((found.float() - one).abs().max() < 1e-5 for one in wanted)


def test_no_rows_give_no_rows(make_scene):
    shape = AttentionShape(2, 1, 8)
    scene = make_scene(shape, torch.zeros(2, 1, 4, 1, 8), [4], 2, 0)
    rows, x = scene.rows([], []), torch.empty(0, 8)
    q = torch.empty(0, 2, 8)
    weight = normal(5, 8, dtype=FP32)
    for kernels in (native, reference):
        packed = kernels.pack(weight)
        assert packed.matmul(x).shape == (0, 5)
        assert packed.matmul(x, out_dtype=FP32).shape == (0, 5)
        assert kernels.attention(q, shape, rows, scene.kv).shape == (0, 16)


def sampling_inputs(rows, vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    temperature = torch.rand(rows, generator=generator) * 2 * (torch.arange(rows) % 3 > 0)
    seeds = torch.randint(0, 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 2**40, (rows,), generator=generator)
    return logits, temperature, seeds, positions


@few
@given(st.integers(1, 9), st.integers(1, 20000), seeds)
def test_sample(rows, vocabulary, seed):
    inputs = sampling_inputs(rows, vocabulary, seed)
    assert torch.equal(native.sample(*inputs), reference.sample(*inputs))


@few
@given(st.integers(1, 9), st.integers(1, 20000), st.integers(0, 20000), st.booleans(), seeds)
def test_sample_of_mapped_columns_is_that_of_the_whole_vocabulary(rows, columns, more, ties, seed):
    logits, *parameters = sampling_inputs(rows, columns, seed)
    if ties:
        logits = logits.round()
    vocabulary = columns + more
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed))
    token_ids = order[:columns].sort().values
    full = torch.full((rows, vocabulary), -float("inf"))
    full[:, token_ids] = logits
    found = native.sample(logits, *parameters, token_ids)
    assert torch.equal(found, native.sample(full, *parameters))
    assert torch.equal(found, reference.sample(logits, *parameters, token_ids))


def test_sample_with_parameters_by_slot():
    logits, temperature, seeds, positions = sampling_inputs(7, 300, 5)
    slots = torch.tensor([6, 0, 3, 3])
    rows = logits[:4], temperature[slots], seeds[slots], positions[:4]
    for kernels in (native, reference):
        found = kernels.sample(logits[:4], temperature, seeds, positions[:4], None, slots)
        assert torch.equal(found, kernels.sample(*rows))


@few
@given(st.integers(1, 9), st.sampled_from([1, 40, 8192, 20000]), st.booleans(), seeds)
def test_token_keys(rows, vocabulary, ties, seed):
    logits, temperature, parameters, positions = sampling_inputs(rows, vocabulary, seed)
    logits = logits.round() if ties else logits
    slots = torch.randint(0, rows, (rows,), generator=torch.Generator().manual_seed(seed))
    at = SampledRows(None, slots, positions, slots, slots)
    inputs = logits, temperature, parameters, at
    keys = native.token_keys(*inputs)
    assert torch.equal(keys, reference.token_keys(*inputs))
    sampled = native.sample(logits, temperature, parameters, positions + 1, None, slots)
    assert torch.equal(token_of(keys[:, 0]), sampled)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 77, 8192, 19999])
def test_token_keys_of_broken_rows(temperature, place):
    logits = torch.full((4, 20000), -float("inf"))
    logits[0, place] = logits[1, 3] = logits[1, 4] = float("nan")
    logits[1, 5], logits[3, place] = 1e30, -0.0
    slots = torch.arange(4)
    at = SampledRows(None, slots, slots, slots, slots)
    keys = native.token_keys(logits, torch.full((4,), temperature), slots, at)[:, 0]
    assert has_nan(keys).tolist() == [True, True, False, False]
    assert has_no_valid_token(keys).tolist() == [False, False, True, False]
    assert keys[3] == make_keys(torch.tensor(0.0), torch.tensor(place))
    assert ((token_of(keys) >= 0) & (token_of(keys) < 20000)).all()


def test_native_refuses_a_map_that_does_not_fit_the_columns():
    inputs = sampling_inputs(2, 8, 0)
    for token_ids in (torch.arange(7), torch.arange(8, dtype=torch.int32)):
        with pytest.raises(InvariantError):
            native.sample(*inputs, token_ids)


@pytest.mark.parametrize("kernels", [native, reference], ids=lambda k: k.name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_of_masked_and_broken_rows(kernels, temperature):
    logits = torch.full((4, 10000), -float("inf"))
    logits[1, 9999] = 0.0
    logits[2] = float("nan")
    logits[3, 100:] = float("nan")
    columns = torch.full((4,), temperature), torch.arange(4), torch.arange(4)
    found = kernels.sample(logits, *columns)
    assert found[1] == 9999
    assert ((found >= 0) & (found < 10000)).all()


@pytest.mark.parametrize("kernels", [native, reference], ids=lambda k: k.name)
def test_equal_logits_give_the_lowest_id(kernels):
    logits = torch.zeros(1, 20000)
    logits[0, [123, 128, 8191, 8192, 19999]] = 1.0
    inputs = logits, torch.zeros(1), torch.tensor([1]), torch.tensor([1])
    assert kernels.sample(*inputs).tolist() == [123]
    assert kernels.sample(*inputs, torch.arange(7, 40007, 2)).tolist() == [253]


def test_native_refuses_what_would_read_wrong_memory():
    weight = native.pack(normal(6, 8, dtype=FP32))
    for x in (torch.zeros(2, 8, dtype=BF16), torch.zeros(8, 2).T, torch.zeros(2, 7)):
        with pytest.raises(InvariantError):
            weight.matmul(x)
    with pytest.raises(UnsupportedError, match="float16"):
        native.pack(torch.zeros(2, 2, dtype=torch.float16))
    kv = LayerKV(*torch.zeros(2, 1, 1, 1, 12))
    with pytest.raises(UnsupportedError, match="head_dim 12"):
        native.rope_and_cache(torch.zeros(1, 36), AttentionShape(1, 1, 12), None, None, kv, None)
