"""The law for bits on a GPU: logits of emitted tokens, out of graphs or not, drafts or not."""

from __future__ import annotations

import pytest
from gpu_files import OPTIONS, requests, speculation, write_files
from recorded_gpu import record, require_same_logits

MAX_TOKENS = 48
COUNT = 20


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def files(request, tmp_path_factory):
    return write_files(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def truth(files):
    """Every request alone in its batch, plainly, without graphs."""
    items = list(requests(COUNT, MAX_TOKENS))
    options = OPTIONS | {"max_num_seqs": 1, "enforce_eager": True}
    return record(items, model=str(files["target"]), **options)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize(
    "method", ["plain", "ngram", "self", "other", "eagle3", "suffix", "cascade"]
)
def test_logits_of_emitted_tokens_are_those_of_plain_decoding(files, truth, method, eager):
    items = list(requests(COUNT, MAX_TOKENS))
    found = record(
        items,
        model=str(files["target"]),
        speculative_config=speculation(files)[method],
        **OPTIONS | {"max_num_seqs": 7, "enforce_eager": eager},
    )
    require_same_logits(items, found, truth)
    assert (found.offered > 0) == (method != "plain")
