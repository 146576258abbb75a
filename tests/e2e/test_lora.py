"""LoRA adapters by request: the tokens of the merged checkpoint, and the law in any mix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.adapters import ATTENTION, MLP, write_adapter, write_files, write_merged, write_stacks
from helpers.checkpoints import (
    head_tensors,
    read_checkpoint,
    write_checkpoint,
    write_llama,
    write_safeailab,
)
from helpers.families import write_family
from helpers.harness import replayed_by, request, run, swapped_by
from helpers.hybrids import write_hybrid
from helpers.nemotron import write_nemotron
from helpers.quantized import TOKEN, compressed_config, quantize_tensors
from helpers.small_engines import build, cached_by, mtp, requests, scored
from helpers.thread_ranks import engine_over_threads
from sametoken.bench.memory import measure_memory
from sametoken.config import EngineConfig
from sametoken.engine import load
from sametoken.engine.build import build_engine
from sametoken.engine.load import validate
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.models.load.sent import source_of
from sametoken.runner.adapters import AdaptedTarget

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
#: Sizes that two ranks divide, except for the KV head, which they share.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 24}
EXTRACT = {"method": "extract_hidden_states", "shared_storage_path": "states"}
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj")
#: Of the requests of ``small_engines``: the model's own tokens, and those of two adapters.
CHOSEN = (0, 1, 2, 1, 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    target = write_llama(folder / "llama", **HEADS)
    return {
        "llama": target,
        "all": write_adapter(folder / "all", target, (*ATTENTION, *MLP), seed=1),
        "few": write_adapter(folder / "few", target, ("q_proj", "v_proj"), rank=5, seed=2),
        "eagle3": write_safeailab(
            folder / "eagle3", head_tensors(**HEADS), num_hidden_layers=1, **HEADS
        ),
    }


def adapted(files, spec=None, steps="compact", **options):
    """An engine whose requests may choose either adapter."""
    modules = {name: files[name] for name in ("all", "few")}
    options = {"dtype": "bfloat16", "steps_in_flight": 2} | options
    return build(files["llama"], spec, steps, lora_modules=modules, **options)


def mixed(chosen=CHOSEN):
    asked = (replace(one, adapter=own) for one, own in zip(requests(), chosen, strict=True))
    return [replace(one, params=replace(one.params, logprobs=1)) for one in asked]


@pytest.fixture(scope="module")
def alone(files):
    """Of requests that run alone, their prompts in one chunk."""
    return scored(adapted(files, max_num_seqs=1, prefill_chunk_size=0), mixed())


@pytest.mark.parametrize(
    ("spec", "steps", "chunk"),
    [(None, "static", 8), (NGRAM, "compact", 3), ("eagle3", "static", 5), ("model", "compact", 7)],
)
def test_drafts_chunks_and_other_adapters_change_no_bit(files, alone, spec, steps, chunk):
    if isinstance(spec, str):
        method = {"eagle3": "eagle3", "model": "draft_model"}[spec]
        path = files["eagle3" if spec == "eagle3" else "llama"]
        spec = {"method": method, "model": str(path), "num_speculative_tokens": 3}
    core = adapted(files, spec, steps, prefill_chunk_size=chunk)
    assert scored(core, mixed()) == alone


def test_a_request_without_an_adapter_has_the_model_s_bits(files, alone):
    plain = scored(build(files["llama"], dtype="bfloat16"), mixed((0,) * 5))
    own = [plain[one.request_id] == alone[one.request_id] for one in mixed()]
    assert own == [not number for number in CHOSEN]
    assert scored(adapted(files), mixed((0,) * 5)) == plain


def test_an_adapter_needs_no_other_one(files, alone):
    """Numbers and neighbours of an adapter are not seen in its bits."""
    core = build(files["llama"], dtype="bfloat16", lora_modules={"few": files["few"]})
    found = scored(core, mixed((0, 0, 1, 0, 1)))
    assert {name: found[name] for name in ("r2", "r4")} == {
        name: alone[name] for name in ("r2", "r4")
    }


@pytest.mark.parametrize("memory", ["swap", "replay"])
def test_preempted_requests_keep_their_adapters(files, alone, memory, monkeypatch):
    room = {"swap_space": 0} if memory == "replay" else {}
    core = adapted(files, NGRAM, num_kv_blocks=8, enable_prefix_caching=False, **room)
    seen = replayed_by(core) if memory == "replay" else swapped_by(core, monkeypatch)
    assert scored(core, mixed()) == alone
    assert any(seen)


def test_prefixes_are_shared_by_requests_of_one_adapter_alone(files):
    prompt = [0, 1, *range(2, 22)]

    def talk(core):
        asked = (request("r", prompt, 8, logprobs=1) for _ in range(9))
        return [scored(core, [replace(one, adapter=i % 3)]) for i, one in enumerate(asked)]

    core = adapted(files)
    cached = cached_by(core)
    said = talk(core)
    assert said[:3] * 3 == said == talk(adapted(files, enable_prefix_caching=False))
    assert said[0] != said[1] != said[2] != said[0]
    assert cached[::8][:3] == [0, 0, 0]
    assert max(cached) == 16


#: Adapters of experts in PEFT's layouts of parameters.
STACKS, TURNED = "stacks", "turned"
KINDS = {
    "llama": (lambda at: write_llama(at, **HEADS), (*ATTENTION, *MLP)),
    "qwen3_5": (lambda at: write_hybrid(at, "qwen3_5"), (*ATTENTION, *MLP, *LINEAR)),
    "qwen3_moe": (lambda at: write_family(at, "qwen3_moe"), (*ATTENTION, *MLP, "gate")),
    "qwen3_moe_stacks": (lambda at: write_family(at, "qwen3_moe"), STACKS),
    "mixtral": (lambda at: write_family(at, "mixtral"), ("q_proj", "w1", "w2", "w3", "gate")),
    "glm4_moe": (lambda at: write_family(at, "glm4_moe"), ("experts.0.up_proj", "gate")),
    "gpt_oss_stacks": (lambda at: write_family(at, "gpt_oss"), STACKS),
    "gemma4_turned": (lambda at: write_family(at, "gemma4"), TURNED),
    "phi3": (lambda at: write_family(at, "phi3"), ("qkv_proj", "gate_up_proj", "o_proj")),
    "nemotron": (
        lambda at: write_nemotron(at, seed=4),
        ("in_proj", "out_proj", *ATTENTION, *MLP, "gate"),
    ),
    "falcon_h1": (
        lambda at: write_family(at, "falcon_h1"),
        ("in_proj", "out_proj", *ATTENTION, *MLP),
    ),
    "granite_hybrid": (
        lambda at: write_family(at, "granite_hybrid"),
        ("in_proj", "out_proj", "shared_mlp.input_linear", "shared_mlp.output_linear", *ATTENTION),
    ),
    "gpt_oss": (lambda at: write_family(at, "gpt_oss"), (*ATTENTION, "router")),
    "gemma3": (lambda at: write_family(at, "gemma3"), (*ATTENTION, *MLP)),
    "ernie4_5": (lambda at: write_family(at, "ernie4_5"), (*ATTENTION, *MLP)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_gives_the_tokens_of_the_merged_checkpoint(tmp_path, kind):
    write, modules = KINDS[kind]
    target = write(tmp_path / "target")
    turned = modules is TURNED
    if isinstance(modules, str):
        adapter = write_stacks(tmp_path / "adapter", target, seed=3, turned=turned)
    else:
        adapter = write_adapter(tmp_path / "adapter", target, modules, seed=3)
    merged = write_merged(tmp_path / "merged", target, adapter, turned=turned)
    spec = mtp(3) if kind == "qwen3_5" else NGRAM
    core = build(target, spec, lora_modules={"own": adapter}, dtype="float32")
    asked = [replace(one, adapter=1) for one in requests()]
    expected = run(build(merged, dtype="float32"), requests()).tokens
    assert run(core, asked).tokens == expected != run(core, requests()).tokens


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A mixture of experts; adapters of some experts and of all of them at once."""
    folder = tmp_path_factory.mktemp("experts")
    target = write_family(folder / "target", "qwen3_moe")
    some = ("q_proj", "experts.0.gate_proj", "experts.3.down_proj", "experts.4.up_proj")
    return {
        "llama": target,
        "all": write_adapter(folder / "some", target, some, rank=5, seed=1),
        "few": write_stacks(folder / "stacks", target, seed=2, turned=True),
    }


