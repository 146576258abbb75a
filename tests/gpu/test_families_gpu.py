"""The law on a GPU for every family: the same tokens alone, together, with drafts.

Graphs run; alone there are none. Random models in bf16, of sizes that kernels of a GPU take.
"""

from __future__ import annotations

import pytest
from gpu_files import requests, write_small_family
from recorded_gpu import answer

from helpers.families import FAMILIES

MAX_TOKENS = 48
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 3}


def generate(path, count: int, **options):
    return answer(path, requests(count, MAX_TOKENS), **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_tokens(tmp_path, name):
    path = write_small_family(tmp_path, name)
    truth = generate(path, 12, max_num_seqs=1, enforce_eager=True).tokens
    assert generate(path, 12, max_num_seqs=12).tokens == truth
    itself = DRAFTS | {"model": str(path)}
    drafted = generate(path, 12, max_num_seqs=7, speculative_config=itself)
    assert drafted.tokens == truth
    assert drafted.accepted > drafted.offered / 2 > 0
