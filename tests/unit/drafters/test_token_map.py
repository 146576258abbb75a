"""Draft heads over some of the target's tokens: what they read, propose and refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import VOCAB
from helpers.drafting import Bench
from helpers.head_files import HeadFiles
from sametoken.drafters.build import require_drafter_fits, required_aux_layers
from sametoken.drafters.eagle import read_token_map
from sametoken.errors import ConfigError
from sametoken.models.loader import read_config
from sametoken.ops.model.gemm.fp8 import Fp8Weight

HEADS = ("eagle", "eagle3", "mtp")
SOME = [19, 2, 3, 7, 11, 0, 22, 5]


def with_map(folder: Path, method: str, token_ids=SOME, *, full_vocab=True) -> HeadFiles:
    """A head whose spec names ``map.json`` in the folder."""
    path = folder / "map.json"
    path.write_text(json.dumps(token_ids))
    files = HeadFiles(folder, method, full_vocab=full_vocab)
    files.spec = replace(files.spec, token_map=str(path))
    return files


@pytest.fixture(params=HEADS)
def method(request) -> str:
    return request.param


def proposed(bench: Bench) -> list[list[int]]:
    """Every draft that counts, step by step."""
    seen = []

    def remember(context, drafts) -> None:
        for ids, count in zip(drafts.draft_ids.tolist(), drafts.num_drafts.tolist(), strict=True):
            seen.append(ids[:count])

    bench.run(12, VOCAB, remember)
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
        require_drafter_fits(files.spec, read_config(files.path), max_model_len=40)


def test_a_head_with_a_map_of_its_own_takes_no_other(tmp_path):
    files = with_map(tmp_path, "eagle3", full_vocab=False)
    with pytest.raises(ConfigError, match="a map of its own") as caught:
        required_aux_layers(files.spec, read_config(files.path), files.path)
    assert caught.value.remedy == 'leave "token_map" out'
    with pytest.raises(ConfigError, match="a map of its own"):
        files.bench()