def test_adapters_of_experts_change_no_bit_of_other_rows(sparse):
    bits = scored(adapted(sparse, max_num_seqs=1, prefill_chunk_size=0), mixed())
    assert scored(adapted(sparse, NGRAM, prefill_chunk_size=3), mixed()) == bits
    assert scored(adapted(sparse, NGRAM, "static", prefill_chunk_size=5), mixed()) == bits
    plain = scored(build(sparse["llama"], dtype="bfloat16"), mixed((0,) * 5))
    assert [plain[one.request_id] == bits[one.request_id] for one in mixed()] == [
        not number for number in CHOSEN
    ]


@pytest.mark.parametrize("kind", ["files", "sparse"])
def test_ranks_divide_adapters_as_they_divide_weights(request, kind):
    """The law holds for the degree by itself; tokens in fp32 are those of one rank."""
    files = request.getfixturevalue(kind)

    def over_two(wanted, spec=None, dtype="bfloat16", **options):
        modules = {name: files[name] for name in ("all", "few")}
        config = EngineConfig.from_options(
            model=str(files["llama"]), lora_modules=modules, dtype=dtype, speculative_config=spec,
            tensor_parallel_size=2, max_model_len=48, max_num_batched_tokens=32, block_size=8,
            kv_cache_memory_bytes=2**20, skip_tokenizer_init=True, device="cpu", **options,
        )  # fmt: skip
        with engine_over_threads(config) as (core, _):
            return scored(core, wanted), run(core, wanted).tokens

    bits, _ = over_two(mixed(), max_num_seqs=1)
    assert over_two(mixed(), NGRAM, max_num_seqs=3, prefill_chunk_size=5)[0] == bits
    _, tokens = over_two(mixed(), dtype="float32")
    assert tokens == run(adapted(files, dtype="float32"), mixed()).tokens


