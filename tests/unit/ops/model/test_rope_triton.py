"""RoPE and the KV write in Triton against their reference, in poisoned memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.poisoned import DEVICE, close, noise, poisoned
from sametoken.ops.backend import AttentionRows, AttentionShape, LayerKV, QKNorm, RotaryTable
from sametoken.ops.model import norm_rope as reference
from sametoken.ops.model import rope_triton


def attention_rows(kv_slots: list[int]) -> AttentionRows:
    """Rows at positions 7, 8, ..; slots and the block table are not read."""
    count = len(kv_slots)
    positions = torch.arange(7, 7 + count, device=DEVICE)
    unread = torch.full((count,), -(10**12), device=DEVICE)
    return AttentionRows(positions, unread, torch.tensor(kv_slots, device=DEVICE), unread[None])


def empty_kv(shape: AttentionShape, block_size: int, dtype: torch.dtype) -> LayerKV:
    size = (5, shape.num_kv_heads, block_size, shape.head_dim)
    memory = torch.full((2, *size), torch.nan, dtype=dtype, device=DEVICE)
    return LayerKV(memory[0], memory[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("shape", "half", "block_size"),
    [
        (AttentionShape(4, 2, 16), 8, 4),
        (AttentionShape(9, 3, 24), 12, 3),
        (AttentionShape(10, 10, 20), 5, 4),
        (AttentionShape(4, 1, 256), 32, 4),
    ],
)
def test_rope_and_cache(shape, half, block_size, with_norm, dtype):
    """The rows are a part of a wider projection's."""
    kv_slots = [block_size * 4 + 1, 2, block_size * 2, 0, block_size * 3 - 1]
    rows = attention_rows(kv_slots)
    qkv = noise(5, 16 + shape.q_size + 2 * shape.kv_size, dtype=dtype)[:, 16:]
    angles = noise(40, half, seed=1)
    rotary = RotaryTable(poisoned(angles.cos()), poisoned(angles.sin()))
    weights = [noise(shape.head_dim, dtype=dtype, seed=seed) for seed in (2, 3)]
    qk_norm = QKNorm(weights[0], weights[1], 1e-6) if with_norm else None
    actual_kv, expected_kv = (empty_kv(shape, block_size, dtype) for _ in range(2))
    expected = reference.rope_and_cache(qkv, shape, rotary, rows, expected_kv, qk_norm)
    actual = rope_triton.rope_and_cache(qkv, shape, rotary, rows, actual_kv, qk_norm)
    close(actual, expected)
    written = ~expected_kv.keys.isnan()
    assert torch.equal(~actual_kv.keys.isnan(), written)
    close(actual_kv.keys[written], expected_kv.keys[written])
    assert torch.equal(actual_kv.values.nan_to_num(7), expected_kv.values.nan_to_num(7))

    one = AttentionRows(rows.positions[2:3], rows.slots[2:3], rows.kv_slots[2:3], rows.block_table)
    alone_kv = empty_kv(shape, block_size, dtype)
    alone = rope_triton.rope_and_cache(qkv[2:3].clone(), shape, rotary, one, alone_kv, qk_norm)
    assert torch.equal(alone, actual[2:3])
    mine = ~alone_kv.keys.isnan()
    assert torch.equal(alone_kv.keys[mine], actual_kv.keys[mine])


def test_a_layer_that_reads_another_s_kv_rotates_q_alone():
    shape, weight = AttentionShape(4, 2, 16), noise(16, seed=2)
    rows, kv = attention_rows([1, 5, 9]), empty_kv(shape, 4, torch.float32)
    rotary, qk_norm = RotaryTable(noise(40, 8), noise(40, 8, seed=1)), QKNorm(weight, weight, 1e-6)
    qkv, own = noise(3, 128), replace(shape, num_kv_heads=0)
    whole = rope_triton.rope_and_cache(qkv, shape, rotary, rows, kv, qk_norm)
    q = qkv[:, : shape.q_size].contiguous()
    for operation in (rope_triton.rope_and_cache, reference.rope_and_cache):
        no_kv = empty_kv(own, 4, torch.float32)
        close(operation(q, own, rotary, rows, no_kv, qk_norm), whole)
    assert torch.equal(rope_triton.rope_and_cache(q, own, rotary, rows, no_kv, qk_norm), whole)


def test_padding_rows_may_share_one_address():
    shape = AttentionShape(4, 2, 16)
    rows = attention_rows([19, 19, 3])
    kv = empty_kv(shape, 4, torch.float32)
    rotary = RotaryTable(noise(40, 8), noise(40, 8, seed=1))
    rope_triton.rope_and_cache(noise(3, 128), shape, rotary, rows, kv, None)
    assert kv.keys.isfinite().any(dim=(1, 3)).nonzero().tolist() == [[0, 3], [4, 3]]


@pytest.mark.parametrize("with_norm", [False, True])
def test_dead_rows_of_nan_write_their_own_address_alone(with_norm):
    """They stand at position 0 and share an address."""
    shape, weight = AttentionShape(4, 2, 16), noise(16, seed=2)
    qk_norm = QKNorm(weight, weight, 1e-6) if with_norm else None
    rows = attention_rows([3, 19, 7, 19, 19])
    rows.positions[[1, 3, 4]] = 0
    live = [0, 2]
    qkv = noise(5, 128)
    qkv[[1, 3, 4]] = torch.nan
    rotary = RotaryTable(noise(10, 8), noise(10, 8, seed=1))
    kv, alone_kv = empty_kv(shape, 4, torch.float32), empty_kv(shape, 4, torch.float32)
    got = rope_triton.rope_and_cache(qkv, shape, rotary, rows, kv, qk_norm)
    alone_rows = AttentionRows(
        *(at[live] for at in (rows.positions, rows.slots, rows.kv_slots)), rows.block_table
    )
    alone = rope_triton.rope_and_cache(qkv[live], shape, rotary, alone_rows, alone_kv, qk_norm)
    assert torch.equal(got[live], alone)
    assert torch.equal(kv.keys.nan_to_num(7.0), alone_kv.keys.nan_to_num(7.0))
    # Their values are finite where they are written.
    assert not kv.values[4, :, 3].any()
    alone_kv.values[4, :, 3] = 0.0
    assert torch.equal(kv.values.nan_to_num(7.0), alone_kv.values.nan_to_num(7.0))


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_stored_as_0_beside_a_key_of_nan(value, with_norm):
    shape, weight = AttentionShape(4, 2, 24), noise(24, seed=2)
    qk_norm = QKNorm(weight, weight, 1e-6) if with_norm else None
    rows = attention_rows([3, 7])
    rotary = RotaryTable(noise(10, 8), noise(10, 8, seed=1))
    qkv, kv, clean_kv = noise(2, 192), *(empty_kv(shape, 4, torch.float32) for _ in range(2))
    clean = rope_triton.rope_and_cache(qkv, shape, rotary, rows, clean_kv, qk_norm)
    # The last element of the first row's second value head.
    qkv[0, -1] = value
    assert torch.equal(rope_triton.rope_and_cache(qkv, shape, rotary, rows, kv, qk_norm), clean)
    assert kv.keys[0, 1, 3].isnan().all()
    clean_kv.keys[0, 1, 3] = torch.nan
    clean_kv.values[0, 1, 3, -1] = 0.0
    assert torch.equal(kv.keys.nan_to_num(7.0), clean_kv.keys.nan_to_num(7.0))
    assert torch.equal(kv.values.nan_to_num(7.0), clean_kv.values.nan_to_num(7.0))
