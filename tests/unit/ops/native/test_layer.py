"""Layers in one call of C: the bits of their operations one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.forward import kept_at
from sametoken.layers.attention import Attention
from sametoken.layers.feed_forward import GatedMLP
from sametoken.layers.linear import Linear, RowParallelLinear
from sametoken.layers.norm import RMSNorm
from sametoken.layers.parallel import SINGLE_RANK
from sametoken.layers.residual import DecoderLayer
from sametoken.models.blocks import layer_parts
from sametoken.ops.backend import AttentionShape, LayerKV, QKNorm, RotaryTable
from sametoken.ops.model.attention.kv import KVScales
from sametoken.ops.model.gemm.int4 import packed_int4
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.native.weights import QuantizedWeight
from sametoken.ops.reference import ReferenceKernels
from sametoken.ops.weight import Fp8Matrix, Int4Matrix, IntegerMatrix, Rounding

pytestmark = pytest.mark.usefixtures("poisoned_memory")
native = NativeKernels()
BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN, INNER = 64, 96
SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16)
LENGTHS = [300, 40, 9]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain(n, k, dtype, kernels=native):
    return kernels.pack((torch.randn(n, k, generator=seeded(n + k)) / k**0.5).to(dtype))


def codes(n, k, bits):
    return torch.randint(0, 2**bits, (n, k), generator=seeded(n + k), dtype=torch.uint8)


def integers(bits):
    def pack(n, k, dtype):
        scale = torch.rand(n, k // 32, generator=seeded(n)).half() / 2 ** (bits + 1)
        return native.pack_integers(
            IntegerMatrix(codes(n, k, bits), bits, scale, 2 ** (bits - 1)), dtype
        )

    return pack


def int4(n, k, dtype):
    zero, scale = torch.full((n, k // 32), 8, dtype=torch.uint8), torch.ones(n, k // 32).half() / 32
    return native.pack_int4(Int4Matrix(packed_int4(codes(n, k, 4), 32), scale, zero), dtype)


def fp8(rounding):
    def pack(n, k, dtype):
        values = torch.randn(n, k, generator=seeded(n + k)).to(torch.float8_e4m3fn)
        return native.pack_fp8(Fp8Matrix(values, torch.full((n,), k**-0.5), rounding), dtype)

    return pack


FORMATS = {
    "unquantized": plain,
    "Q4": integers(4),
    "Q8": integers(8),
    "int4": int4,
    "fp8": fp8(None),
    "fp8 by row": fp8(Rounding()),
    "fp8 fixed": fp8(Rounding(scale=torch.tensor(0.02))),
}


def norm(dtype, seed, kernels=native):
    return RMSNorm(kernels, 1 + torch.randn(HIDDEN, generator=seeded(seed)).to(dtype) / 8, 1e-5)


def layer_of(
    pack, dtype, *, biased=False, heads=False, sinks=False, shape=SHAPE, wide=False, kernels=native
):
    """A layer with its operations one by one; a wide one reads twice the hidden size."""
    angles = torch.rand(400, shape.head_dim // 2, generator=seeded(1))
    q_weight, k_weight = (torch.rand(shape.head_dim, generator=seeded(i)).to(dtype) for i in (2, 3))
    width, q_size = shape.q_size + 2 * shape.kv_size, shape.q_size
    biases = [torch.randn(n, generator=seeded(n)).to(dtype) for n in (width, HIDDEN)]
    qkv_bias, output_bias = biases if biased else (None, None)
    attention = Attention(
        kernels,
        shape,
        Linear(pack(width, HIDDEN * (1 + wide), dtype), qkv_bias),
        Linear(pack(HIDDEN, q_size, dtype), output_bias),
        RotaryTable(angles.cos(), angles.sin()),
        QKNorm(q_weight, k_weight, 1e-6) if heads else None,
        torch.randn(shape.num_heads, generator=seeded(4)) if sinks else None,
    )
    mlp = GatedMLP(Linear(pack(2 * INNER, HIDDEN, dtype)), Linear(pack(HIDDEN, INNER, dtype)))
    return DecoderLayer(norm(dtype, 5, kernels), attention, norm(FP32, 6, kernels), mlp)


def whole(layers: list[DecoderLayer], following: RMSNorm, kernels=native):
    """These layers in one call, the last before ``following``; None: none of them can be."""
    norms = [*(layer.input_norm for layer in layers[1:]), following]
    return kernels.whole_layers([*map(layer_parts, layers, norms)])


def is_whole(layer: DecoderLayer, kernels=native) -> bool:
    return whole([layer], norm(layer.input_norm.weight.dtype, 9), kernels) is not None


def last_rows(count: int) -> tuple[list[int], list[int]]:
    """Slots and positions of up to ``count`` last positions of every slot."""
    found = [(slot, at) for slot, n in enumerate(LENGTHS) for at in range(max(0, n - count), n)]
    return [slot for slot, _ in found], [at for _, at in found]


def assert_same_bits(layers, make_scene, rows_of_slot, e4m3=False, places=None):
    """Of a pass over these layers, each with KV of its own, one by one and in one call.

    With ``places`` only the rows there are kept.
    """
    dtype, shape = layers[0].input_norm.weight.dtype, layers[0].attention.shape
    history = torch.randn(2, 3, 300, shape.num_kv_heads, shape.head_dim, generator=seeded(7))
    last = norm(dtype, 9)

    def one_by_one(x, residual, layers_of_call, rows, memory, kept):
        for index in layers_of_call:
            is_last = index + 1 == len(layers)
            following = last if is_last else layers[index + 1].input_norm
            wanted = kept if is_last else None
            x, residual = layers[index](x, residual, following, rows, memory[index], kept=wanted)
        return x, residual

    found = []
    for run in (one_by_one, whole(layers, last)):
        memory = []
        for _ in layers:
            scene = make_scene(shape, history.to(dtype), LENGTHS, 16, 0)
            kv = scene.kv
            if e4m3:
                stored = (kv.keys.nan_to_num(0).to(torch.float8_e4m3fn) for kv in (kv, kv))
                kv = LayerKV(*stored, KVScales(torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25])))
            memory.append(kv)
        rows = scene.rows(*last_rows(rows_of_slot))
        residual = torch.randn(len(rows.slots), HIDDEN, generator=seeded(8)).to(dtype)
        x = layers[0].input_norm(residual)
        if layers[0].attention.qkv.weight.in_features > HIDDEN:
            x = torch.cat((x, residual), dim=1)
        wanted = None if places is None else kept_at(rows, places)
        out = run(x, residual, range(len(layers)), rows, memory, wanted)
        kept = [one.float().nan_to_num(99) for kv in memory for one in (kv.keys, kv.values)]
        found.append((*out, *kept))
    assert found[0][0].isfinite().all()
    for separate, at_once in zip(*found, strict=True):
        assert torch.equal(separate, at_once)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_layer_has_the_bits_of_its_operations(name, dtype, threads, one_thread, make_scene):
    torch.set_num_threads(threads)
    layer = layer_of(FORMATS[name], dtype)
    assert is_whole(layer)
    for rows_of_slot in (1, 4, 21):
        assert_same_bits([layer], make_scene, rows_of_slot)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "options",
    [
        {"biased": True},
        {"heads": True},
        {"sinks": True},
        {"shape": replace(SHAPE, sliding_window=33)},
        {"shape": replace(SHAPE, score_factor=0.3)},
        {"shape": AttentionShape(2, 2, 40)},
        {"wide": True},
    ],
    ids=["biases", "head norms", "sinks", "window", "score factor", "one KV head a head", "wide"],
)
def test_a_whole_layer_keeps_every_option(options, dtype, make_scene):
    assert_same_bits([layer_of(plain, dtype, **options)], make_scene, 3)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_whole_layer_reads_and_writes_float8(dtype, make_scene):
    assert_same_bits([layer_of(plain, dtype)], make_scene, 2, e4m3=True)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("places", [[0], [6, 2, 11], []], ids=["first", "some", "none"])
def test_the_last_of_several_layers_may_drop_rows(places, dtype, make_scene):
    layers = [layer_of(plain, dtype), layer_of(plain, dtype, heads=True)]
    assert_same_bits(layers, make_scene, 4, places=places)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_layers_of_several_kinds_are_one_call(dtype, make_scene):
    layers = [
        layer_of(plain, dtype, heads=True),
        layer_of(FORMATS["Q4"], dtype, shape=replace(SHAPE, sliding_window=33)),
        replace(layer_of(FORMATS["Q8"], dtype, biased=True), input_norm=norm(FP32, 11)),
    ]
    assert whole(layers, norm(dtype, 9)).ends == (3, 3, 3)
    for rows_of_slot in (1, 5):
        assert_same_bits(layers, make_scene, rows_of_slot)


def test_a_call_takes_the_addresses_of_other_memory(make_scene):
    """An engine's memory may be another model's before: a draft model's that is its target."""
    layers, last = [layer_of(plain, FP32), layer_of(plain, FP32, biased=True)], norm(FP32, 9)
    run, found = whole(layers, last), []
    history = torch.randn(2, 1, 9, 2, 16, generator=seeded(0))
    for scale in (1, 2, 1):
        scenes = [make_scene(SHAPE, scale * history, [9], 4, 0) for _ in layers]
        residual, rows = torch.ones(1, HIDDEN), scenes[0].rows([0], [8])
        memory = [scene.kv for scene in scenes]
        x = layers[0].input_norm(residual)
        found.append(run(x, residual, range(2), rows, memory)[0].clone())
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_options_change_the_result(make_scene):
    """Or the tests above could not fail."""
    scene = make_scene(SHAPE, torch.randn(2, 1, 9, 2, 16, generator=seeded(0)), [9], 4, 0)
    shapes = (SHAPE, replace(SHAPE, sliding_window=3), replace(SHAPE, score_factor=0.3))
    layers = [layer_of(plain, FP32, shape=shape) for shape in shapes]
    layers += [layer_of(plain, FP32, **{name: True}) for name in ("biased", "heads", "sinks")]
    results = []
    for layer in layers:
        residual, rows = torch.ones(1, HIDDEN), scene.rows([0], [8])
        run = whole([layer], norm(FP32, 9))
        x, _ = run(layer.input_norm(residual), residual, range(1), rows, [scene.kv])
        results.append(tuple(x[0].tolist()))
    assert len(set(results)) == len(layers)


