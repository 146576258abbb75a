"""Updates of quantized weights: floats become what a quantized copy of them has, to the bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import write_llama
from helpers.hybrids import write_hybrid
from helpers.quantized import block_config, quantize_tensors
from helpers.updates import NGRAM, engine, said, same_weights, tensors_of
from sametoken.errors import WeightUpdateError
from sametoken.models.quantize import SCHEMES, quantize_checkpoint

#: Features that groups of 32 divide.
SIZES = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "torch_dtype": "bfloat16"}
DOWN = "model.layers.1.mlp.down_proj"


def write_bf16(path, seed: int):
    tensors = tensors_of(write_llama(path, seed, **SIZES))
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module", params=SCHEMES)
def copies(request, tmp_path_factory):
    """An old and a new checkpoint, and a quantized copy of each."""
    folder = tmp_path_factory.mktemp(request.param)
    plain = [write_bf16(folder / str(seed), seed) for seed in (0, 1)]
    outputs = [folder / f"quantized-{seed}" for seed in (0, 1)]
    for source, output in zip(plain, outputs, strict=True):
        quantize_checkpoint(source, output, request.param)
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
    for bad in (spoilt, down[:-1], down[:, :40], down.int(), None):
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


def test_floats_for_another_format_are_refused(tmp_path):
    tensors = tensors_of(write_llama(tmp_path, quantization_config=block_config()))
    stored, _ = quantize_tensors(tensors)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    live = engine(tmp_path)
    with pytest.raises(WeightUpdateError, match="not stored as the weights in use"):
        live.update_weights(tensors.items())
    assert live.update_weights(stored.items()) == 1
