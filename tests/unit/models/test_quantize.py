"""Quantized copies of checkpoints: what they stand for, who reads them, and what is refused."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from helpers.checkpoints import write_llama
from helpers.compressed import tiny_llama
from helpers.forward import Bench, load
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.models.quantize import SCHEMES, module_of, quantize_checkpoint

DOWN = "model.layers.1.mlp.down_proj"
FIGURES = ("README.md", "acceptance.json", "training.json")
TOKENS = [3, 40, 17, 5, 5, 21, 0]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    tiny_llama().save_pretrained(folder)
    for name in ("tokenizer_config.json", "LICENSE", *FIGURES):
        (folder / name).write_text("{}")
    return folder


def logits_of(path):
    return Bench(load(path), max_len=16).logits(TOKENS, [])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_copy_is_near_its_source_and_smaller(source, tmp_path, scheme):
    done = quantize_checkpoint(source, tmp_path / "out", scheme)
    assert done.num_linears == 14
    assert done.bytes_after < done.bytes_before / 2
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written >= {"tokenizer_config.json", "LICENSE"}
    assert not written & {*FIGURES}
    exact = load_file(source / "model.safetensors")[f"{DOWN}.weight"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    if scheme == "fp8-dynamic":
        got = stored[f"{DOWN}.weight"].float() * stored[f"{DOWN}.weight_scale"]
        # Half a step of e4m3 is 2**-4 of a number, or below its smallest 2**-10 of the scale.
        bound = exact.abs() * 2**-4 + stored[f"{DOWN}.weight_scale"] * 2**-9
    else:
        words, scale = stored[f"{DOWN}.weight_packed"], stored[f"{DOWN}.weight_scale"]
        values = torch.stack([words >> 4 * i & 15 for i in range(8)], 2).flatten(1) - 8
        got = values * scale.repeat_interleave(128, 1)
        bound = scale.repeat_interleave(128, 1) * 0.5001
    assert ((got - exact).abs() <= bound).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", [f"{DOWN}.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_refused_and_leave_nothing(tmp_path, scheme, name):
    source = tmp_path / "source"
    tiny_llama().save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[3] = float("inf")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} .* holds NaN or infinite"):
        quantize_checkpoint(source, tmp_path / "out", scheme)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_it_through_compressed_tensors(tmp_path, scheme, tied):
    tiny_llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "out", scheme)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = LlamaForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.float32, trust_remote_code=False
        )
        with torch.no_grad():
            expected = theirs(torch.tensor([TOKENS])).logits[0]
    got = logits_of(tmp_path / "out")
    # Rounded activations may differ in a row by a step.
    assert ((got - expected).abs().amax(1) < 1e-3).sum() >= len(TOKENS) - 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_disk_without_room_is_refused_before_anything_is_read(
    source, tmp_path, monkeypatch, scheme
):
    needed = quantize_checkpoint(source, tmp_path / "once", scheme).bytes_after
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    quantize_checkpoint(source, tmp_path / "again", scheme)
    # The scales of linears are not counted.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed * 9 // 10))
    monkeypatch.setattr("sametoken.models.quantize._whole", None)
    with pytest.raises(ConfigError, match=r"out has room for .*, and the copy takes"):
        quantize_checkpoint(source, tmp_path / "out", scheme)
    assert not (tmp_path / "out").exists()


def test_files_stay_files(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    folder, weight_map = tmp_path / "sharded", {}
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    for i, name in enumerate(sorted(tensors)):
        weight_map[name] = f"model-{i % 2}.safetensors"
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for scheme in SCHEMES:
        quantize_checkpoint(folder, tmp_path / f"a-{scheme}", scheme)
        quantize_checkpoint(source, tmp_path / f"b-{scheme}", scheme)
        assert torch.equal(logits_of(tmp_path / f"a-{scheme}"), logits_of(tmp_path / f"b-{scheme}"))


def test_what_cannot_be_quantized_is_refused(source, tmp_path):
    with pytest.raises(ConfigError, match="w8a8"):
        quantize_checkpoint(source, tmp_path / "out", "w8a8")
    with pytest.raises(ConfigError, match="exists"):
        quantize_checkpoint(source, source, "w4a16")
    with pytest.raises(UnsupportedError, match="no group of 128, 64 or 32 divides"):
        quantize_checkpoint(write_llama(tmp_path / "odd"), tmp_path / "out", "w4a16")
    quantize_checkpoint(source, tmp_path / "once", "w4a16")
    with pytest.raises(UnsupportedError, match="quantizing"):
        quantize_checkpoint(tmp_path / "once", tmp_path / "twice", "w4a16")


@pytest.mark.parametrize(
    "name", ["kv_a_proj_with_mqa", "q_proj", "in_proj_qkvz", "out_proj", "experts.0.w2"]
)
def test_projections_are_known_by_their_names(name):
    module = f"model.layers.0.self_attn.{name}"
    assert module_of(f"{module}.weight") == module
    assert module_of(f"{module}.bias") is None
    assert module_of(f"{module}_norm.weight") is None
