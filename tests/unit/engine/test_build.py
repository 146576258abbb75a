"""An engine put together from a checkpoint and options."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.chat_model import vocab_size, write_chat_model
from helpers.checkpoints import LLAMA, NO_FC, VOCAB, head_tensors, write_llama, write_safeailab
from helpers.families import write_family
from helpers.harness import request, run, swapped_by
from helpers.hybrids import write_hybrid
from helpers.toy import ToyModel, toy_config
from sametoken.config import EngineConfig
from sametoken.drafters.base import DrafterNeeds, LoadedDrafter, NoDrafter
from sametoken.engine.build import _reads, build_engine
from sametoken.engine.load import Requested, _require_kv
from sametoken.engine.resolve import STEP_BYTES
from sametoken.engine.summary import explanation
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.models.base import ModelConfig
from sametoken.models.loader import load_model, read_config
from sametoken.models.quantize import W4A16, quantize_checkpoint
from sametoken.ops.model.gemm.tuning import GemmTable
from sametoken.ops.triton import TritonKernels
from sametoken.runner.cpu_stream import CpuStream
from sametoken.runner.routed_experts import mixtures_of
from sametoken.runner.runner import EagerLauncher
from sametoken.runner.stream import LaggingStream
from sametoken.scheduler.draft_limits import StepReads
from sametoken.types.layout import StepShape

NO_DRAFTER = LoadedDrafter((), lambda kv_cache, coupling: NoDrafter())
SIZES = {"max_num_seqs": 2, "prefill_chunk_size": 16, "block_size": 8, "max_model_len": 32}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("models") / "target")


def build(target, **options):
    return build_engine(EngineConfig.from_options(model=str(target), **SIZES | options))


def speculative(method: str, k: int, model=None) -> dict:
    spec = {"method": method, "num_speculative_tokens": k}
    return {"speculative_config": spec if model is None else spec | {"model": str(model)}}


def test_it_says_what_it_decided(target):
    resolved = build(target).resolved
    assert resolved.model_path == target
    assert resolved.dtype is torch.float32
    assert resolved.device == torch.device("cpu")
    assert resolved.max_model_len == 32
    assert resolved.num_kv_blocks == 2 * 32 // 8
    assert resolved.steps_in_flight == 1
    assert resolved.kernels in ("native", "reference")
    assert resolved.reasons["dtype"] == "the checkpoint is fp32"
    assert resolved.reasons["num_kv_blocks"].endswith("of 1.0 GiB")


@pytest.mark.parametrize(
    ("options", "aux_layers", "expected"),
    [
        ({}, (), False),
        (speculative("draft_model", 3, "another"), (), False),
        (speculative("eagle3", 3), (2, 4, 5), False),
        (speculative("eagle3", 3), (2, 4, 8), True),
        (speculative("eagle3", 3), (), True),
        (speculative("mtp", 3), (), True),
        (speculative("medusa", 3, "heads"), (), False),
        (speculative("mlp_speculator", 3, "heads"), (), False),
        ({"enable_return_routed_experts": True}, (), True),
    ],
)
def test_who_reads_the_last_layer_s_states_of_all_rows(options, aux_layers, expected):
    """On every rank the same, wherever the drafter is."""
    config = EngineConfig.from_options(model="any", **options)
    architecture = replace(toy_config(8), num_layers=8)
    requested, spec = requested_of(config, architecture), config.speculative_config
    keeps_kv = spec is not None and spec.method not in ("medusa", "mlp_speculator")
    needs = DrafterNeeds(aux_layers, ToyModel().caches if keeps_kv else ())
    assert replace(requested, needs=needs).all_states == expected


def requested_of(config: EngineConfig, architecture: ModelConfig) -> Requested:
    dtype, cpu = torch.float32, torch.device("cpu")
    return Requested(config, config, cpu, Path(), architecture, dtype, DrafterNeeds(), {})


def test_memory_is_accounted_for(target):
    plain, drafted = build(target), build(target, **speculative("draft_model", 3, target))
    for core, models in ((plain, 1), (drafted, 2)):
        step = core._runner.step
        caches = (step.kv, *step.drafter.kv_caches)
        assert len(caches) == models
        assert core.resolved.kv_bytes == sum(
            memory.nbytes for cache in caches for memory in cache.blocks
        )
        for cache in caches:
            assert cache.reserved_block == core.resolved.num_kv_blocks
    assert plain.resolved.weights_bytes > 0


def bytes_kept(core) -> int:
    """Of KV blocks and of kept states."""
    runner = core._runner
    caches = (runner.step.kv, *runner.step.drafter.kv_caches)
    blocks = [memory for cache in caches for memory in cache.blocks]
    states = [memory for states in runner.kept_states.caches for memory in states.kept]
    return sum(memory.nbytes for memory in (*blocks, *states))


@pytest.mark.parametrize("option", ["num_kv_blocks", "kv_cache_memory_bytes"])
@pytest.mark.parametrize("method", [None, "draft_model", "eagle3", "mtp"])
def test_what_a_refusal_proposes_starts_at_once_and_no_less_does(
    target, tmp_path, monkeypatch, option, method
):
    """Before a weight is read, with the KV of drafters and the states that hybrids keep."""
    spec, model = {}, target
    if method == "draft_model":
        spec = speculative(method, 3, target)
    if method == "eagle3":
        spec = speculative(method, 4, write_safeailab(tmp_path / "head", head_tensors()))
    if method == "mtp":
        spec, model = speculative(method, 5), write_hybrid(tmp_path / "hybrid")
    with monkeypatch.context() as patch:
        patch.delattr("sametoken.engine.load.load_model")
        with pytest.raises(ConfigError, match="of KV for a request") as caught:
            build(model, **spec, **{option: 1})
    least = int(re.search(rf"{option}=(\d+) or more", caught.value.remedy)[1])
    core = build(model, **spec, **{option: least})
    assert option == "num_kv_blocks" or bytes_kept(core) <= least
    with pytest.raises(ConfigError, match="of KV for a request"):
        build(model, **spec, **{option: least - 1})


def test_too_few_blocks_are_refused_before_a_gpu_has_weights(target):
    architecture = read_config(target)
    config = EngineConfig.from_options(model="any", num_kv_blocks=1, max_model_len=16, block_size=8)
    requested = replace(requested_of(config, architecture), device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="of KV for a request") as caught:
        _require_kv(requested)
    assert caught.value.remedy == "use max_model_len=8 or less, or num_kv_blocks=2 or more"
    _require_kv(replace(requested, config=replace(config, num_kv_blocks=2)))


@pytest.mark.parametrize(("method", "k"), [(None, 0), ("ngram", 5), ("draft_model", 3)])
def test_slots_have_room_for_drafts_beyond_the_longest_request(target, method, k):
    options = {}
    if method:
        options = speculative(method, k, target if method == "draft_model" else None)
    sequences = build(target, **options)._runner.step.sequences
    assert sequences.num_speculative_tokens == k
    assert sequences.token_ids.shape == (3, 32 + k + 1)
    assert sequences.num_tokens.shape == (3,)


@pytest.mark.parametrize("padding", [-5, 8])
def test_a_draft_model_is_padded_to_another_size_than_its_target(tmp_path, padding):
    """As Qwen2.5-0.5B to 151,936 and Qwen2.5-7B to 152,064 (vllm#7252)."""
    target = write_chat_model(tmp_path / "target", vocab_size=vocab_size() + 6)
    size = vocab_size() + 6 + padding
    draft = write_chat_model(tmp_path / "draft", vocab_size=size)
    prompt = request("r", (3, vocab_size() + 5, 1, 2), 12, temperature=5.0)
    plain = run(build(target), [prompt])
    ran = run(build(target, **speculative("draft_model", 3, draft)), [prompt])
    assert ran.tokens == plain.tokens
    assert ran.offered > 0


def test_a_draft_model_with_fewer_positions_than_the_longest_request(target, tmp_path):
    draft, said = write_llama(tmp_path / "draft", max_position_embeddings=16), []
    options = SIZES | speculative("draft_model", 3, draft)
    config = EngineConfig.from_options(model=str(target), **options)
    core = build_engine(config, said.append)
    assert "the draft model has 16 positions: requests have no drafts beyond" in said
    prompt = request("r", range(10), 22)
    ran = run(core, [prompt])
    assert ran.tokens == run(build(target), [prompt]).tokens
    assert 0 < ran.offered <= 3 * 5


@pytest.mark.parametrize("flags", [{}, {"eagle_config": NO_FC}])
def test_an_eagle3_head_is_attached_over_kv_of_its_own(target, tmp_path, flags):
    head = write_safeailab(tmp_path / "head", head_tensors(**flags), **flags)
    core = build(target, **speculative("eagle3", 3, head))
    (cache,) = core._runner.step.drafter.kv_caches
    assert len(cache.layers) == 1
    ran = run(core, [request("r", tuple(range(10)), 8)])
    assert len(ran.tokens["r"]) == 8
    assert ran.offered > 0


def test_a_quantized_head_is_refused_on_a_cpu_before_anything_is_read(tmp_path):
    spec = {"method": "eagle3", "model": "nowhere", "num_speculative_tokens": 2}
    asked = {"speculative_config": spec | {"quantization": "fp8"}, "device": "cpu"}
    with pytest.raises(UnsupportedError, match="does not run on a CPU"):
        build(tmp_path / "missing", **asked)


def test_the_scheduler_knows_how_far_the_drafter_looks(target, tmp_path):
    head = write_safeailab(tmp_path / "head", head_tensors())
    for options, slots, tokens in (
        ({}, 0, 0),
        (speculative("ngram", 4), 0, 0),
        (speculative("draft_model", 4, target), 3, 0),
        (speculative("eagle3", 4, head), 2, 1),
    ):
        core = build(target, **options)
        limits, drafter = core.scheduler.limits, core._runner.step.drafter
        assert (limits.lookahead_slots, limits.lookahead_tokens) == (slots, tokens)
        assert (drafter.lookahead_slots, drafter.lookahead_tokens) == (slots, tokens)
        assert limits.num_speculative_tokens == core._runner.step.sequences.num_speculative_tokens


def test_preemption_takes_the_drafter_s_kv_along(target, monkeypatch):
    core = build(target, num_kv_blocks=6, **speculative("draft_model", 3, target))
    swapped = swapped_by(core, monkeypatch)
    ran = run(core, [request("a", (1, 2, 3), 24), request("b", (4, 5, 6, 7), 24)])
    assert swapped
    assert ran.offered > 0
    assert ran.accepted == ran.offered


@pytest.mark.parametrize(("steps", "stream"), [(0, CpuStream), (1, CpuStream), (3, LaggingStream)])
def test_steps_in_flight_have_a_stream_and_a_buffer_each(target, steps, stream):
    core = build(target, steps_in_flight=steps)
    assert isinstance(core._runner.stream, stream)
    assert core.resolved.steps_in_flight == max(steps, 1)
    assert len(core._runner.ring.free) == core.resolved.steps_in_flight + 1


def test_a_step_must_hold_a_window(target):
    options = {"max_num_batched_tokens": 16} | speculative("ngram", 16)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=16 holds no window of 17 rows"):
        build(target, **options)


@pytest.mark.parametrize(("asked", "limits"), [({}, True), ({"draft_limits": "fixed"}, False)])
def test_the_scheduler_is_told_how_drafts_are_limited(target, asked, limits):
    spec = {"method": "ngram", "num_speculative_tokens": 4} | asked
    scheduler = build(target, speculative_config=spec, prefill_chunk_size=0).scheduler
    assert scheduler.limits.adaptive_drafts == limits
    assert scheduler.limits.longest_chunk == 2048


def test_without_drafts_none_are_limited(target, tmp_path):
    extraction = {"method": "extract_hidden_states", "shared_storage_path": str(tmp_path)}
    assert not build(target).scheduler.limits.adaptive_drafts
    assert not build(target, speculative_config=extraction).scheduler.limits.adaptive_drafts


def test_the_scheduler_is_told_what_steps_read(target, tmp_path):
    """Weights, KV, and a request's recurrent state."""
    hybrid = write_hybrid(tmp_path / "hybrid", "qwen3_5")
    for path in (target, hybrid):
        core = build(path)
        reads, resolved = core.scheduler.limits.reads, core.resolved
        assert 20 * reads.row_bytes == resolved.weights_bytes
        assert reads.weights_bytes == resolved.weights_bytes + STEP_BYTES["cpu"]
        assert reads.experts_bytes == 0
        memory = resolved.request_memory
        assert reads.state_bytes == memory.recurrent_state
        assert reads.kv_bytes == memory.kv_per_token > 0
    assert build(hybrid).scheduler.limits.reads.state_bytes > 0


def test_the_scheduler_is_told_what_rows_that_choose_experts_read(tmp_path):
    core = build(write_family(tmp_path, "gpt_oss"))
    reads = core.scheduler.limits.reads
    weights_bytes = reads.weights_bytes - STEP_BYTES["cpu"]
    assert reads.experts_bytes + weights_bytes == core.resolved.weights_bytes
    assert reads.experts_share == pytest.approx(2 / 5)
    row = weights_bytes + reads.experts_share * reads.experts_bytes
    assert reads.row_bytes == pytest.approx(row / 20)
    # Two of its three layers have a window.
    assert 3 * reads.kv_bytes == core.resolved.request_memory.kv_per_token > 0


def test_the_scheduler_is_told_what_a_drafter_s_passes_read(target, tmp_path):
    """All of the lm_head for each draft; the layers even for none, as they write KV."""
    head = write_safeailab(tmp_path / "head", head_tensors())
    for method, model in (("eagle3", head), ("draft_model", target)):
        core = build(target, **speculative(method, 2, model))
        reads, drafter = core.scheduler.limits.reads, core._runner.step.drafter
        own = drafter._head if method == "eagle3" else drafter._model
        layers = own.nbytes if method == "eagle3" else sum(layer.nbytes for layer in own.layers)
        logits = own.lm_head.nbytes if method == "eagle3" else own.head.nbytes
        assert layers > 0 < logits
        shares = reads.catch_up_share, reads.draft_share
        assert shares == pytest.approx([n / reads.weights_bytes for n in (layers, layers + logits)])
        assert reads.free_rows == 0
    reads = build(target, **speculative("ngram", 2)).scheduler.limits.reads
    assert reads.draft_share == reads.catch_up_share == 0


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_row_takes_as_long_in_four_bits_as_in_sixteen(tmp_path, family):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
    write_family(tmp_path / "plain", family, **sizes)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "packed", W4A16)

    def reads_of(name: str, device: str) -> StepReads:
        cpu, dtype, kernels = torch.device("cpu"), torch.bfloat16, TritonKernels(GemmTable())
        model = load_model(
            tmp_path / name, kernels=kernels, dtype=dtype, device=cpu, max_positions=1
        )
        mixtures = [one for layer in model.layers for one in mixtures_of(layer)]
        sized = SimpleNamespace(weights_bytes=model.weights_bytes, device=torch.device(device))
        parts = {"target": model, "mixtures": mixtures, "caches": model.caches}
        return _reads(SimpleNamespace(drafter=NO_DRAFTER, resolved=sized, **parts))

    for device in ("cuda", "cpu"):
        plain, packed = (reads_of(name, device) for name in ("plain", "packed"))
        bytes_of = [one.weights_bytes + one.experts_bytes for one in (plain, packed)]
        assert bytes_of[1] < bytes_of[0]
        assert packed.row_bytes == pytest.approx(plain.row_bytes)


