"""gpt-oss: what is read from a checkpoint, what is refused, and weights that change."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.checkpoints import write_checkpoint
from helpers.families import fixed_config, random_model, write_family
from helpers.forward import CPU, Bench, load
from sametoken.engine.load import _attention_kernels
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.in_place import Replacement
from sametoken.models.load.huggingface import open_weights
from sametoken.models.load.weights import WeightReader
from sametoken.ops.cache_types import stored_in
from sametoken.ops.model.attention import hopper
from sametoken.ops.native.backend import NativeKernels
from sametoken.ops.reference import ReferenceKernels

TOKENS = [3, 40, 17, 5, 5, 21, 0, 9, 30, 11]
SINKS = "model.layers.1.self_attn.sinks"


def written(folder, change=lambda tensors: None, **changes):
    config = fixed_config("gpt_oss", num_hidden_layers=2)
    tensors = dict(random_model(config, 0).state_dict())
    change(tensors)
    values = config.to_dict() | {"architectures": ["GptOssForCausalLM"]} | changes
    return write_checkpoint(folder, values, tensors)


def logits_of(model, *chunks: int) -> torch.Tensor:
    return Bench(model, max_len=16).logits(TOKENS, list(chunks))


def test_sinks_may_take_all_weight(tmp_path):
    """Then values do not matter, and nothing overflows."""

    def loud(tensors):
        for name in tensors:
            if name.endswith("sinks"):
                tensors[name].fill_(1e4)

    def of_other_values(tensors):
        loud(tensors)
        for name in tensors:
            if "v_proj" in name:
                tensors[name] *= -2

    for kernels in (ReferenceKernels(), NativeKernels()):
        first, second, plain = (
            logits_of(load(written(tmp_path / str(index), change), kernels), 3)
            for index, change in enumerate((loud, of_other_values, lambda tensors: None))
        )
        assert first.isfinite().all()
        assert torch.equal(first, second)
        assert not torch.equal(first, plain)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(SINKS), f"lacks the tensor {SINKS}"),
        (lambda tensors: tensors.update({SINKS: torch.zeros(3)}), rf"{SINKS}.*shape \[3\]"),
        (lambda tensors: tensors[SINKS].fill_(torch.inf), rf"{SINKS}.*infinite"),
        (
            lambda tensors: tensors.update(
                {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(5, 96, 32)}
            ),
            r"gate_up_proj.*shape \[5, 96, 32\], the config expects \[5, 32, 96\]",
        ),
    ],
)
def test_broken_tensors_are_refused_by_name(tmp_path, change, said):
    with pytest.raises(CheckpointError, match=said):
        load(written(tmp_path, change))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act='gelu'"),
        ({"sliding_window": None}, (CheckpointError, UnsupportedError), "sliding"),
        ({"swiglu_limit": 0}, CheckpointError, "swiglu_limit=0"),
        ({"swiglu_alpha": "x"}, CheckpointError, "swiglu_alpha='x'"),
        ({"attention_bias": False}, UnsupportedError, "q_proj.bias|k_proj.bias"),
    ],
)
def test_settings_are_refused_by_name(tmp_path, changes, error, said):
    with pytest.raises(error, match=said):
        load(written(tmp_path, **changes))


def test_new_weights_reach_sinks_and_biases(tmp_path):
    live = load(write_family(tmp_path / "one", "gpt_oss", seed=0))
    path = write_family(tmp_path / "two", "gpt_oss", seed=1)
    reader = WeightReader(open_weights(path), ReferenceKernels(), torch.float32, CPU)
    Replacement.of(live, live.reloaded(reader)).write()
    assert torch.equal(logits_of(live), logits_of(load(path)))


def test_a_plan_says_which_kernels_compute_its_attention_on_hopper(tmp_path, monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    found = []
    backend = SimpleNamespace(model=SimpleNamespace(name="triton"))

    def asked(model, num_ranks=1):
        config = SimpleNamespace(block_size=64, tensor_parallel_size=num_ranks)
        cuda, dtype = torch.device("cuda"), torch.bfloat16
        return SimpleNamespace(architecture=model, config=config, device=cuda, dtype=dtype)

    for name in ("gpt_oss", "qwen2"):
        target = load(write_family(tmp_path / name, name))
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
            own = stored_in(target.caches, dtype)
            found.append(_attention_kernels(backend, asked(target.config), own))
    # TMA reads rows of 16 bytes, of float8 too.
    assert found == ["gluon", "gluon", "triton", "gluon", "triton", "triton"]
    # Of as many queries by KV head as one rank, or one of two, has.
    many, own = replace(target.config, num_heads=128), stored_in(target.caches, torch.bfloat16)
    one_head = tuple(replace(one, num_kv_heads=1) for one in own)
    for size, name in ((1, "triton"), (2, "gluon")):
        assert _attention_kernels(backend, asked(many, size), one_head) == name
