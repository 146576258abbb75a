"""Engines of GGUF files beside those of the checkpoints that the files are made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from helpers.adapters import write_adapter
from helpers.checkpoints import write_checkpoint
from helpers.gguf_families import gguf_of, write_family_gguf
from helpers.gguf_files import rewritten
from helpers.harness import Ran, run
from helpers.hybrids import EXPERTS, FULL, LINEAR, twin_config, twin_tensors
from helpers.latents import write_twin
from helpers.small_engines import build, mtp, plain, requests
from sametoken.errors import CheckpointError, UnsupportedError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


def recurrent_twin(directory, **options):
    sizes = {"layer_types": [LINEAR, LINEAR, FULL], "num_hidden_layers": 3}
    config = twin_config(**sizes, full_attention_interval=3)
    write_checkpoint(directory, config, twin_tensors(config, seed=6))
    return directory, gguf_of(directory, "qwen35", **options)


def latent_twin(directory):
    write_twin(directory)
    return directory, gguf_of(directory, "deepseek2", {"first_k_dense_replace": 1})


def drafted(path, spec, **options) -> Ran:
    """With drafts, which change no token."""
    plainly, found = (
        run(build(path, each, **{"dtype": "float32"} | options), requests())
        for each in (None, spec)
    )
    assert found.tokens == plainly.tokens
    assert found.offered > 0
    return found


@pytest.mark.parametrize("write", [recurrent_twin, latent_twin])
def test_a_module_that_is_the_target_is_it_in_a_file_too(tmp_path, write):
    directory, path = write(tmp_path / "model")
    found = drafted(path, mtp(3))
    assert found == drafted(directory, mtp(3))
    assert found.accepted > 0.9 * found.offered


def test_a_module_that_is_the_target_is_it_in_their_bits(tmp_path):
    _, path = recurrent_twin(tmp_path / "model", tensor_type=GGMLQuantizationType.Q8_0)
    found = drafted(path, mtp(3), load_format="gguf-packed")
    assert found.accepted > 0.9 * found.offered


@pytest.mark.parametrize(
    ("arch", "spec"),
    [
        *((arch, mtp(2)) for arch in ("qwen35moe", "glm4moe")),
        *((arch, NGRAM) for arch in ("granitehybrid", "granitehybrid-bamba", "falcon-h1")),
        *((arch, NGRAM) for arch in ("nemotron_h", "nemotron_h_moe")),
    ],
)
def test_a_file_is_its_checkpoint(tmp_path, arch, spec):
    """With drafts of its module, or beside those of an n-gram."""
    changes = EXPERTS if arch == "qwen35moe" else {}
    directory, path = write_family_gguf(tmp_path / "model", arch, changes)
    assert drafted(path, spec) == drafted(directory, spec)


@pytest.mark.parametrize(
    ("arch", "spec", "name"),
    [
        *((arch, mtp(2), "Q4_1") for arch in ("glm4moe", "qwen35moe", "deepseek2-flash")),
        *((arch, NGRAM, "Q8_0") for arch in ("granitehybrid", "nemotron_h_moe")),
    ],
)
def test_drafts_change_no_token_of_a_file_in_its_bits(tmp_path, arch, spec, name):
    """Modules keep theirs beside the target's."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    sizes |= EXPERTS if arch == "qwen35moe" else {}
    tensor_type = GGMLQuantizationType[name]
    _, path = write_family_gguf(tmp_path / "model", arch, sizes, tensor_type=tensor_type)
    drafted(path, spec, load_format="gguf-packed")


@pytest.mark.parametrize(("arch", "kind"), [("glm4moe", "NextN"), ("qwen35", "multi-token")])
def test_a_file_without_the_module_s_tensors_is_refused(tmp_path, arch, kind):
    _, path = write_family_gguf(tmp_path / "model", arch)
    layer = {"glm4moe": 3, "qwen35": 4}[arch]
    names = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head_head", "shared_head_norm")
    missing = dict.fromkeys(f"blk.{layer}.nextn.{name}.weight" for name in names)
    path = rewritten(path, tmp_path / "changed.gguf", tensors=missing)
    plain(path)
    with pytest.raises(CheckpointError, match=f"changed.gguf holds no {kind}.* module"):
        build(path, mtp(2))


def test_a_module_with_more_than_its_family_s_is_refused_and_the_target_runs(tmp_path):
    _, path = write_family_gguf(tmp_path / "model", "qwen35")
    own = {"blk.4.nextn.embed_tokens.weight": np.zeros((64, 16), np.float32)}
    path = rewritten(path, tmp_path / "changed.gguf", tensors=own)
    plain(path)
    with pytest.raises(UnsupportedError, match=r"does not use: .*nextn\.embed_tokens"):
        build(path, mtp(2))


#: What files have apart, and checkpoints, of which adapters are, as one.
JOINED = {
    "granitehybrid": ("shared_mlp.input_linear", "shared_mlp.output_linear", "in_proj"),
    "qwen3next": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
}


@pytest.mark.parametrize("arch", JOINED)
def test_an_adapter_gives_the_checkpoint_s_tokens(tmp_path, arch):
    directory, path = write_family_gguf(tmp_path / "model", arch)
    adapter = write_adapter(tmp_path / "adapter", directory, JOINED[arch])
    asked = [replace(one, adapter=1) for one in requests()]
    options = {"lora_modules": {"own": adapter}, "dtype": "float32"}
    wanted, found = (run(build(at, NGRAM, **options), asked).tokens for at in (directory, path))
    assert found == wanted != plain(path)


def test_weights_that_hold_factors_take_neither_adapters_nor_new_weights(tmp_path):
    """Falcon-H1's factors are not told by its files, and would be left out of what is added."""
    directory, path = write_family_gguf(tmp_path / "model", "falcon-h1")
    adapter = write_adapter(tmp_path / "adapter", directory, ("k_proj",))
    for options in ({"lora_modules": {"own": adapter}}, {"enable_lora": True}):
        with pytest.raises(UnsupportedError, match="has the model's factors in its weights"):
            build(path, **options)
    with pytest.raises(UnsupportedError, match="do not change under a GGUF file whose weights"):
        build(path).weights.require_target("model")
