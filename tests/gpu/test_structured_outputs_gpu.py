"""Grammars on a GPU: masks are made beside the graphs, and the tokens stay the same."""

from __future__ import annotations

import pytest
from gpu_files import OPTIONS, SIZES, speculation, write_files

from helpers.harness import Ran, request
from helpers.structured import VOCAB, structured_request, text_of
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.types.structured_outputs import StructuredOutputs

FORMS = (
    StructuredOutputs(regex="(ab|cd){2,9}-[0-9]{1,5}"),
    StructuredOutputs(choice=("yes", "no", "perhaps")),
    StructuredOutputs(regex="[a-z ]{20,40}"),
)
MAX_TOKENS = 60


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "vocab_size", VOCAB)
        return write_files(tmp_path_factory.mktemp("grammar"), "LlamaForCausalLM")


def asked():
    """Every third request is free text."""
    for i in range(18):
        prompt = tuple((7 * i + 11 * j) % 250 + 2 for j in range(1 + 9 * i))
        params = {"seed": i, "max_tokens": MAX_TOKENS, "temperature": 0.8 * (i % 2)}
        if i % 3 == 2:
            yield request(f"r{i}", prompt, **params)
        else:
            yield structured_request(f"r{i}", prompt, FORMS[i % len(FORMS)], **params)


def generate(files, method: str, **options) -> Ran:
    config = EngineConfig.from_options(
        model=str(files["target"]),
        speculative_config=speculation(files)[method],
        **OPTIONS | options,
    )
    core, ran = build_engine(config), Ran()
    for item in asked():
        core.add_request(item)
        ran.tokens[item.request_id] = []
    while core.has_unfinished:
        for update in core.step():
            assert not update.failed
            ran.accepted += update.num_accepted
            out = ran.tokens[update.request_id]
            out.extend(update.token_ids)
            if len(out) >= MAX_TOKENS:
                del out[MAX_TOKENS:]
                core.release(update.request_id)
    return ran


@pytest.fixture(scope="module")
def truth(files):
    tokens = generate(files, "plain", max_num_seqs=1, enforce_eager=True).tokens
    words = [text_of(tokens[f"r{i}"]) for i in range(18) if i % 3 == 1]
    assert set(words) <= {"yes", "no", "perhaps"}
    return tokens


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("method", ["plain", "ngram", "self", "eagle3"])
def test_the_same_tokens(files, truth, method, eager):
    ran = generate(files, method, max_num_seqs=8, enforce_eager=eager)
    assert ran.tokens == truth
    assert (ran.accepted > 0) == (method != "plain")