def test_the_scheduler_knows_what_is_captured(target, monkeypatch):
    shapes = (StepShape(2, 8, 8, 2, 4, 4),)
    launcher = partial(EagerLauncher, shapes=shapes)
    monkeypatch.setattr("sametoken.engine.build.EagerLauncher", launcher)
    assert build(target).scheduler.limits.captured_shapes == shapes


@pytest.mark.parametrize(("name", "rows"), [("qwen2", 320), ("qwen3_moe", 2048), ("gpt_oss", 2048)])
def test_prompts_of_sparse_models_share_a_step(tmp_path, name, rows):
    path = write_family(tmp_path, name)
    limits = build_engine(EngineConfig(str(path))).scheduler.limits
    assert limits.busy_rows == rows <= limits.max_num_batched_tokens == 2048


def test_the_tightest_step_that_is_possible_works(target):
    options = {"max_num_batched_tokens": 16} | speculative("ngram", 15)
    prompt = tuple(i * 5 % VOCAB for i in range(20))
    truth = run(build(target), [request("r", prompt, 10)]).tokens
    assert run(build(target, **options), [request("r", prompt, 10)]).tokens == truth


def test_what_the_user_did_not_set_is_explained(target):
    without = {one.name for one in explanation(build(target).resolved) if not one.reason}
    assert without == {"model", *SIZES}


