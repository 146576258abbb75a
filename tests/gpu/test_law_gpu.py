"""The law end to end on a GPU: graphs or not, any drafter, any batch, the same tokens.

Random Llama- and Qwen3-shaped targets in bf16, through the engine as a user builds it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu_files import cut_requests, plain_requests, requests, speculation, write_files
from recorded_gpu import Recording, answer, windows_must_be_captured

MAX_TOKENS = 96


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def files(request, tmp_path_factory):
    return write_files(tmp_path_factory.mktemp(request.param), request.param)


def generate(
    files, method: str, count: int, make_requests=requests, **options
) -> tuple[dict[str, list[int]], Recording]:
    items, spec = make_requests(count, MAX_TOKENS), speculation(files)[method]
    ran = answer(files["target"], items, speculative_config=spec, **options)
    return ran.tokens, ran


@pytest.fixture(scope="module")
def truth(files):
    """Every request alone in its batch, plainly, without graphs."""
    tokens, _ = generate(files, "plain", 64, max_num_seqs=1, enforce_eager=True)
    return tokens


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("max_num_seqs", [1, 7, 64])
@pytest.mark.parametrize(
    "method",
    ["plain", "ngram", "self", "other", "eagle3", "medusa", "mlp", "suffix", "cascade"],
)
def test_the_same_tokens(files, truth, method, max_num_seqs, eager):
    count = 12 if max_num_seqs == 1 else 64
    tokens, ran = generate(files, method, count, max_num_seqs=max_num_seqs, enforce_eager=eager)
    assert tokens == {name: truth[name] for name in tokens}
    if method == "self":
        plain = plain_requests(count, MAX_TOKENS)
        assert plain
        assert ran.accepted > 0.9 * ran.offered
    elif method != "plain":
        assert ran.offered > 0


@pytest.fixture(scope="module")
def cut_truth(files):
    """Requests with cuts, each alone in its batch, plainly, without graphs."""
    tokens, _ = generate(files, "plain", 14, cut_requests, max_num_seqs=1, enforce_eager=True)
    return tokens


def test_cuts_decide_tokens(files, cut_truth):
    """Or the tests of them below would show nothing."""

    def uncut(count, max_tokens):
        for item in cut_requests(count, max_tokens):
            params = replace(item.params, top_k=0, top_p=1.0, min_p=0.0)
            yield replace(item, params=params)

    tokens, _ = generate(files, "plain", 14, uncut, max_num_seqs=7, enforce_eager=True)
    # Greedy requests and those without a cut are 4 of the 14.
    assert 4 <= sum(tokens[name] == cut_truth[name] for name in cut_truth) < 8


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 14])
@pytest.mark.parametrize("method", ["plain", "ngram", "other", "eagle3"])
def test_the_same_tokens_under_cuts(files, cut_truth, method, max_num_seqs, eager, monkeypatch):
    """In graph mode no step of windows alone may run without a graph."""
    if not eager:
        windows_must_be_captured(monkeypatch)
    count = 7 if max_num_seqs == 1 else 14
    tokens, ran = generate(
        files, method, count, cut_requests, max_num_seqs=max_num_seqs, enforce_eager=eager
    )
    assert tokens == {name: cut_truth[name] for name in tokens}
    assert (ran.offered > 0) == (method != "plain")
    assert method != "ngram" or ran.accepted > 0


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_drafter_that_is_the_target_is_always_right(files, eager):
    """Requests without processing: graph and eager mode both accept every draft."""
    _, ran = generate(files, "self", 24, plain_requests, max_num_seqs=8, enforce_eager=eager)
    assert ran.accepted == ran.offered > 0
