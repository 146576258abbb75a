"""Keys and values in float8: an option of its own, within which the law holds."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import (
    VOCAB,
    head_tensors,
    read_checkpoint,
    write_checkpoint,
    write_llama,
    write_safeailab,
)
from helpers.families import write_family
from helpers.harness import requests_of, run
from helpers.hybrids import write_hybrid
from helpers.latents import write_nextn
from helpers.recorded import RecordedLogits
from sametoken.bench.memory import measure_memory
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.models.load.sent import source_of

MAX_TOKENS = 10
#: Half of each prompt is another's too, so that blocks are shared.
PROMPTS = [(*range(1, 17), *(i * (n + 3) % VOCAB for i in range(4 + n))) for n in range(4)]
FP8 = {"kv_cache_dtype": "fp8"}


def engine(path, spec=None, **options):
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 4, "prefill_chunk_size": 8}
    options = sizes | {"num_kv_blocks": 64, "device": "cpu"} | FP8 | options
    return build_engine(
        EngineConfig.from_options(model=str(path), speculative_config=spec, **options)
    )


def requests(prompts=PROMPTS):
    return requests_of(prompts, MAX_TOKENS, 0.0, 0.7)


def alone(path, **options) -> tuple[dict, dict]:
    """Tokens and logits of requests, each by itself, without sharing."""
    core = engine(
        path, max_num_seqs=1, enable_prefix_caching=False, prefill_chunk_size=64, **options
    )
    recorded = RecordedLogits()
    core._runner = recorded.runner(core._runner)
    return run(core, requests()).tokens, recorded.rows


def drafting(folder, method: str) -> tuple:
    """A target, and how drafts are made for it."""
    if method == "mtp":
        return write_hybrid(folder / "target", seed=4), {"method": "mtp"}
    if method.startswith("latent"):
        name = {"latent-ngram": "deepseek_v3", "latent-mtp": "glm4_moe_lite"}[method]
        return write_nextn(folder / "target", name), {"method": method.removeprefix("latent-")}
    if method == "ngram":
        return write_family(folder / "target", "gpt_oss"), {"method": "ngram"}
    target = write_llama(folder / "target", max_position_embeddings=128)
    if method == "draft_model":
        return target, {"method": "draft_model", "model": str(target)}
    head = write_safeailab(folder / "head", head_tensors())
    return target, {"method": "eagle3", "model": str(head)}


@pytest.mark.parametrize(
    "method", ["ngram", "draft_model", "eagle3", "mtp", "latent-ngram", "latent-mtp"]
)
def test_no_draft_and_no_company_changes_a_bit(tmp_path, method):
    """Among sinks and windows (ngram), recurrent layers (mtp), preemptions and shared blocks."""
    path, spec = drafting(tmp_path, method)
    tokens, truth = alone(path)
    core = engine(path, spec | {"num_speculative_tokens": 3}, num_kv_blocks=26)
    recorded = RecordedLogits()
    core._runner = recorded.runner(core._runner)
    drafted = run(core, requests())
    assert drafted.tokens == tokens
    same = [torch.equal(row, truth[key]) for key, row in recorded.rows.items() if key in truth]
    assert all(same)
    assert len(same) >= len(PROMPTS) * MAX_TOKENS
    assert drafted.offered > 0
    if method == "draft_model":
        assert drafted.accepted == drafted.offered, "the drafter's KV is not the target's"
        assert tokens != alone(path, kv_cache_dtype="auto")[0]
    assert core.scheduler.num_preemptions > 0
    assert run(core, requests()).tokens == tokens
    # There is no memory to keep recurrent states for sharing.
    assert core.scheduler.prefix_cache_hits > 0 or method == "mtp"


@pytest.mark.parametrize("write", [write_llama, write_nextn])
def test_a_block_takes_a_byte_a_number_and_the_user_is_told(tmp_path, write):
    path, told = write(tmp_path, max_position_embeddings=128), []
    config = EngineConfig.from_options(model=str(path), max_model_len=64, num_kv_blocks=8, **FP8)
    resolved = build_engine(config, told.append).resolved
    assert (
        resolved.kv_bytes * 4
        == engine(path, kv_cache_dtype="auto", num_kv_blocks=35).resolved.kv_bytes
    )
    assert resolved.kv_bytes == 9 * measure_memory(config).kv_per_block
    assert resolved.kv_cache_dtype == torch.float8_e4m3fn
    assert "kv_cache_dtype is fp8: requested; scales are 1" in told


def scaled(folder, strategy: str, changes=(), write=write_llama, num_modules: int = 0):
    """A target whose scheme wants float8, as llm-compressor writes it for KV alone."""
    path = write(folder, max_position_embeddings=128)
    config, tensors = read_checkpoint(path)
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False}
    scheme |= {"symmetric": True, "observer": "minmax"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": scheme | dict(changes),
        "format": "dense",
        "quantization_status": "frozen",
    }
    heads = config["num_key_value_heads"]
    for index in range(config["num_hidden_layers"] + num_modules):
        for place, name in enumerate("kv"):
            size = (1,) if strategy == "tensor" else (heads, 1, 1)
            own = torch.arange(1, 1 + size[0]).view(size) * 0.01 + index * 0.1 + place * 0.02
            tensors[f"model.layers.{index}.self_attn.{name}_scale"] = own.bfloat16()
    return write_checkpoint(path, config, tensors), tensors


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_auto_takes_the_scales_of_the_checkpoint(tmp_path, strategy):
    path, tensors = scaled(tmp_path, strategy)
    core = engine(path, {"method": "ngram", "num_speculative_tokens": 3}, kv_cache_dtype="auto")
    for index, layer in enumerate(core._runner.step.kv.layers):
        for name, found in zip("kv", layer.scales, strict=True):
            stored = tensors[f"model.layers.{index}.self_attn.{name}_scale"].float().flatten()
            assert torch.equal(found, stored.expand(layer.keys.shape[1]))
    assert core.resolved.reasons["kv_cache_dtype"] == (
        f"fp8: the checkpoint has a kv_cache_scheme; scales are the checkpoint's, by {strategy}"
    )
    drafted = run(core, requests())
    assert drafted.offered > 0
    assert drafted.tokens == alone(path)[0]
    assert drafted.tokens != alone(write_llama(tmp_path / "bare", max_position_embeddings=128))[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_bits": 4}, "num_bits=4"),
        ({"dynamic": True}, "dynamic=True"),
        ({"symmetric": False}, "symmetric=False"),
        ({"strategy": "token"}, "strategy='token'"),
        ({"zero_points": True}, "zero_points=True"),
    ],
)
def test_other_schemes_are_refused_by_the_key(tmp_path, changes, said):
    path, _ = scaled(tmp_path, "tensor", changes)
    with pytest.raises(UnsupportedError, match=f"kv_cache_scheme: .*{said}.* is not supported"):
        engine(path)


@pytest.mark.parametrize("num_modules", [0, 1])
def test_latents_have_the_scale_of_the_keys(tmp_path, num_modules):
    """Those of a NextN module too, if there is one for it."""
    path, tensors = scaled(tmp_path, "tensor", write=write_nextn, num_modules=num_modules)
    core = engine(path, {"method": "mtp", "num_speculative_tokens": 2}, kv_cache_dtype="auto")
    step = core._runner.step
    (module,) = step.drafter.kv_caches[0].layers
    for index, layer in enumerate((*step.kv.layers, *[module] * num_modules)):
        wanted = tensors[f"model.layers.{index}.self_attn.k_scale"].float()
        assert torch.equal(layer.scale, wanted)
    assert num_modules or module.scale is None
    drafted = run(core, requests())
    assert drafted.offered > 0
    assert drafted.tokens == alone(path)[0]
    assert drafted.tokens != alone(write_nextn(tmp_path / "bare"))[0]


def test_scales_by_head_of_latents_and_other_dtypes_are_refused(tmp_path):
    path, _ = scaled(tmp_path, "attn_head", write=write_nextn)
    with pytest.raises(UnsupportedError, match="'attn_head', and latents have no heads"):
        engine(path)
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8_e5m2'"):
        EngineConfig(kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize(
    ("write", "strategy", "kind"), [(write_llama, "attn_head", "v"), (write_nextn, "tensor", "k")]
)
def test_new_weights_bring_their_scales(tmp_path, write, strategy, kind):
    path, tensors = scaled(tmp_path, strategy, write=write)
    core = engine(path, kv_cache_dtype="auto")
    name = f"model.layers.1.self_attn.{kind}_scale"
    tensors |= {name: tensors[name] * 4}
    core.upkeep.use_weights(core.weights.load(source_of(tensors.items()), "model"))
    layer = core._runner.step.kv.layers[1]
    found = layer.scales.v if kind == "v" else layer.scale
    assert torch.equal(found, tensors[name].float().flatten())
