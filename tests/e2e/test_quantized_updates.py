"""Updates of quantized weights: floats become what a quantized copy of them has, to the bit."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import read_checkpoint, write_checkpoint, write_llama
from helpers.compressed import compressed
from helpers.hybrids import without_mtp, write_hybrid
from helpers.latents import write_nextn
from helpers.mxfp4 import EXPERTS_0, MXFP4, STACKS, made
from helpers.quantized import block_config, gptq_llama, quantize_tensors
from helpers.updates import NGRAM, engine, said, same_weights, tensors_of
from sametoken.errors import WeightUpdateError
from sametoken.models import rounding
from sametoken.models.quantize import SCHEMES, quantize_checkpoint

#: Features that groups of 32 divide.
SIZES = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "torch_dtype": "bfloat16"}
GPTQ_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
DOWN = "model.layers.1.mlp.down_proj"


def write_bf16(path, seed: int):
    tensors = tensors_of(write_llama(path, seed, **SIZES))
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_nvfp4(source, output):
    """As compressed-tensors quantizes and writes it, the lm_head too."""
    shutil.copytree(source, output)
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    compressed(output, groups, ["model.embed_tokens"])


def write_blocks(source, output, scale_fmt="float"):
    """As DeepSeek and Qwen publish it."""
    config, tensors = read_checkpoint(source)
    floats = {name: tensor.float() for name, tensor in tensors.items()}
    stored, _ = quantize_tensors(floats, scale_fmt=scale_fmt)
    quantization = block_config(scale_fmt=scale_fmt)
    write_checkpoint(output, config | {"quantization_config": quantization}, stored)


WRITERS = {
    "nvfp4": write_nvfp4,
    "block": write_blocks,
    "ue8m0": partial(write_blocks, scale_fmt="ue8m0"),
}


@pytest.fixture(scope="module", params=[*SCHEMES, *WRITERS])
def copies(request, tmp_path_factory):
    """An old and a new checkpoint, and a quantized copy of each."""
    folder = tmp_path_factory.mktemp(request.param)
    plain = [write_bf16(folder / str(seed), seed) for seed in (0, 1)]
    outputs = [folder / f"quantized-{seed}" for seed in (0, 1)]
    for source, output in zip(plain, outputs, strict=True):
        if request.param in SCHEMES:
            quantize_checkpoint(source, output, request.param)
        else:
            WRITERS[request.param](source, output)
    return plain, outputs


def test_floats_become_what_a_quantized_copy_has(copies):
    (_, new), (old_copy, new_copy) = copies
    built, live = engine(new_copy), engine(old_copy, NGRAM)
    before, wanted = said(live), said(built)
    sent = tensors_of(new)
    assert live.update_weights(sent.items()) == 1
    assert same_weights(live, built)
    assert said(live) == wanted != before
    assert live.speculation_metrics.num_accepted_tokens > 0
    # Back by the copy's own tensors, and again by an optimizer's, which are rounded first.
    live.update_weights(tensors_of(old_copy).items())
    assert said(live) == before
    rounded = {name: tensor.float() * 1.0001 for name, tensor in sent.items()}
    sent_bytes = sum(tensor.nbytes for tensor in rounded.values())
    assert sent_bytes <= live._engine.weights.require_target("model")
    live.update_weights(rounded.items())
    assert same_weights(live, built)


def test_a_bad_update_names_the_module_and_changes_nothing(copies):
    (_, new), (old_copy, _) = copies
    live, good = engine(old_copy), tensors_of(new)
    before = said(live)
    down = good[f"{DOWN}.weight"]
    spoilt = down.clone()
    spoilt[-1, -1] = torch.nan
    for bad in (spoilt, down[:-1], down[:, :40], down[:0], down[:, :0], down.int(), None):
        sent = good | {f"{DOWN}.weight": bad}
        with pytest.raises(WeightUpdateError, match=DOWN.replace(".", r"\.")):
            live.update_weights((name, one) for name, one in sent.items() if one is not None)
    assert said(live) == before


def test_a_hybrids_files_bring_its_module_too(tmp_path):
    plain = [write_hybrid(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    copies = [path.with_name(f"quantized-{path.name}") for path in plain]
    for path, copy in zip(plain, copies, strict=True):
        quantize_checkpoint(path, copy, "fp8-dynamic")
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    built, live = engine(copies[1], spec), engine(copies[0], spec)
    assert not same_weights(live, built)
    live.update_weights(plain[1])
    assert same_weights(live, built)
    module = {name: one for name, one in tensors_of(plain[0]).items() if name.startswith("mtp.")}
    live.update_weights(module.items(), target="drafter")
    live.update_weights(without_mtp(tensors_of(plain[0])).items())
    assert same_weights(live, engine(copies[0], spec))


def test_what_the_checkpoint_has_in_floats_stays_in_floats(tmp_path):
    """DeepSeek-V3's config names no module that its block float8 leaves out, as eh_proj."""
    plain = [write_nextn(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    copies = [path.with_name(f"quantized-{path.name}") for path in plain]
    for path, copy in zip(plain, copies, strict=True):
        quantize_checkpoint(path, copy, "fp8-dynamic")
        stored, floats = tensors_of(copy), tensors_of(path)
        (fusion,) = (name for name in floats if name.endswith("eh_proj.weight"))
        del stored[f"{fusion}_scale"]
        save_file(stored | {fusion: floats[fusion]}, copy / "model.safetensors")
    spec = {"method": "mtp", "num_speculative_tokens": 2}
    built, live = engine(copies[1], spec), engine(copies[0], spec)
    live.update_weights(plain[1])
    assert same_weights(live, built)


def test_floats_of_stacked_experts_become_mxfp4(tmp_path):
    config, old, meant = made()
    config |= {"quantization_config": MXFP4}
    sent = {name: 1.3 * one if name.endswith(STACKS) else one for name, one in meant.items()}
    stored = {name: one for name, one in sent.items() if not name.endswith(STACKS)}
    for name in sent.keys() - stored.keys():
        stored |= rounding.MXFP4.tensors(name, sent[name])
    built = engine(write_checkpoint(tmp_path / "new", config, stored))
    live = engine(write_checkpoint(tmp_path / "old", config, old), NGRAM)
    before = said(live)
    down = sent[f"{EXPERTS_0}.down_proj"]
    for bad in (down[:-1], down[:, :-32], down[:, :, :-1], torch.full_like(down, torch.inf)):
        with pytest.raises(WeightUpdateError, match=f"{EXPERTS_0}.down_proj"):
            live.update_weights((sent | {f"{EXPERTS_0}.down_proj": bad}).items())
    assert said(live) == before
    live.update_weights(sent.items())
    assert said(live) == said(built) != before
    # Numbers of the format stay what they are.
    live.update_weights(meant.items())
    assert said(live) == before


def test_floats_for_a_format_that_needs_data_are_refused(tmp_path):
    config, stored = gptq_llama()
    tensors = tensors_of(
        write_llama(tmp_path / "plain", **{key: config[key] for key in GPTQ_SIZES})
    )
    live = engine(write_checkpoint(tmp_path / "gptq", config, stored))
    before = said(live)
    with pytest.raises(WeightUpdateError, match="not stored as the weights in use") as caught:
        live.update_weights(tensors.items())
    first = min(name for name in tensors if name.endswith("proj.weight"))
    assert caught.value.cause.endswith(f"({first} is in floats)")
    assert said(live) == before
    assert live.update_weights(stored.items()) == 1