@pytest.mark.parametrize("kind", ["files", "sparse"])
def test_a_quantized_model_has_adapters_in_16_bits(request, kind, tmp_path):
    """Rows without one have the bits that they have where norms round for the product."""
    dense = request.getfixturevalue(kind)["llama"]
    config, tensors = read_checkpoint(dense)
    stored, _ = quantize_tensors(tensors, "channel", scale_name="weight_scale")
    ignore = ["lm_head", *(f"model.layers.{index}.mlp.gate" for index in range(3))]
    config["quantization_config"] = compressed_config("channel", TOKEN, ignore=ignore)
    target = write_checkpoint(tmp_path / "target", config, stored)
    adapter = write_adapter(tmp_path / "adapter", dense, (*ATTENTION, *MLP))
    options = {"dtype": "bfloat16", "lora_modules": {"own": adapter}}
    wanted = mixed((0, 1, 0, 1, 1))
    bits = scored(build(target, max_num_seqs=1, **options), wanted)
    assert scored(build(target, NGRAM, "static", **options), wanted) == bits
    plain = scored(build(target, dtype="bfloat16"), mixed((0,) * 5))
    assert [plain[name] == bits[name] for name in plain] == [True, False, True, False, False]


def config_of(files, **options) -> EngineConfig:
    options = {"model": str(files["llama"]), "lora_modules": {"own": files["all"]}} | options
    return EngineConfig.from_options(skip_tokenizer_init=True, device="cpu", **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_batched_tokens": 8193}, "more than the 8192 rows of a step with adapters"),
        ({"speculative_config": EXTRACT}, "of the model alone"),
    ],
)
def test_options_that_exclude_adapters_are_refused(files, options, said):
    with pytest.raises(ConfigError, match=said):
        validate(config_of(files, **options), print)


def test_a_step_may_have_the_rows_of_a_slice(files):
    assert validate(config_of(files, max_num_batched_tokens=8192), print).config.lora_modules


def test_an_adapter_s_config_is_refused_before_there_are_weights(files, tmp_path):
    broken = write_adapter(tmp_path / "broken", files["llama"], ("q_proj",), use_dora=True)
    with pytest.raises(UnsupportedError, match="use_dora"):
        validate(config_of(files, lora_modules={"own": broken}), print)


