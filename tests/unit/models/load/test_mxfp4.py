"""Experts stored in MXFP4: the numbers that they stand for, and files that are refused."""

from __future__ import annotations

import pytest
import torch

from helpers import forward
from helpers.checkpoints import write_checkpoint
from helpers.forward import TOKENS, logits_of, require_logits_by_kernels
from helpers.mxfp4 import EXPERTS_0, MXFP4, made, write_mxfp4
from helpers.thread_ranks import run_ranks
from sametoken.bench.memory import load_shapes
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.load.mxfp4 import MAX_SCALE, expanded
from sametoken.models.loader import read_config
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NUMBERS += [-number for number in NUMBERS]


def load(path, kernels=None, **options):
    return forward.load(path, kernels, **{"dtype": torch.bfloat16} | options)


def test_every_number_at_every_scale_is_exact_in_bf16():
    pairs = [low | high << 4 for low in range(16) for high in range(16)]
    blocks = torch.tensor(pairs, dtype=torch.uint8).view(1, 16, 16).expand(MAX_SCALE + 1, -1, -1)
    scales = torch.arange(MAX_SCALE + 1, dtype=torch.uint8)[:, None].expand(-1, 16)
    found = expanded(blocks.contiguous(), scales.contiguous())
    halves = [NUMBERS[half] for pair in pairs for half in (pair & 15, pair >> 4)]
    powers = torch.tensor([2.0 ** (byte - 127) for byte in range(MAX_SCALE + 1)]).double()
    wanted = powers[:, None] * torch.tensor(halves).double()
    assert torch.equal(found.bfloat16().double(), wanted)


@pytest.mark.parametrize("kernels", [ReferenceKernels, NativeKernels])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_checkpoint_that_transformers_expands(tmp_path, kernels, dtype):
    config, _, meant = made()
    twin = load(write_checkpoint(tmp_path / "twin", config, meant), kernels(), dtype=dtype)
    ours = load(write_mxfp4(tmp_path / "mxfp4"), kernels(), dtype=dtype)
    if kernels is NativeKernels:
        # In C the sums of both run over the features in order.
        assert torch.equal(logits_of(ours), logits_of(twin))
    error = (logits_of(ours) - logits_of(twin)).norm() / logits_of(twin).norm()
    assert error < (1e-6 if dtype is torch.float32 else 4e-3)


def test_kernels_of_a_gpu_give_the_reference_s_logits(tmp_path):
    require_logits_by_kernels(write_mxfp4(tmp_path), TOKENS, [3, 1])


@pytest.mark.parametrize("size", [64, 96])
def test_two_ranks_agree_and_are_near_one(tmp_path, size):
    """Of 96 columns a rank has one group and a half, which it expands."""
    path = write_mxfp4(tmp_path, intermediate_size=size)
    whole = logits_of(load(path, dtype=torch.float32))
    first, second = run_ranks(
        2, lambda ranks: logits_of(load(path, parallel=ranks, dtype=torch.float32))
    )
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-4)


def test_experts_that_are_left_out_are_stored_as_they_are(tmp_path):
    config, stored, meant = made()
    plain = {name: tensor for name, tensor in meant.items() if name.startswith(EXPERTS_0)}
    mixed = {name: one for name, one in stored.items() if not name.startswith(EXPERTS_0)} | plain
    left_out = MXFP4 | {"modules_to_not_convert": ["model.layers.0.mlp"]}
    path = write_checkpoint(tmp_path / "a", config | {"quantization_config": left_out}, mixed)
    assert torch.equal(logits_of(load(path)), logits_of(load(write_mxfp4(tmp_path / "b"))))
    # Blocks of what is left out are nobody's.
    both = mixed | {f"{EXPERTS_0}.down_proj_blocks": stored[f"{EXPERTS_0}.down_proj_blocks"]}
    write_checkpoint(tmp_path / "a", config | {"quantization_config": left_out}, both)
    with pytest.raises(UnsupportedError, match="down_proj_blocks"):
        load(path)


def test_a_weight_takes_four_bits_and_its_share_of_a_scale_s_byte(tmp_path):
    path = write_mxfp4(tmp_path / "mxfp4")
    real = load(path)
    shapes = load_shapes(read_config(path), path, torch.bfloat16)
    dummy = load(path, load_format="dummy")
    assert shapes.weights_bytes == dummy.weights_bytes == real.weights_bytes
    config, stored, meant = made()
    twin = load(write_checkpoint(tmp_path / "twin", config, meant))
    in_bytes = sum(one.numel() for name, one in stored.items() if name.endswith("_blocks"))
    assert 2 * in_bytes * (16 - 4.25) / 8 == twin.weights_bytes - real.weights_bytes
    assert logits_of(dummy).isfinite().all()


def spoilt(name: str, change):
    def spoil(stored: dict) -> None:
        stored[f"{EXPERTS_0}.{name}"] = change(stored[f"{EXPERTS_0}.{name}"])

    return spoil


def with_scale(value: int):
    def change(scales: torch.Tensor) -> torch.Tensor:
        scales[1, 2, 0] = value
        return scales

    return change


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda stored: stored.pop(f"{EXPERTS_0}.down_proj_scales"), "lacks.*down_proj_scales"),
        (lambda stored: stored.pop(f"{EXPERTS_0}.down_proj_blocks"), "lacks.*down_proj_blocks"),
        (spoilt("down_proj_blocks", lambda one: one[:, :, :1]), r"down_proj_blocks.*shape"),
        (spoilt("gate_up_proj_scales", lambda one: one[:4]), r"gate_up_proj_scales.*shape"),
        (
            spoilt("down_proj_blocks", lambda one: one.to(torch.int8)),
            "down_proj_blocks.*dtype int8",
        ),
        (spoilt("down_proj_scales", with_scale(255)), r"down_proj_scales.*scale 255, above 252"),
        (spoilt("down_proj_scales", with_scale(253)), r"down_proj_scales.*scale 253"),
        (spoilt("down_proj_bias", lambda one: one[:, :4]), r"down_proj_bias.*shape"),
        (spoilt("down_proj_bias", lambda one: one * torch.nan), r"down_proj_bias.*NaN"),
    ],
)
def test_broken_files_are_refused_by_the_tensor_s_name(tmp_path, spoil, said):
    config, stored, _ = made(num_hidden_layers=1)
    spoil(stored)
    path = write_checkpoint(tmp_path, config | {"quantization_config": MXFP4}, stored)
    with pytest.raises(CheckpointError, match=said):
        load(path)


def test_blocks_without_their_config_are_refused(tmp_path):
    config, stored, _ = made(num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"lacks the tensor .*experts\.gate_up_proj"):
        load(write_checkpoint(tmp_path, config, stored))


def test_rows_that_are_no_whole_groups_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"gate_up_proj.*48 features.*no multiple of 32"):
        load(write_mxfp4(tmp_path, hidden_size=48))
