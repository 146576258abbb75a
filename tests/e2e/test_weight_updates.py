"""After an update an engine says what one that was built with the new weights says, to the bit."""

from __future__ import annotations

import gc
import json

import pytest
import torch

from helpers.checkpoints import (
    eagle1_tensors,
    head_tensors,
    write_eagle1,
    write_llama,
    write_safeailab,
)
from helpers.dense_modules import ERNIE, MIMO, write_module
from helpers.families import write_family
from helpers.harness import request
from helpers.hybrids import without_mtp, write_hybrid
from helpers.latents import write_latent, write_nextn
from helpers.nemotron import write_nemotron
from helpers.updates import NGRAM, PROMPTS, engine, params, said, same_weights, tensors_of
from sametoken.engine.sleep import DeviceMemory, FixedMemory, whole_storages
from sametoken.errors import RequestError, UnsupportedError, WeightUpdateError
from sametoken.models.in_place import Replacement
from sametoken.models.in_place import tensors_of as tensors_of_model

MTP = {"method": "mtp", "num_speculative_tokens": 3}
DECODERS = ("gemma4", "glm4_moe", "olmo2", "phi3", "qwen3_moe")
#: Writers of every form of weights: dense, tied, with experts, recurrent, latent.
WRITERS = {
    "llama": write_llama,
    "tied": lambda path, seed: write_family(path, "qwen2", seed, tie_word_embeddings=True),
    "qwen3_5": lambda path, seed: write_hybrid(path, seed=seed),
    "qwen3_next": lambda path, seed: write_hybrid(path, "qwen3_next", seed),
    "nemotron": write_nemotron,
    "deepseek_v3": lambda path, seed: write_latent(path, "deepseek_v3", seed),
    **{name: lambda path, seed, name=name: write_family(path, name, seed) for name in DECODERS},
}
MODULES = {
    "qwen3_5": WRITERS["qwen3_5"],
    "nemotron": write_nemotron,
    "deepseek_v3": lambda path, seed: write_nextn(path, seed=seed),
    **{
        kind: lambda path, seed, kind=kind: write_module(path, kind, seed) for kind in (ERNIE, MIMO)
    },
}
DRAFTERS = {
    "eagle": lambda path, seed: write_eagle1(path, eagle1_tensors(seed)),
    "eagle3": lambda path, seed: write_safeailab(path, head_tensors(seed)),
    "draft_model": lambda path, seed: write_llama(path, seed, num_hidden_layers=1),
}


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    """Two checkpoints of one form."""
    folder = tmp_path_factory.mktemp("llamas")
    return [write_llama(folder / str(seed), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def answers(llamas):
    """What engines that were built with them say."""
    return [said(engine(path)) for path in llamas]


@pytest.mark.parametrize("name", WRITERS)
def test_every_family_says_what_an_engine_of_the_new_weights_says(name, tmp_path, monkeypatch):
    if len(name) % 2:
        monkeypatch.setenv("SAMETOKEN_KERNELS", "reference")
    old, new = (WRITERS[name](tmp_path / str(seed), seed) for seed in (0, 1))
    built, live = engine(new, dtype="bfloat16"), engine(old, NGRAM, dtype="bfloat16")
    before = said(live)
    assert live.update_weights(tensors_of(new).items()) == 1
    assert said(live) == said(built) != before


@pytest.mark.parametrize("name", MODULES)
def test_a_targets_own_module_comes_with_it(name, tmp_path):
    old, new = (MODULES[name](tmp_path / str(seed), seed) for seed in (0, 1))
    built, live = engine(new, MTP), engine(old, MTP)
    live.update_weights(tensors_of(new).items())
    assert said(live) == said(built)
    assert same_weights(live, built)


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4", "glm4_moe", "nemotron"])
def test_buffers_that_are_not_sent_stay(name, tmp_path):
    """A trainer that sends ``named_parameters`` of transformers' model leaves them out."""
    old, new = (WRITERS[name](tmp_path / str(seed), seed) for seed in (0, 1))
    buffers = ("e_score_correction_bias", "layer_scalar")
    sent = {at: one for at, one in tensors_of(new).items() if not at.endswith(buffers)}
    kept = {at: one for at, one in tensors_of(old).items() if at.endswith(buffers)}
    assert kept
    live, built = engine(old, NGRAM), engine(new)
    built.update_weights((sent | kept).items())
    before = said(live)
    live.update_weights(sent.items())
    assert said(live) == said(built) != before
    with pytest.raises(WeightUpdateError, match="embed"):
        live.update_weights((at, one) for at, one in sent.items() if "embed" not in at)
    live.sleep(2)
    with pytest.raises(WeightUpdateError, match="state_dict"):
        live.update_weights(sent.items())
    live.update_weights((sent | kept).items())
    live.wake_up()
    assert said(live) == said(built)


def test_a_module_that_is_not_sent_stays(tmp_path):
    old, new = (write_hybrid(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    built, live = engine(new, MTP), engine(old, MTP)
    live.update_weights(without_mtp(tensors_of(new)).items())
    assert said(live) == said(built)
    assert not same_weights(live, built)
    assert live.update_weights(new, target="drafter") == 1
    assert same_weights(live, built)
    part = {name: one for name, one in tensors_of(old).items() if name != "mtp.fc.weight"}
    with pytest.raises(WeightUpdateError, match=r"mtp\.fc\.weight"):
        live.update_weights(part.items())
    assert same_weights(live, built)


@pytest.mark.parametrize("method", DRAFTERS)
def test_a_drafters_weights_change_alone(method, llamas, answers, tmp_path):
    paths = [DRAFTERS[method](tmp_path / str(seed), seed) for seed in (0, 1)]
    spec = {"method": method, "num_speculative_tokens": 3}
    live, built = (engine(llamas[0], spec | {"model": str(path)}) for path in paths)
    assert not same_weights(live, built)
    assert live.update_weights(tensors_of(paths[1]).items(), target="drafter") == 0
    assert same_weights(live, built)
    assert said(live) == answers[0]
    live.update_weights(tensors_of(llamas[1]).items())
    assert said(live) == answers[1]
    assert same_weights(live, engine(llamas[1], spec | {"model": str(paths[1])}))


def spoilt(tensors: dict, name: str, value: float) -> dict:
    values = tensors[name].clone()
    values.view(-1)[-1] = value
    return tensors | {name: values}


UP, NORM = "model.layers.2.mlp.up_proj.weight", "model.norm.weight"
BAD = {
    "missing of a fused group": lambda good: {k: v for k, v in good.items() if k != UP},
    "unknown": lambda good: good | {UP + "s": good[UP]},
    "shape": lambda good: good | {UP: good[UP][:-1]},
    "integers": lambda good: good | {UP: good[UP].int()},
    "NaN": lambda good: spoilt(good, UP, float("nan")),
    "infinite": lambda good: spoilt(good, UP, float("inf")),
    "no tensor": lambda good: good | {UP: good[UP].tolist()},
}


def test_bad_updates_name_the_tensor_and_change_nothing(llamas, answers):
    live = engine(llamas[0], NGRAM)
    for fault, spoil in BAD.items():
        with pytest.raises(WeightUpdateError, match=UP.replace(".", r"\.")):
            live.update_weights(spoil(tensors_of(llamas[1])).items())
        assert live.weight_version == 0, fault
    assert said(live) == answers[0]


def test_half_an_update_changes_nothing(llamas, answers):
    live, tensors = engine(llamas[0]), tensors_of(llamas[1])

    def breaks_off():
        yield from list(tensors.items())[:9]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError):
        live.update_weights(breaks_off())
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight' is sent twice"):
        live.update_weights([*tensors.items(), (NORM, tensors[NORM])])
    for wrong in ({"version": 0}, {"version": True}, {"version": 2**70}, {"target": "both"}):
        with pytest.raises(WeightUpdateError):
            live.update_weights(tensors.items(), **wrong)
    with pytest.raises(WeightUpdateError, match="no weights"):
        live.update_weights(tensors.items(), target="drafter")
    factor = f"base_model.model.{UP.replace('weight', 'lora_A.weight')}"
    with pytest.raises(WeightUpdateError, match=r"is an adapter's.*Load it by adapters\.load"):
        live.update_weights([(factor, tensors[UP])])
    assert said(live) == answers[0]


def test_no_prefix_of_other_weights_is_read(llamas, answers):
    live = engine(llamas[0], NGRAM)
    assert said(live) == answers[0]
    cached = [one.metrics.num_cached_tokens for one in live.generate(PROMPTS, params())]
    assert max(cached) > 0
    live.update_weights(llamas[1], version=7)
    outputs = live.generate(PROMPTS[:1], params())
    assert outputs[0].metrics.num_cached_tokens == 0
    assert outputs[0].weight_versions == (7, 7)
    assert live.generate(PROMPTS[:1], params())[0].metrics.num_cached_tokens > 0
    live.update_weights(llamas[0])
    # The first weights under another version: no old block is read, and the answers are the same.
    assert said(live) == answers[0]
    live._engine.scheduler.check_integrity()


@pytest.mark.parametrize("writer", [write_llama, WRITERS["qwen3_5"]], ids=["llama", "hybrid"])
def test_requests_in_flight_go_on_and_leave_no_prefix(writer, tmp_path):
    old, new = (writer(tmp_path / str(seed), seed) for seed in (0, 1))
    live, prompt = engine(old, NGRAM), PROMPTS[2]
    stream = live.generate_stream(prompt, params(14))
    first = [next(stream) for _ in range(3)][-1]
    assert first.weight_versions == (0, 0)
    live.update_weights(tensors_of(new).items())
    *_, last = stream
    assert last.weight_versions == (0, 1)
    assert last.outputs[0].finish_reason == "length"
    assert (
        last.outputs[0].token_ids[: len(first.outputs[0].token_ids)] == first.outputs[0].token_ids
    )
    # Its KV, of both versions, is nobody's prefix.
    assert said(live, [prompt]) == said(engine(new), [prompt])
    live._engine.scheduler.check_integrity()


def test_a_prompt_that_is_half_computed_leaves_no_prefix(llamas):
    """Its later chunks end blocks whose first rows are of older weights."""
    live = engine(llamas[0], prefill_chunk_size=6)
    core, prompt = live._engine, PROMPTS[2]["prompt_token_ids"]
    core.add_request(request("half", prompt, 4))
    assert core.step() == ()
    live.update_weights(llamas[1])
    while core.scheduler.num_running:
        for update in core.step():
            assert update.weight_versions == (0, 1)
            core.release("half", len(prompt))
    expected = said(engine(llamas[1]), PROMPTS[2:3])
    # The first caches the blocks in front of them, the second would read them.
    assert [said(live, PROMPTS[2:3]) for _ in range(2)] == [expected] * 2
    core.scheduler.check_integrity()


def test_fifty_updates_leave_memory_and_addresses_as_they_were(llamas, answers):
    live, tensors = engine(llamas[0], NGRAM), [tensors_of(path) for path in llamas]
    built = engine(llamas[1])._engine.weights.model

    def held() -> tuple:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        own = [old.data_ptr() for old, _ in Replacement.of(live._engine.weights.model, built).pairs]
        return own, len(found), sum(one.numel() * one.itemsize for one in found)

    live.update_weights(tensors[1].items())
    before = held()
    for number in range(50):
        live.update_weights(tensors[number % 2].items())
    assert held() == before
    assert live.weight_version == 51
    assert said(live) == answers[1]


def test_extraction_keeps_one_set_of_weights(llamas, tmp_path):
    spec = {"method": "extract_hidden_states", "shared_storage_path": str(tmp_path)}
    live = engine(llamas[0], spec)
    with pytest.raises(UnsupportedError, match="extraction"):
        live.update_weights(llamas[1])


@pytest.mark.parametrize("name", ["tied", "nemotron"])
def test_weights_that_a_sleep_dropped_come_back_by_an_update(name, tmp_path):
    old, new = (WRITERS[name](tmp_path / str(seed), seed) for seed in (0, 1))
    built, live = engine(new), engine(old, NGRAM)
    before = said(live)
    live.sleep()
    assert live.is_sleeping
    with pytest.raises(RequestError, match="wake_up"):
        live.generate(PROMPTS[:1], params())
    live.wake_up()
    assert said(live) == before
    assert max(one.metrics.num_cached_tokens for one in live.generate(PROMPTS, params())) > 0
    live.reset_prefix_cache()
    assert live.generate(PROMPTS[:1], params())[0].metrics.num_cached_tokens == 0
    live.sleep(2)
    assert live.generate_stream(PROMPTS[0]) is not None
    with pytest.raises(RequestError, match="Update the weights"):
        live.wake_up()
    # Whatever is in memory that was given back: nothing of it is read.
    for tensor in (*live._engine.sleep.memory.kv, *live._engine.sleep.memory.weights):
        tensor.view(torch.uint8).fill_(63)
    with pytest.raises(WeightUpdateError):
        live.update_weights([])
    live.update_weights(tensors_of(new).items())
    live.wake_up()
    assert said(live) == said(built)
    live._engine.scheduler.check_integrity()


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3"])
def test_an_engine_whose_storages_were_gone_says_the_same(name, tmp_path, monkeypatch):
    """A GPU's memory, tried on kernels that keep no address between steps."""
    monkeypatch.setenv("SAMETOKEN_KERNELS", "reference")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    old, new = (WRITERS[name](tmp_path / str(seed), seed) for seed in (0, 1))
    built, live = engine(new), engine(old, NGRAM)
    core, step, before = live._engine, live._engine._runner.step, said(live)
    caches = (step.kv, *step.drafter.kv_caches)
    kv = whole_storages(one for cache in caches for one in (*cache.blocks, *cache.slots))
    weights = whole_storages(tensors_of_model(step.model))
    core.sleep.memory = DeviceMemory(kv, weights, None)
    assert sum(size for _, size in weights) >= step.model.weights_bytes
    live.sleep()
    assert [one.nbytes() for one, _ in kv] == [0] * len(kv)
    live.wake_up()
    assert said(live) == before
    for path, first in ((new, ["weights"]), (old, [])):
        live.sleep(2)
        assert sum(one.nbytes() for one, _ in (*kv, *weights)) == 0
        live.wake_up(first)
        live.update_weights(tensors_of(path).items())
        live.wake_up()
        assert said(live) == (said(built) if path == new else before)
    core.scheduler.check_integrity()


def test_running_requests_need_their_kv(llamas, monkeypatch):
    live = engine(llamas[0])
    stream = live.generate_stream(PROMPTS[0], params())
    next(stream)
    with pytest.raises(RequestError, match="unfinished"):
        live.sleep()
    core = live._engine
    with monkeypatch.context() as patch:
        patch.setattr(core.sleep, "memory", FixedMemory("several ranks"))
        with pytest.raises(UnsupportedError, match="memory of several ranks"):
            live.sleep()
    with pytest.raises(RequestError, match="requests run"):
        core.upkeep.sleep(1)
    stream.close()
    live.sleep()
    live.wake_up(["kv_cache"])
    live.wake_up(["weights"])


def test_a_drafter_waits_for_the_targets_weights(llamas, tmp_path):
    head = write_safeailab(tmp_path / "head", head_tensors(0))
    spec = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(head)}
    live, built = (engine(path, spec) for path in llamas)
    live.sleep(2)
    with pytest.raises(WeightUpdateError, match="Update the model first"):
        live.update_weights(tensors_of(head).items(), target="drafter")
    live.update_weights(tensors_of(llamas[1]).items())
    live.wake_up()
    assert said(live) == said(built)
    assert same_weights(live, built)


def test_a_drafter_reads_no_weight_of_a_target_that_was_dropped(llamas, tmp_path, monkeypatch):
    """On a GPU their storages are gone; a head with a token map has made its lm_head of them."""
    monkeypatch.setenv("SAMETOKEN_KERNELS", "reference")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    heads = [write_eagle1(tmp_path / str(seed), eagle1_tensors(seed)) for seed in (0, 1)]
    token_map = tmp_path / "map.json"
    token_map.write_text(json.dumps([*range(2, 12)]))
    spec = {"method": "eagle", "num_speculative_tokens": 3, "token_map": str(token_map)}
    pairs = zip(llamas, heads, strict=True)
    live, built = (engine(path, spec | {"model": str(head)}) for path, head in pairs)
    weights = whole_storages(tensors_of_model(live._engine._runner.step.model))
    live._engine.sleep.memory = DeviceMemory((), weights, None)
    live.sleep(2)
    with pytest.raises(WeightUpdateError, match="Update the model first"):
        live.update_weights(tensors_of(heads[1]).items(), target="drafter")
    live.update_weights(tensors_of(llamas[1]).items())
    live.update_weights(tensors_of(heads[1]).items(), target="drafter")
    live.wake_up()
    assert said(live) == said(built)
    assert same_weights(live, built)