class Own(QuantizedWeight):
    """A weight with products of its own."""


def test_other_parts_have_no_whole_layer():
    layer = layer_of(plain, BF16)
    down = layer.mlp.down.weight
    divided = RowParallelLinear(native, SINGLE_RANK, down)
    assert not is_whole(replace(layer, mlp=replace(layer.mlp, down=divided)))
    assert not is_whole(replace(layer, mlp=lambda x: x))
    of_q8 = integers(8)(HIDDEN, INNER, BF16)
    permuted = replace(of_q8, order=torch.arange(INNER))
    own = Own(**{name: getattr(of_q8, name) for name in QuantizedWeight.__slots__})
    other_dtype = plain(HIDDEN, INNER, FP32)
    for weight in (permuted, own, other_dtype, ReferenceKernels().pack(torch.zeros(HIDDEN, INNER))):
        assert not is_whole(replace(layer, mlp=replace(layer.mlp, down=Linear(weight))))
    mixed = replace(layer, mlp=replace(layer.mlp, down=Linear(of_q8)))
    assert is_whole(mixed)
    reference = ReferenceKernels()
    assert not is_whole(layer_of(lambda *a: plain(*a, reference), FP32), reference)


def test_calls_end_before_other_layers():
    layer, last = layer_of(plain, BF16), norm(BF16, 9)
    other = replace(layer, mlp=lambda x: x)
    layers = [other, layer, layer, other, layer_of(plain, FP32), layer]
    assert whole(layers, last).ends == (0, 3, 3, 3, 4, 6)
    assert whole([other, other], last) is None
