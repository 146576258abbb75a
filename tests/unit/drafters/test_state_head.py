"""Heads without KV: drafts of Medusa and of MLP speculators are those of their definitions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers import forward
from helpers.checkpoints import HIDDEN, VOCAB, as_pickle, random_weight, write_config, write_llama
from helpers.drafting import MAX_LEN, Bench, requests_of, require_all_accepted
from helpers.head_files import PLACEMENT
from helpers.packed import packed_in
from helpers.state_heads import (
    MEDUSA,
    MLP,
    medusa_chain,
    medusa_tensors,
    mlp_chain,
    mlp_tensors,
    write_circle,
    write_circle_head,
    write_medusa,
    write_mlp,
)
from sametoken.config import SpeculativeConfig
from sametoken.drafters.base import DrafterNeeds, LoadedDrafter
from sametoken.drafters.build import load_drafter, needs_of_drafter
from sametoken.drafters.state_head import StateDrafter
from sametoken.errors import CheckpointError, ConfigError, DrafterMismatchError, UnsupportedError
from sametoken.models.in_place import Replacement, tensors_of
from sametoken.models.load.huggingface import open_weights
from sametoken.ops.model.gemm.fp8 import Fp8Weight
from sametoken.ops.reference import ReferenceKernels

KERNELS = ReferenceKernels()
WRITE = {MLP: write_mlp, MEDUSA: write_medusa}
KINDS = tuple(WRITE)
#: Of the target's vocabulary, in no order.
MAP = torch.tensor([19, 2, 3, 7, 11, 0, 22, 5])
K = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return forward.load(write_llama(tmp_path_factory.mktemp("target")), KERNELS)


def loaded_of(kind: str, directory: Path, target, k: int = K, **options) -> LoadedDrafter:
    spec = SpeculativeConfig(kind, k, str(directory), **options)
    assert needs_of_drafter(spec, target.config, torch.float32) == DrafterNeeds()
    return load_drafter(spec, target, PLACEMENT)


def bench_of(loaded: LoadedDrafter, target, k: int = K, **options) -> Bench:
    bench = Bench(target, k, **options)
    bench.drafter = loaded.attach(None, bench.coupling)
    assert isinstance(bench.drafter, StateDrafter)
    return bench


def mlp_form(directory: Path, *, tied: bool = False, width: int = 12, **settings):
    tensors = mlp_tensors(tied=tied, width=width)
    stored = dict(tensors)
    if tied:
        # Some writers store copies.
        for copy, of in (("emb.2", "emb.0"), ("proj.2", "proj.1")):
            stored[f"speculator.{copy}.weight"] = tensors[f"speculator.{of}.weight"].clone()
    settings |= {"tie_weights": tied, "inner_dim": 0 if width == HIDDEN else width}
    write_mlp(directory, stored, **settings)
    settings["inner_dim"] = width
    return lambda state, token, k: mlp_chain(tensors, settings, state, token, k)


def medusa_form(
    directory: Path, rename=None, *, shared=None, copied=False, token_map=None, whole=False, **form
):
    """Heads, and their chains.

    ``shared`` is the one lm_head of all, ``copied`` into the file. With a ``token_map`` others have
    its rows there, or the ``whole`` vocabulary's.
    """
    tensors, settings = medusa_tensors(own=shared is None, **form), {}
    stored = dict(tensors)
    lm_heads = [tensors.get(f"lm_heads.{i}.weight", shared) for i in range(3)]
    if shared is not None:
        settings["original_lm_head"] = True
        stored |= {"lm_heads.0.weight": shared} if copied else {}
    if token_map is not None:
        settings["truncated_vocab_size"] = len(token_map)
        stored["token_map"] = token_map
        lm_heads = [one[token_map] for one in lm_heads]
        if shared is None and not whole:
            stored |= {f"lm_heads.{i}.weight": one for i, one in enumerate(lm_heads)}
    if rename is not None:
        stored = {rename(name): tensor for name, tensor in stored.items()}
    write_medusa(directory, stored, num_hidden_layers=form.get("layers", 1), **settings)
    return lambda state, token, k: medusa_chain(tensors, lm_heads, state, k, token_map)


def as_published(name: str) -> str:
    """A tensor's name in FasterDecoding's files of one block a head."""
    first, _, rest = name.partition(".")
    return (
        rest.replace(".layers.0.", ".0.linear.") if first == "blocks" else rest.replace(".", ".1.")
    )


def in_faster_decoding(directory: Path, target):
    chain = medusa_form(directory, as_published)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "a/b"}
    write_config(directory, config)
    return chain


ANOTHER = random_weight(torch.Generator().manual_seed(7), VOCAB, HIDDEN)
#: How each is written, with the chains that it makes.
FORMS = {
    "speculator": (MLP, lambda path, target: mlp_form(path)),
    "as wide as the target": (MLP, lambda path, target: mlp_form(path, width=HIDDEN)),
    "tied": (MLP, lambda path, target: mlp_form(path, tied=True, scale_input=True)),
    "heads": (MEDUSA, lambda path, target: medusa_form(path)),
    "prefixed": (MEDUSA, lambda path, target: medusa_form(path, "medusa_heads.{}".format)),
    "blocks": (MEDUSA, lambda path, target: medusa_form(path, layers=2, bias=False)),
    "FasterDecoding": (MEDUSA, in_faster_decoding),
    "one lm_head": (MEDUSA, lambda path, target: medusa_form(path, shared=ANOTHER, copied=True)),
    "the target's": (MEDUSA, lambda path, target: medusa_form(path, shared=target.head.matrix)),
    "mapped": (MEDUSA, lambda path, target: medusa_form(path, token_map=MAP)),
    "mapped, all rows": (MEDUSA, lambda path, target: medusa_form(path, token_map=MAP, whole=True)),
    "the target's, mapped": (
        MEDUSA,
        lambda path, target: medusa_form(path, shared=target.head.matrix, token_map=MAP),
    ),
}


@pytest.fixture(scope="module")
def state_after(target) -> Callable[..., torch.Tensor]:
    """Of tokens alone. Most forms draft after the same ones."""
    return cache(lambda *ids: forward.Bench(target, max_len=MAX_LEN).run(list(ids), 0).last[-1])


@pytest.mark.parametrize("form", list(FORMS))
def test_drafts_are_those_of_the_definition(tmp_path, target, state_after, form):
    """Through chunks, shared prefixes, rejected drafts and padding; and for fewer drafts too."""
    kind, write = FORMS[form]
    chain = write(tmp_path, target)
    seen = []
    for k, steps in ((K, "compact"), (2, "static"), (1, "kernels")):
        options = {"seed": k, "steps": steps, "num_wanted": (None, k - 1, None)}
        bench = bench_of(loaded_of(kind, tmp_path, target, k), target, k, **options)

        def check(context, drafts, bench=bench, k=k):
            for b, slot in requests_of(context):
                if context.samples[b]:
                    tokens, end = bench.tokens(slot), int(context.end[b])
                    assert int(drafts.num_drafts[b]) == context.num_wanted
                    seen.append(drafts.draft_ids[b, : context.num_wanted].tolist())
                    all_k = chain(state_after(*tokens[:end]), tokens[end], k)
                    assert seen[-1] == all_k[: context.num_wanted]

        bench.run(8, VOCAB, check)
    assert len({tuple(one) for one in seen}) > 5


def test_each_draft_is_chosen_with_the_noise_of_its_position(tmp_path, target, monkeypatch):
    medusa_form(tmp_path)
    bench = bench_of(loaded_of(MEDUSA, tmp_path, target), target, temperature=0.8)
    positions, choose, seen = [], bench.coupling.choose, 0

    def noted(logits, slots, chosen, token_ids):
        nonlocal seen
        seen += 1
        positions.append(chosen.tolist())
        return choose(logits, slots, chosen, token_ids)

    monkeypatch.setattr(bench.drafter, "_coupling", SimpleNamespace(choose=noted))

    def check(context, drafts):
        expected = [(context.num_tokens + index).tolist() for index in range(K)]
        assert positions == (expected if context.samples.any() else [])
        positions.clear()

    bench.run(6, VOCAB, check)
    assert seen > K


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", ["compact", "static"])
def test_heads_that_know_their_target_are_always_right(tmp_path, kind, steps):
    circle = forward.load(write_circle(tmp_path / "circle"), KERNELS)
    loaded = loaded_of(kind, write_circle_head(tmp_path / "head", kind), circle, 4)
    bench = bench_of(loaded, circle, 4, seed=3, spoil=0.0, steps=steps)
    require_all_accepted(bench, 30, VOCAB)
    assert bench.counts.cached


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_drafts_that_are_not_made_are_not_read(tmp_path, target, kind):
    path = WRITE[kind](tmp_path)
    sizes = [loaded_of(kind, path, target, k).weights_bytes for k in (1, 2, 3)]
    matrices = 2 * VOCAB * 12 + 12 * 12 if kind == MLP else VOCAB * HIDDEN + HIDDEN * (HIDDEN + 1)
    assert [b - a for a, b in itertools.pairwise(sizes)] == [4 * matrices] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_pickled_heads_of_the_usual_name_are_the_same(tmp_path, target, kind):
    path = WRITE[kind](tmp_path)
    expected = tensors_of(loaded_of(kind, path, target).model)
    pickle = as_pickle(path) / "pytorch_model.bin"
    ours = tensors_of(loaded_of(kind, path, target).model)
    assert all(torch.equal(*each) for each in zip(ours, expected, strict=True))
    pickle.rename(path / "medusa_lm_head.pt")
    with pytest.raises(UnsupportedError, match="Convert the weights to safetensors"):
        loaded_of(kind, path, target)


@pytest.mark.parametrize("kind", KINDS)
def test_projections_become_fp8_over_the_tokens_of_a_map(tmp_path, target, kind):
    (tmp_path / "map.json").write_text(json.dumps(MAP.tolist()))
    options = {"token_map": str(tmp_path / "map.json"), "quantization": "fp8"}
    loaded = loaded_of(kind, WRITE[kind](tmp_path), target, **options)
    rounded = {name for name, one in packed_in(loaded.model) if isinstance(one, Fp8Weight)}
    others = {name for name, one in packed_in(loaded.model)} - rounded
    assert rounded == {f"linears.{i}.0.weight" for i in range(K)} | {
        f"lm_heads.{i}" for i in range(K)
    }
    assert others == ({f"embeddings.{i}" for i in range(K)} if kind == MLP else set())
    bench, proposed = bench_of(loaded, target), set()
    bench.run(
        8, VOCAB, lambda context, drafts: proposed.update(drafts.draft_ids.flatten().tolist())
    )
    assert 1 < len(proposed - {0}) < len(proposed | set(MAP.tolist())) == len(MAP)


@pytest.mark.parametrize("form", ["tied", "heads", "the target's, mapped"])
def test_new_weights_take_the_place_of_the_old(tmp_path, target, form):
    kind, write = FORMS[form]
    write(tmp_path, target)
    loaded = loaded_of(kind, tmp_path, target)
    old = [one.clone() for one in tensors_of(loaded.model)]
    source = open_weights(tmp_path)
    names = [name for name in source.names() if name != "token_map"]
    doubled = {name: 2 * torch.cat(list(source.chunks(name))) for name in names}
    (tmp_path / "new").mkdir()
    WRITE[kind](tmp_path / "new", doubled)
    new = loaded.reload(open_weights(tmp_path / "new"), target, KERNELS)
    Replacement.of(loaded.model, new).write()
    # Of the others the target's lm_head and tokens stay, and a norm that has no weight.
    changed = [
        torch.equal(now, 2 * was) for now, was in zip(tensors_of(loaded.model), old, strict=True)
    ]
    assert changed.count(False) == {"tied": 1, "heads": 0, "the target's, mapped": 2}[form]
    if form == "the target's, mapped":
        made = loaded.shared_head.made_of(target, KERNELS)
        assert torch.equal(made.matrix, target.head.matrix[MAP.sort().values])


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_weights_need_no_files(tmp_path, target, kind):
    path = WRITE[kind](tmp_path)
    (path / "model.safetensors").unlink()
    spec = SpeculativeConfig(kind, K, str(path))
    loaded = load_drafter(spec, target, replace(PLACEMENT, load_format="dummy"))
    bench_of(loaded, target).run(3, VOCAB, lambda context, drafts: None)
    with pytest.raises(CheckpointError, match="no safetensors"):
        load_drafter(spec, target, PLACEMENT)


@pytest.mark.parametrize(
    ("kind", "settings", "error", "message"),
    [
        (MLP, {"n_predict": 2}, ConfigError, r"=3 is not possible.* drafts 2 tokens"),
        (MEDUSA, {"num_heads": 2}, ConfigError, r"=3 is not possible.* drafts 2 tokens"),
        (MLP, {"emb_dim": 32}, DrafterMismatchError, "32 hidden elements, the target has 16"),
        (MEDUSA, {"vocab_size": 99}, DrafterMismatchError, "99 tokens, the target has 23"),
        (MLP, {"n_predict": None}, CheckpointError, "n_predict=None"),
        (MEDUSA, {"num_heads": None}, CheckpointError, "medusa_num_heads=None"),
        (
            MLP,
            {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]},
            UnsupportedError,
            "ArcticMLP",
        ),
        (MEDUSA, {"logit_scale": 0.5}, UnsupportedError, "logit_scale"),
        (MEDUSA, {"quantization_config": {"quant_method": "gptq"}}, UnsupportedError, "quantized"),
        (MEDUSA, {"truncated_vocab_size": 24}, CheckpointError, "=24 is not at most 23"),
        (MEDUSA, {"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers=0"),
        (MEDUSA, {"num_heads": 0, "medusa_num_heads": 3}, CheckpointError, "num_heads=0"),
        (MEDUSA, {"original_lm_head": "false"}, CheckpointError, "'false' is not true or false"),
        (MEDUSA, {"medusa_fc_bias": 2}, CheckpointError, "medusa_fc_bias=2 is not true or false"),
        (MLP, {"inner_dim": -12}, CheckpointError, "inner_dim=-12"),
        (MLP, {"tie_weights": "x"}, CheckpointError, "tie_weights='x' is not true or false"),
        (MLP, {"scale_input": [True]}, CheckpointError, "scale_input"),
        (MLP, {"architectures": "x" * 99}, UnsupportedError, r"'x+\.{3}x+' is not"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    tmp_path, target, kind, settings, error, message
):
    spec = SpeculativeConfig(kind, K, str(WRITE[kind](tmp_path, **settings)))
    with pytest.raises(error, match=message):
        needs_of_drafter(spec, target.config, torch.float32)


def test_tensors_that_are_missing_unknown_or_no_tokens_are_refused(tmp_path, target):
    of = {MLP: mlp_tensors(), MEDUSA: medusa_tensors()}
    for kind, tensors, error, message in (
        (MLP, {"speculator.head.1.weight": None}, CheckpointError, r"lacks .* head\.1\.weight"),
        (MLP, {"speculator.ln0.weight": torch.ones(12)}, UnsupportedError, r"not use: ln0\.weight"),
        (MLP, {"speculator.proj.0.bias": torch.ones(12)}, UnsupportedError, r"use: proj\.0\.bias"),
        (MLP, {"ln.0.bias": torch.ones(12)}, CheckpointError, "ln.0.bias, which are one tensor"),
        (MEDUSA, {"0.1.linear.weight": torch.ones(2)}, UnsupportedError, r"use: blocks\.0\.layers"),
        (MEDUSA, {"lm_heads.1.weight": torch.tensor(1.0)}, CheckpointError, r"has shape \[\]"),
    ):
        stored = {n: t for n, t in (of[kind] | tensors).items() if t is not None}
        with pytest.raises(error, match=message):
            loaded_of(kind, WRITE[kind](tmp_path, stored), target)
    twice = MAP.clamp(max=19)
    for token_map, message in (
        (None, "found none"),
        (MAP + 20, "outside a vocabulary of 23"),
        (twice, "names a token twice"),
    ):
        stored = medusa_tensors() | ({} if token_map is None else {"token_map": token_map})
        path = write_medusa(tmp_path, stored, truncated_vocab_size=len(MAP))
        with pytest.raises(CheckpointError, match=message):
            loaded_of(MEDUSA, path, target)
