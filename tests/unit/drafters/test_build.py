"""Which drafter a speculative config gives, and what it needs of the target."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from helpers.checkpoints import (
    LLAMA,
    VOCAB,
    eagle1_tensors,
    head_tensors,
    write_eagle1,
    write_llama,
    write_safeailab,
)
from helpers.drafting import CPU, MAX_LEN, Bench
from helpers.hybrids import FULL, write_hybrid
from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import NoDrafter
from sametoken.drafters.build import Placement, load_drafter, required_aux_layers
from sametoken.drafters.combined import CascadeDrafter
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.drafters.eagle import EagleDrafter
from sametoken.drafters.ngram import NgramDrafter
from sametoken.drafters.suffix import SuffixDrafter
from sametoken.errors import CheckpointError, DrafterMismatchError, InvariantError, UnsupportedError
from sametoken.models.loader import load_model, read_config
from sametoken.ops.dispatch import select_backend
from sametoken.ops.reference import ReferenceKernels

KERNELS = ReferenceKernels()
BACKEND = dataclasses.replace(select_backend(CPU), model=KERNELS)
PLACEMENT = Placement(BACKEND, torch.float32, CPU, max_model_len=40, max_positions=MAX_LEN)


def load_target(directory, aux_layers=()):
    return load_model(
        directory,
        kernels=KERNELS,
        dtype=torch.float32,
        device=CPU,
        max_positions=MAX_LEN,
        aux_layers=aux_layers,
    )


def spec_of(method: str, model=None, k: int = 3) -> SpeculativeConfig:
    return SpeculativeConfig(method, k, None if model is None else str(model))


@pytest.fixture
def target_directory(tmp_path):
    return write_llama(tmp_path / "target")


@pytest.mark.parametrize(("spec", "kind"), [(None, NoDrafter), (spec_of("ngram"), NgramDrafter)])
def test_methods_without_weights(target_directory, spec, kind):
    target = load_target(target_directory)
    loaded = load_drafter(spec, target, PLACEMENT)
    assert loaded.caches == ()
    assert isinstance(loaded.attach(None, Bench(target, 1).coupling), kind)
    assert required_aux_layers(spec, target.config) == ()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_drafts_perfectly_for_itself(target_directory, temperature):
    target = load_target(target_directory)
    bench = Bench(target, 3, seed=1, temperature=temperature, spoil=0.0)
    loaded = load_drafter(spec_of("draft_model", target_directory), target, PLACEMENT)
    bench.drafter = loaded.attach(bench.allocate(loaded.caches), bench.coupling)
    assert isinstance(bench.drafter, DraftModelDrafter)
    assert bench.drafter.lookahead_slots == loaded.lookahead_slots
    bench.run(15, VOCAB, lambda context, drafts: None)
    assert bench.counts.offered > 10
    assert bench.counts.accepted == bench.counts.offered


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("method", "wanted"), [("eagle", ()), ("eagle3", (2, 2, 1))])
def test_an_eagle_head(tmp_path, target_directory, method, wanted, k):
    if method == "eagle":
        head = write_eagle1(tmp_path / "head", eagle1_tensors())
    else:
        head = write_safeailab(tmp_path / "head", head_tensors())
    spec = spec_of(method, head, k)
    layers = required_aux_layers(spec, read_config(target_directory))
    assert layers == wanted
    target = load_target(target_directory, layers)
    loaded = load_drafter(spec, target, PLACEMENT)
    bench = Bench(target, k)
    bench.drafter = loaded.attach(bench.allocate(loaded.caches), bench.coupling)
    assert isinstance(bench.drafter, EagleDrafter)
    assert bench.drafter.lookahead_slots == loaded.lookahead_slots
    bench.run(5, VOCAB, lambda context, drafts: None)


@pytest.mark.parametrize("k", [1, 3])
def test_a_module_in_the_target_s_own_checkpoint(tmp_path, k):
    directory = write_hybrid(tmp_path, layer_types=[FULL] * 4)
    spec = spec_of("mtp", None, k)
    assert required_aux_layers(spec, read_config(directory), directory) == ()
    target = load_target(directory)
    loaded = load_drafter(spec, target, dataclasses.replace(PLACEMENT, target_path=directory))
    bench = Bench(target, k)
    bench.drafter = loaded.attach(bench.allocate(loaded.caches), bench.coupling)
    assert isinstance(bench.drafter, EagleDrafter)
    assert bench.drafter.lookahead_slots == loaded.lookahead_slots
    bench.run(5, VOCAB, lambda context, drafts: None)


@pytest.mark.parametrize("cached", [0, 5])
def test_suffix_decoding_and_the_texts_it_reads(target_directory, cached):
    spec = dataclasses.replace(spec_of("suffix"), suffix_decoding_max_cached_requests=cached)
    loaded = load_drafter(spec, load_target(target_directory), PLACEMENT)
    assert loaded.caches == ()
    assert loaded.history.texts.shape == (cached, MAX_LEN)
    bench = Bench(load_target(target_directory), 3)
    bench.drafter = loaded.attach(None, bench.coupling)
    assert isinstance(bench.drafter, SuffixDrafter)
    bench.run(5, VOCAB, lambda context, drafts: None)


@pytest.mark.parametrize(("cascade", "cached"), [("ngram", 0), ("suffix", 4)])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_cascade_before_a_model(tmp_path, target_directory, method, cascade, cached):
    head = write_safeailab(tmp_path / "head", head_tensors())
    spec = dataclasses.replace(
        spec_of(method, target_directory if method == "draft_model" else head, k=6),
        cascade=cascade,
        cascade_model_tokens=3,
        suffix_decoding_max_cached_requests=cached,
    )
    layers = required_aux_layers(spec, read_config(target_directory))
    target = load_target(target_directory, layers)
    loaded = load_drafter(spec, target, PLACEMENT)
    assert loaded.history.texts.shape[0] == cached
    bench = Bench(target, 6)
    bench.drafter = loaded.attach(bench.allocate(loaded.caches), bench.coupling)
    assert isinstance(bench.drafter, CascadeDrafter)
    assert bench.drafter.lookahead_slots == loaded.lookahead_slots <= 2
    bench.run(8, VOCAB, lambda context, drafts: None)


def test_a_target_without_such_a_module_is_refused(target_directory):
    target = load_target(target_directory)
    placement = dataclasses.replace(PLACEMENT, target_path=target_directory)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM"):
        required_aux_layers(spec_of("mtp"), target.config, target_directory)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM"):
        load_drafter(spec_of("mtp"), target, placement)


def test_drafters_for_other_targets_are_refused(tmp_path, target_directory):
    target = load_target(target_directory)
    other = write_llama(tmp_path / "other", vocab_size=29)
    short = write_llama(tmp_path / "short", max_position_embeddings=16)
    head = write_safeailab(tmp_path / "head", head_tensors(), target_hidden_size=32)
    wide = write_eagle1(tmp_path / "wide", eagle1_tensors(), hidden_size=32)
    for spec, message in (
        (spec_of("draft_model", other), "29 tokens, the target 23"),
        (spec_of("draft_model", short), "16 positions, below max_model_len=40"),
        (spec_of("eagle3", head), "32 hidden elements, the target has 16"),
        (spec_of("eagle", wide), "32 hidden elements, the target has 16"),
    ):
        with pytest.raises(DrafterMismatchError, match=message):
            load_drafter(spec, target, PLACEMENT)
    for spec in (spec_of("eagle3", head), spec_of("eagle", wide)):
        with pytest.raises(DrafterMismatchError, match="32 hidden"):
            required_aux_layers(spec, target.config)


def test_a_target_that_shares_no_weights_is_refused(tmp_path, target_directory):
    target = load_target(target_directory)
    stranger = SimpleNamespace(config=target.config)
    head = write_eagle1(tmp_path / "head", eagle1_tensors())
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM keeps no states"):
        load_drafter(spec_of("eagle", head), stranger, PLACEMENT)


def test_kv_memory_must_be_given_to_a_drafter_that_has_some(target_directory):
    target = load_target(target_directory)
    loaded = load_drafter(spec_of("draft_model", target_directory), target, PLACEMENT)
    with pytest.raises(InvariantError):
        loaded.attach(None, Bench(target, 3).coupling)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_drafter_may_have_dummy_weights(tmp_path, target_directory, method):
    changes = {} if method == "draft_model" else {"num_hidden_layers": 1}
    if method == "eagle3":
        changes["draft_vocab_size"] = 9
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    spec = spec_of(method, tmp_path)
    target = load_target(target_directory, required_aux_layers(spec, read_config(target_directory)))
    placement = dataclasses.replace(PLACEMENT, load_format="dummy")
    assert load_drafter(spec, target, placement).caches
    with pytest.raises(CheckpointError, match="no safetensors"):
        load_drafter(spec, target, PLACEMENT)