def test_a_wrong_tokenizer_is_found_before_the_weights_are_read(target):
    told = []
    config = EngineConfig.from_options(model=str(target), tokenizer="/no/such/file", **SIZES)
    with pytest.raises(CheckpointError, match="'/no/such/file' is neither a path"):
        build_engine(config, told.append)
    assert told == []


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"temperature": "hot"}', "temperature='hot'"),
        ('{"top_p": 3}', "top_p=3"),
        ('{"max_new_tokens": -1}', "max_tokens=-1"),
        ("[]", "not a JSON object"),
        ('{"eos_token_id": "end"}', "eos_token_id='end'"),
    ],
)
def test_a_wrong_generation_config_is_found_before_the_weights_are_read(tmp_path, text, cause):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json.*{cause}"):
        build(without_weights(tmp_path))


def test_so_is_one_of_another_directory(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_p": 3}')
    target = without_weights(tmp_path / "target")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/generation_config\.json.*top_p=3"):
        build(target, generation_config=str(tmp_path))


def without_weights(directory):
    """A checkpoint that fails as soon as its weights are read."""
    (write_llama(directory) / "model.safetensors").write_bytes(b"")
    return directory


def test_a_generation_config_that_is_not_used_may_hold_any_value(tmp_path):
    target = write_llama(tmp_path / "target")
    (target / "generation_config.json").write_text('{"temperature": "hot"}')
    assert build(target, generation_config="vllm").resolved.model_path == target


def test_the_user_is_told_what_is_loaded(target):
    told = []
    config = EngineConfig.from_options(model=str(target), **SIZES)
    core = build_engine(config, told.append)
    (line,) = told
    # Columns are padded to the width of the CPU's vectors.
    size = f"{core.resolved.weights_bytes / 2**10:.1f} KiB"
    assert re.fullmatch(rf"loaded weights of {re.escape(size)} in \d+\.\d s", line)


@pytest.mark.parametrize("steps", [1, 3])
def test_dummy_weights_and_synthetic_acceptance_reach_the_engine(tmp_path, steps):
    """From two config.json alone; the whole window of a rate 1 draft is emitted, then none."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "head").mkdir()
    head = LLAMA | {"num_hidden_layers": 1, "draft_vocab_size": 9}
    (tmp_path / "head" / "config.json").write_text(json.dumps(head))
    spec = speculative("eagle3", 3, tmp_path / "head")["speculative_config"]
    spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1, 1, 0]}
    core = build(tmp_path, load_format="dummy", speculative_config=spec, steps_in_flight=steps)
    core.add_request(request("a", (1, 2, 3, 4), max_tokens=20))
    windows = []
    while len(windows) < 5:
        windows += [(u.num_accepted, len(u.token_ids)) for u in core.step() if u.num_drafts]
    assert windows == [(2, 3)] * 5


def test_a_context_that_the_memory_shortens_is_announced(target):
    told = []
    options = {name: value for name, value in SIZES.items() if name != "max_model_len"}
    options |= {"num_kv_blocks": 2, "block_size": 8}
    core = build_engine(EngineConfig.from_options(model=str(target), **options), told.append)
    assert core.resolved.max_model_len == 16
    assert "max_model_len is 16: what the KV memory holds for one request" in told
