"""GGUF models in several files, as gguf-split writes them."""

from __future__ import annotations

import pytest
import torch
from gguf import GGUFValueType

from helpers.forward import Bench, load
from helpers.gguf_files import rewritten, split, write_gguf
from sametoken.errors import CheckpointError
from sametoken.models.load.gguf_file import read_gguf
from sametoken.models.load.gguf_names import has_all_parts, models_of
from sametoken.models.loader import read_config
from sametoken.text.tokenizer_files import read_tokenizer

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
UINT16, INT32 = (GGUFValueType.UINT16,) * 2, (GGUFValueType.INT32,) * 2


@pytest.fixture
def whole(tmp_path):
    return write_gguf(tmp_path / "whole.gguf")


@pytest.fixture
def parts(tmp_path, whole):
    (tmp_path / "split").mkdir()
    return split(whole, tmp_path / "split" / "model.gguf", most=8)


@pytest.mark.parametrize("load_format", ["gguf", "gguf-packed"])
def test_a_split_model_is_the_whole_one(whole, parts, load_format):
    assert [path.name for path in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    models = [load(each, load_format=load_format) for each in (whole, parts[0], parts[0].parent)]
    wanted, *found = (Bench(model).logits(PROMPT, [3]) for model in models)
    assert all(torch.equal(each, wanted) for each in found)
    assert read_config(parts[0]) == read_config(whole)


def test_a_first_file_may_hold_no_tensor(tmp_path, whole):
    options = {"split_max_tensors": 8, "small_first_shard": True}
    rewritten(whole, tmp_path / "model.gguf", **options)
    first = tmp_path / "model-00001-of-00004.gguf"
    assert not read_gguf(first).tensors
    wanted, found = (Bench(load(each)).logits(PROMPT, []) for each in (whole, first))
    assert torch.equal(found, wanted)


def test_a_merged_file_has_all_parts(tmp_path, whole):
    """``llama-gguf-split --merge`` leaves a count of 0."""
    keys = {"split.count": (0, *UINT16), "split.tensors.count": (21, *INT32)}
    load(rewritten(whole, tmp_path / "model.gguf", keys))


def test_files_are_put_together_by_their_names():
    first, second = "a-00001-of-00002.gguf", "a-00002-of-00002.gguf"
    names = [second, "b.gguf", "q4/a-00001-of-00002.gguf", first, "a-1-of-2.gguf"]
    expected = [[first, second], ["a-1-of-2.gguf"], ["b.gguf"], ["q4/a-00001-of-00002.gguf"]]
    assert models_of(names) == expected
    assert [has_all_parts(files) for files in expected] == [True, True, True, False]
    assert not has_all_parts([second])


def test_a_later_file_names_the_first(parts):
    for read in (read_config, read_tokenizer):
        with pytest.raises(CheckpointError, match=r"later file .* Give .*-00001-of-00003\.gguf"):
            read(parts[1])


def test_a_missing_file_is_named(parts):
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"3 files, of which model-00003-of-00003\.gguf is"):
        load(parts[0])


def test_a_first_file_of_another_name_is_refused(tmp_path, parts):
    other = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"is not named so\. .*NAME-00001-of-00003\.gguf"):
        load(other)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("split.no", (2, *UINT16), r"-00002-.* has split\.no=2, where .* must have 1"),
        ("split.count", (4, *UINT16), r"has split\.count=4, where .* must have 3"),
        ("split.count", (None, *UINT16), r"has split\.count=None, where"),
        ("split.tensors.count", (7, *INT32), r"tensors\.count=7, where .* must have \d+"),
        ("general.architecture", ("qwen3", GGUFValueType.STRING), "'qwen3', where .* 'llama'"),
    ],
)
def test_a_file_of_another_model_is_refused(tmp_path, parts, key, value, message):
    rewritten(parts[1], tmp_path / "other.gguf", {key: value}).replace(parts[1])
    with pytest.raises(CheckpointError, match=message):
        load(parts[0])


def test_a_tensor_in_two_files_is_refused(tmp_path, parts):
    twice = next(iter(read_gguf(parts[0]).tensors))
    data = {twice: torch.zeros(3).numpy()}
    rewritten(parts[2], tmp_path / "other.gguf", tensors=data).replace(parts[2])
    with pytest.raises(CheckpointError, match=rf"tensor {twice}, which model-00001-of-00003\.gguf"):
        load(parts[0])


def test_a_tensor_that_is_nowhere_is_missed(tmp_path, parts):
    missing = next(iter(read_gguf(parts[1]).tensors))
    rewritten(parts[1], tmp_path / "other.gguf", tensors={missing: None}).replace(parts[1])
    with pytest.raises(CheckpointError, match=r"3 files .* have \d+ tensors, not split\.tensors"):
        load(parts[0])


def test_a_claim_of_many_files_is_refused(tmp_path, parts):
    rewritten(parts[0], tmp_path / "other.gguf", {"split.count": (60_000, *UINT16)})
    with pytest.raises(CheckpointError, match=r"split\.count=60000 is no number of up to 4096"):
        load(tmp_path / "other.gguf")
