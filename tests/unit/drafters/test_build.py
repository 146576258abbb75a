"""Which drafter a config gives; heads in fp8, and heads over some of the target's tokens."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.checkpoints import (
    HIDDEN,
    VOCAB,
    eagle1_tensors,
    head_tensors,
    write_config,
    write_eagle1,
    write_llama,
    write_safeailab,
)
from helpers.drafting import MAX_LEN, Bench
from helpers.forward import load
from helpers.head_files import PLACEMENT, HeadFiles
from helpers.hybrids import FULL, write_hybrid
from helpers.packed import packed_in
from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import DrafterNeeds, LoadedDrafter, NoDrafter, named
from sametoken.drafters.build import load_drafter, needs_of_drafter, require_token_map
from sametoken.drafters.combined import CascadeDrafter
from sametoken.drafters.draft_model import DraftModelDrafter
from sametoken.drafters.eagle import EagleDrafter
from sametoken.drafters.heads import read_token_map
from sametoken.drafters.lookup import LookupDrafter
from sametoken.errors import (
    CheckpointError,
    ConfigError,
    DrafterMismatchError,
    InvariantError,
    UnsupportedError,
)
from sametoken.models.heads.base import HeadCheckpoint
from sametoken.models.loader import read_config
from sametoken.ops.model.gemm.fp8 import Fp8Weight
from sametoken.ops.reference import PlainWeight, ReferenceKernels
from sametoken.types.speculative_methods import TABLE, Kind


def spec_of(method: str, model=None, k: int = 3) -> SpeculativeConfig:
    return SpeculativeConfig(method, k, None if model is None else str(model))


def require_drafts(
    spec: SpeculativeConfig, path: Path, kind: type, num_steps: int = 5, **options
) -> tuple[DrafterNeeds, LoadedDrafter, Bench]:
    """For a target, it is a drafter of this kind, keeps what configs say of it, and runs."""
    needs = needs_of_drafter(spec, read_config(path), torch.float32, path)
    target = load(path, aux_layers=needs.aux_layers)
    loaded = load_drafter(spec, target, replace(PLACEMENT, target_path=path))
    bench = Bench(target, spec.num_speculative_tokens, **options)
    bench.drafter = loaded.attach(bench.allocate(loaded.caches), bench.coupling)
    assert isinstance(bench.drafter, kind)
    assert (loaded.caches, bench.drafter.lookahead_slots) == (needs.caches, needs.lookahead_slots)
    bench.run(num_steps, VOCAB, lambda context, drafts: None)
    return needs, loaded, bench


@pytest.fixture
def target_directory(tmp_path):
    return write_llama(tmp_path / "target")


@pytest.mark.parametrize(("spec", "kind"), [(None, NoDrafter), (spec_of("ngram"), LookupDrafter)])
def test_methods_without_weights(target_directory, spec, kind):
    target = load(target_directory)
    loaded = load_drafter(spec, target, PLACEMENT)
    assert loaded.caches == ()
    assert isinstance(loaded.attach(None, Bench(target, 1).coupling), kind)
    assert needs_of_drafter(spec, target.config, torch.float32) == DrafterNeeds()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_drafts_perfectly_for_itself(target_directory, temperature):
    spec, exact = spec_of("draft_model", target_directory), {"temperature": temperature, "spoil": 0}
    *_, bench = require_drafts(spec, target_directory, DraftModelDrafter, 15, seed=1, **exact)
    assert bench.counts.offered > 10
    assert bench.counts.accepted == bench.counts.offered


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("method", "wanted"), [("eagle", ()), ("eagle3", (2, 2, 1))])
def test_an_eagle_head(tmp_path, target_directory, method, wanted, k):
    if method == "eagle":
        head = write_eagle1(tmp_path / "head", eagle1_tensors())
    else:
        head = write_safeailab(tmp_path / "head", head_tensors())
    needs, *_ = require_drafts(spec_of(method, head, k), target_directory, EagleDrafter)
    assert needs.aux_layers == wanted


@pytest.mark.parametrize("k", [1, 3])
def test_a_module_in_the_target_s_own_checkpoint(tmp_path, k):
    directory = write_hybrid(tmp_path, layer_types=[FULL] * 4)
    needs, *_ = require_drafts(spec_of("mtp", None, k), directory, EagleDrafter)
    assert needs.aux_layers == ()


@pytest.mark.parametrize("cached", [0, 5])
def test_suffix_decoding_and_the_texts_it_reads(target_directory, cached):
    spec = replace(spec_of("suffix"), suffix_decoding_max_cached_requests=cached)
    _, loaded, _ = require_drafts(spec, target_directory, LookupDrafter)
    assert loaded.caches == ()
    assert loaded.history.texts.shape == (cached, MAX_LEN)


@pytest.mark.parametrize(("cascade", "cached"), [("ngram", 0), ("suffix", 4)])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_cascade_before_a_model(tmp_path, target_directory, method, cascade, cached):
    head = write_safeailab(tmp_path / "head", head_tensors())
    spec = replace(
        spec_of(method, target_directory if method == "draft_model" else head, k=6),
        cascade=cascade,
        cascade_model_tokens=3,
        suffix_decoding_max_cached_requests=cached,
    )
    needs, loaded, _ = require_drafts(spec, target_directory, CascadeDrafter, 8)
    assert loaded.history.texts.shape[0] == cached
    assert needs.lookahead_slots <= 2


def test_a_target_without_such_a_module_is_refused(target_directory):
    target = load(target_directory)
    placement = replace(PLACEMENT, target_path=target_directory)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM"):
        needs_of_drafter(spec_of("mtp"), target.config, torch.float32, target_directory)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM"):
        load_drafter(spec_of("mtp"), target, placement)


def test_drafters_for_other_targets_are_refused(tmp_path, target_directory):
    target = load(target_directory)
    head = write_safeailab(tmp_path / "head", head_tensors(), target_hidden_size=32)
    wide = write_eagle1(tmp_path / "wide", eagle1_tensors(), hidden_size=32)
    for spec, message in (
        (spec_of("eagle3", head), "32 hidden elements, the target has 16"),
        (spec_of("eagle", wide), "32 hidden elements, the target has 16"),
    ):
        with pytest.raises(DrafterMismatchError, match=message):
            load_drafter(spec, target, PLACEMENT)
    for spec in (spec_of("eagle3", head), spec_of("eagle", wide)):
        with pytest.raises(DrafterMismatchError, match="32 hidden"):
            needs_of_drafter(spec, target.config, torch.float32)


def test_a_target_that_shares_no_weights_is_refused(tmp_path, target_directory):
    target = load(target_directory)
    stranger = SimpleNamespace(config=target.config)
    head = write_eagle1(tmp_path / "head", eagle1_tensors())
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM keeps no states"):
        load_drafter(spec_of("eagle", head), stranger, PLACEMENT)


def test_kv_memory_must_be_given_to_a_drafter_that_has_some(target_directory):
    target = load(target_directory)
    loaded = load_drafter(spec_of("draft_model", target_directory), target, PLACEMENT)
    with pytest.raises(InvariantError):
        loaded.attach(None, Bench(target, 3).coupling)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_drafter_may_have_dummy_weights(tmp_path, target_directory, method):
    changes = {} if method == "draft_model" else {"num_hidden_layers": 1}
    if method == "eagle3":
        changes["draft_vocab_size"] = 9
    spec = spec_of(method, write_config(tmp_path, **changes))
    needs = needs_of_drafter(spec, read_config(target_directory), torch.float32)
    target = load(target_directory, aux_layers=needs.aux_layers)
    placement = replace(PLACEMENT, load_format="dummy")
    assert load_drafter(spec, target, placement).caches
    with pytest.raises(CheckpointError, match="no safetensors"):
        load_drafter(spec, target, PLACEMENT)


HEADS = ("eagle", "eagle3", "mtp", "mtp with experts")
EMBEDDING = {"embedding"}
PROJECTIONS = {
    "eagle": {"fc.weight", "lm_head"}
    | {f"layers.0.attention.{name}.weight" for name in ("qkv", "output")}
    | {f"layers.0.mlp.{name}.weight" for name in ("gate_up", "down")},
    "eagle3": {"fc.weight", "lm_head"}
    | {f"layer.attention.{name}.weight" for name in ("qkv", "output")}
    | {f"layer.mlp.{name}.weight" for name in ("gate_up", "down")},
    "mtp": {"module.fc.weight", "lm_head"}
    | {f"module.layer.attention.{name}.weight" for name in ("projection", "output")}
    | {f"module.layer.mlp.{name}.weight" for name in ("gate_up", "down")},
    "mtp with experts": {"module.fc.weight", "lm_head"}
    | {f"module.layer.attention.{name}.weight" for name in ("projection", "output")},
}


class Recording(ReferenceKernels):
    """Remembers the matrices that it packed, without keeping them."""

    def __init__(self) -> None:
        self.packed: list[weakref.ref[torch.Tensor]] = []

    def pack(self, weight: torch.Tensor) -> PlainWeight:
        packed = super().pack(weight.clone())
        self.packed.append(weakref.ref(packed.matrix))
        return packed


@pytest.fixture(params=HEADS)
def which(request) -> str:
    return request.param


def test_all_projections_of_a_head_become_fp8_and_nothing_else(tmp_path, which):
    files = HeadFiles(tmp_path, which)
    plain = files.head()
    head = files.head(quantization="fp8")
    before, after = dict(packed_in(plain)), dict(packed_in(head))
    assert before.keys() == after.keys() >= PROJECTIONS[which] | EMBEDDING
    rounded = {name for name, weight in after.items() if isinstance(weight, Fp8Weight)}
    assert rounded == PROJECTIONS[which]
    mixture = before.keys() - rounded - EMBEDDING
    assert bool(mixture) == (which == "mtp with experts")
    assert all(name.startswith("module.layer.mlp.") for name in mixture)
    for name in rounded:
        exact, weight = before[name].matrix, after[name]
        error = (weight.matrix.float() * weight.scale[:, None] - exact).norm() / exact.norm()
        assert 0.005 < error < 0.05


def test_the_target_s_weights_stay_as_they_are(tmp_path, which):
    files = HeadFiles(tmp_path, which)
    shared, own = files.target.embedding, files.target.head
    before = own.matrix.clone()
    head = files.head(quantization="fp8")
    assert files.target.embedding is shared
    assert files.target.head is own
    assert isinstance(own, PlainWeight)
    assert torch.equal(own.matrix, before)
    assert isinstance(head.embedding, PlainWeight)


def test_a_quantized_head_drafts(tmp_path, which):
    files = HeadFiles(tmp_path, which)
    plain, rounded = (files.bench(quantization=one) for one in (None, "fp8"))
    for bench in (plain, rounded):
        bench.run(5, VOCAB, lambda context, drafts: None)
        assert bench.counts.offered > 0
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    exact, got = (bench.drafter._head.compute_logits(x) for bench in (plain, rounded))
    # A matrix in e4m3 is 0.026 off, its mantissa of 3 bits rounded to nearest, and rows are too.
    assert 0.005 < (got - exact).norm() / exact.norm() < 0.06


def test_matrices_that_became_fp8_leave_memory(tmp_path, which):
    files = HeadFiles(tmp_path, which)
    kernels = Recording()
    head = files.head(kernels, quantization="fp8")
    alive = [one() for one in kernels.packed if one() is not None]
    kept = [weight.matrix for _, weight in packed_in(head) if isinstance(weight, PlainWeight)]
    assert len(kernels.packed) > len(alive)
    assert all(any(matrix is one for one in kept) for matrix in alive)


MAPPED_HEADS = ("eagle", "eagle3", "mtp")
SOME = [19, 2, 3, 7, 11, 0, 22, 5]


def with_map(folder: Path, method: str, token_ids=SOME, *, full_vocab=True) -> HeadFiles:
    """A head whose spec names ``map.json`` in the folder."""
    path = folder / "map.json"
    path.write_text(json.dumps(token_ids))
    files = HeadFiles(folder, method, full_vocab=full_vocab)
    files.spec = replace(files.spec, token_map=str(path))
    return files


@pytest.fixture(params=MAPPED_HEADS)
def method(request) -> str:
    return request.param


def proposed(bench: Bench) -> list[list[int]]:
    """Every draft that counts, step by step."""
    seen = []

    def remember(context, drafts) -> None:
        for ids, count in zip(drafts.draft_ids.tolist(), drafts.num_drafts.tolist(), strict=True):
            seen.append(ids[:count])

    bench.run(8, VOCAB, remember)
    return seen


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_its_rows_are_those_of_the_tokens_in_the_map(tmp_path, method, quantization):
    files = with_map(tmp_path, method)
    head = files.head(quantization=quantization)
    whole = files.head(quantization=quantization, token_map=None)
    assert head.token_ids.tolist() == sorted(SOME)
    assert whole.token_ids is None
    assert isinstance(head.lm_head, Fp8Weight) == (quantization is not None)
    rows, all_rows = head.lm_head.matrix.float(), whole.lm_head.matrix.float()
    assert torch.equal(rows, all_rows[sorted(SOME)])
    if quantization:
        assert torch.equal(head.lm_head.scale, whole.lm_head.scale[sorted(SOME)])


def test_it_proposes_tokens_of_the_map_alone(tmp_path, method):
    files = with_map(tmp_path, method)
    drafts = [token for ids in proposed(files.bench()) for token in ids]
    assert len(set(drafts)) > 1
    assert set(drafts) <= set(SOME)
    whole = [token for ids in proposed(files.bench(token_map=None)) for token in ids]
    assert set(whole) - set(SOME)


def test_a_map_of_all_tokens_changes_no_draft(tmp_path, method):
    files = with_map(tmp_path, method, list(range(VOCAB)))
    mapped = proposed(files.bench())
    assert mapped == proposed(files.bench(token_map=None))
    assert any(mapped)


def test_the_target_keeps_its_own_head(tmp_path):
    files = with_map(tmp_path, "mtp")
    before = files.target.head.matrix.clone()
    head = files.head()
    assert torch.equal(files.target.head.matrix, before)
    assert head.embedding is files.target.embedding


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("no JSON", "cannot be read"),
        (100_000 * "[", "cannot be read"),
        ("{}", "no list of integers"),
        ("[]", "no list of integers"),
        ("[1, 2.0]", "no list of integers"),
        ("[true]", "no list of integers"),
        ("[3, 1, 3]", "a token twice"),
        (f"[0, {VOCAB}]", f"outside a vocabulary of {VOCAB}"),
        ("[-1]", "outside a vocabulary"),
    ],
)
def test_what_is_no_map_is_refused(tmp_path, text, cause):
    path = tmp_path / "map.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=cause) as caught:
        read_token_map(path, VOCAB)
    assert caught.value.remedy


def test_a_map_that_is_not_there_is_refused_before_the_target_is_loaded(tmp_path, method):
    files = with_map(tmp_path, method)
    (tmp_path / "map.json").unlink()
    with pytest.raises(ConfigError, match=r"map\.json cannot be read"):
        require_token_map(files.spec, read_config(files.path))


def test_a_head_with_a_map_of_its_own_takes_no_other(tmp_path):
    files = with_map(tmp_path, "eagle3", full_vocab=False)
    with pytest.raises(ConfigError, match="a map of its own") as caught:
        needs_of_drafter(files.spec, read_config(files.path), torch.float32, files.path)
    assert caught.value.remedy == 'leave "token_map" out'
    with pytest.raises(ConfigError, match="a map of its own"):
        files.bench()


def test_every_line_of_the_table_names_what_is_there():
    for method in TABLE.values():
        assert callable(named(method.load))
        assert bool(method.head) == (method.kind is Kind.HEAD)
        head = named(method.head) if method.head else HeadCheckpoint
        # A checkpoint, or a function that chooses one.
        assert callable(head)
        assert not isinstance(head, type) or issubclass(head, HeadCheckpoint)