def test_adapters_of_other_models_are_refused(files, tmp_path):
    wide = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight" for x in "AB"}
    shapes = {"A": (3, 17), "B": (32, 3)}
    tensors = {name: torch.ones(shapes[name[-8]]) for name in wide}
    other = write_files(tmp_path / "wide", tensors, {"peft_type": "LORA", "r": 3})
    with pytest.raises(CheckpointError, match=r"32 x 17, the model's has 32 x 16"):
        build(files["llama"], lora_modules={"own": other})
    tensors = {name.replace("q_proj", "qk_proj"): one for name, one in tensors.items()}
    other = write_files(tmp_path / "named", tensors, {"peft_type": "LORA", "r": 3})
    with pytest.raises(UnsupportedError, match=r"1 modules .*: layers\.0\.self_attn\.qk_proj"):
        build(files["llama"], lora_modules={"own": other})


EXPERTS = "base_model.model.model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (
            {".6.gate_proj": (3, 32, 16)},
            r"no linears or experts of this model: layers\.1\.mlp\.experts\.6",
        ),
        (
            {".0.gate_proj": (3, 16, 32)},
            r"layers\.1\.mlp\.experts\.0\.gate_proj of 32 x 16, .*16 x 32",
        ),
        ({"": (15, 16, 32)}, r"down_proj of 5 x 32 x 16, the model's has 6 x 32 x 16"),
        ({"": (18, 16, 24)}, r"down_proj of 6 x 24 x 16, the model's has 6 x 32 x 16"),
        ({"": (18, 32, 32)}, "square matrices of experts alone"),
    ],
)
def test_adapters_of_other_experts_are_refused(sparse, tmp_path, shapes, said):
    """Of 6 experts of 32 hidden and 16 inner features."""
    tensors = {}
    for name, (rank, width, size) in shapes.items():
        tensors[f"{EXPERTS}{name}.lora_A.weight"] = torch.ones(rank, width)
        tensors[f"{EXPERTS}{name}.lora_B.weight"] = torch.ones(size, rank)
    parameter = "experts.gate_up_proj" if "square" in said else "experts.down_proj"
    config = {"peft_type": "LORA", "r": 3, "target_parameters": [parameter]}
    other = write_files(tmp_path / "other", tensors, config)
    with pytest.raises((CheckpointError, UnsupportedError), match=said):
        build(sparse["llama"], lora_modules={"own": other})


def test_a_broken_adapter_is_refused_before_weights_are_read(files, tmp_path, monkeypatch):
    broken = write_adapter(tmp_path / "broken", files["llama"], ("q_proj",))
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    monkeypatch.setattr(load, "load_model", lambda *given, **more: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError, match="adapter_model"):
        build(files["llama"], lora_modules={"own": broken})


def test_the_memory_of_adapters_is_known_before_the_start(files, monkeypatch):
    # C pads what is between the factors.
    monkeypatch.setenv("SAMETOKEN_KERNELS", "reference")
    config, alone = config_of(files), config_of(files, lora_modules={})
    weights = build_engine(config).resolved.weights_bytes
    assert measure_memory(config).weights == weights > measure_memory(alone).weights


@pytest.mark.parametrize("kind", ["files", "sparse"])
def test_weights_change_under_adapters(request, kind, tmp_path):
    """Both models read the new weights; the adapters stay."""
    files = request.getfixturevalue(kind)
    if kind == "files":
        other = write_llama(tmp_path / "other", seed=9, **HEADS)
    else:
        other = write_family(tmp_path / "other", "qwen3_moe", seed=9)
    live = adapted(files, NGRAM)
    scored(live, mixed())
    live.upkeep.use_weights(live.weights.load(source_of(other), "model"))
    assert scored(live, mixed()) == scored(adapted(files | {"llama": other}), mixed())


def test_a_step_without_adapters_is_one_of_the_model_itself(files, monkeypatch):
    chosen, forward = [], AdaptedTarget.forward

    def noting(self, token_ids, rows, cache, kept=None):
        chosen.append(sorted({*self._by_slot[rows.slots].tolist()}))
        return forward(self, token_ids, rows, cache, kept)

    monkeypatch.setattr(AdaptedTarget, "forward", noting)
    core = adapted(files, max_num_seqs=2)
    run(core, mixed((0,) * 5))
    assert chosen == []
    run(core, mixed((0, 1, 0, 0, 0)))
    assert chosen
    assert all(1 in places for places in chosen)
