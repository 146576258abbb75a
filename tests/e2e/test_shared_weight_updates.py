"""New weights for a model that two processes share: both take theirs, or neither does."""

from __future__ import annotations

import _thread
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import (
    eagle1_tensors,
    head_tensors,
    write_eagle1,
    write_llama,
    write_safeailab,
)
from helpers.families import write_family
from helpers.harness import request
from helpers.two_ranks import MAX_TOKENS, VOCAB, answer, config_of, drive, requests
from helpers.updates import tensors_of
from sametoken import LLM
from sametoken.distributed.ranks import LeadingRank
from sametoken.engine.build import build_engine
from sametoken.engine.shared_weights import LeadingWeights, LoadShare, UseShare
from sametoken.errors import WeightUpdateError
from sametoken.models import in_place

SIZES = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
}
UP = "model.layers.2.mlp.up_proj.weight"
ROWS = SIZES["intermediate_size"]


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Two checkpoints of one form."""
    folder = tmp_path_factory.mktemp("targets")
    return [write_llama(folder / str(seed), seed, **SIZES) for seed in (0, 1)]


@pytest.fixture(scope="module")
def truths(targets):
    """What engines of two ranks that were built with them say, plainly, to the bit."""
    return [answer(path) for path in targets]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Two heads; neither has an lm_head."""
    folder, paths = tmp_path_factory.mktemp("heads"), []
    for seed in (0, 1):
        tensors = head_tensors(seed, full_vocab=True, **SIZES)
        del tensors["lm_head.weight"]
        path = write_safeailab(folder / str(seed), tensors, **SIZES | {"num_hidden_layers": 1})
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def live(targets, head):
    spec = {"method": "eagle3", "model": str(head[0]), "num_speculative_tokens": 2}
    core = build_engine(config_of(targets[0], spec, steps_in_flight=2))
    yield LLM.from_engine(core, None)
    # Also where a failed test's traceback holds it.
    core.peers.stop()


def spoilt(path, row: int) -> dict:
    tensors = tensors_of(path)
    tensors[UP][row, 0] = torch.nan
    return tensors


def test_every_rank_takes_its_share(live, targets, truths, head):
    assert drive(live._engine) == truths[0] != truths[1]
    assert live.update_weights(tensors_of(targets[1]).items()) == 1
    after = drive(live._engine)
    assert after == truths[1]
    assert after.offered > 0
    # From files, and a version that does not follow: what the ranks have loaded is dropped.
    with pytest.raises(WeightUpdateError, match="does not follow"):
        live.update_weights(targets[0], version=1)
    assert drive(live._engine) == truths[1]
    assert live.update_weights(targets[0], version=7) == 7
    assert drive(live._engine) == truths[0]
    # No token depends on a drafter's.
    own = live._engine.weights.own.drafter.model
    before = [one.clone() for one in in_place.tensors_of(own)]
    assert live.update_weights(tensors_of(head[1]).items(), target="drafter") == 7
    assert not all(map(torch.equal, before, in_place.tensors_of(own)))
    assert drive(live._engine) == truths[0]


@pytest.mark.parametrize("row", [0, ROWS - 1], ids=["rank 0", "rank 1"])
def test_what_one_rank_refuses_no_rank_takes(live, targets, truths, row):
    version = live.weight_version
    with pytest.raises(WeightUpdateError, match=r"up_proj\.weight of the update holds NaN"):
        live.update_weights(spoilt(targets[1], row).items())
    part = {name: one for name, one in tensors_of(targets[1]).items() if name != UP}
    with pytest.raises(WeightUpdateError, match=UP.replace(".", r"\.")):
        live.update_weights(part.items())
    sparse = tensors_of(targets[1])
    sparse[UP] = sparse[UP].to_sparse()
    with pytest.raises(WeightUpdateError, match="sparse_coo"):
        live.update_weights(sparse.items())
    assert live.weight_version == version
    assert drive(live._engine) == truths[0]


def test_an_interrupted_update_leaves_nothing_to_the_next_one(live, targets, truths, monkeypatch):
    """Ctrl-C, while rank 0 waits for what the others have loaded."""

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LeadingRank, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            live.update_weights(targets[0])
    with pytest.raises(WeightUpdateError, match=r"up_proj\.weight of the update holds NaN"):
        live.update_weights(spoilt(targets[1], ROWS - 1).items())
    live.update_weights(targets[1])
    assert drive(live._engine) == truths[1]
    live.update_weights(targets[0])
    assert drive(live._engine) == truths[0]


def test_an_update_that_is_interrupted_while_it_waits_is_dropped_by_all(
    live, targets, truths, monkeypatch
):
    """Ctrl-C, while another thread runs a step: no rank keeps a second copy of the weights."""
    told, load, tell = [], LeadingWeights.load, LeadingRank.tell
    busy, enough = threading.Event(), threading.Event()

    def occupy():
        with live._requests._exclusive.held(lambda: None):
            busy.set()
            enough.wait(60)

    def loaded(self, source, target):
        new = load(self, source, target)
        threading.Timer(0.2, _thread.interrupt_main).start()
        return new

    def note(self, message):
        told.append(message)
        tell(self, message)

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
        pool.submit(occupy)
        assert busy.wait(60)
        patched.setattr(LeadingWeights, "load", loaded)
        patched.setattr(LeadingRank, "tell", note)
        with pytest.raises(KeyboardInterrupt):
            live.update_weights(targets[1])
        enough.set()
    assert [type(message) for message in told] == [LoadShare, UseShare]
    assert told[-1] == UseShare(write=False)
    assert drive(live._engine) == truths[0]


def test_requests_in_flight_go_on(live, targets, truths):
    core = live._engine
    items = list(requests())
    for item in items:
        core.add_request(item)
    before = [core.step() for _ in range(3)]
    live.update_weights(tensors_of(targets[1]).items())
    told = {item.request_id: 0 for item in items}
    for updates in before:
        for update in updates:
            told[update.request_id] += len(update.token_ids)
    while core.has_unfinished:
        for update in core.step():
            told[update.request_id] += len(update.token_ids)
            if told[update.request_id] >= 14:
                core.release(update.request_id)
    assert min(told.values()) >= 14
    assert drive(core) == truths[1]
    live.update_weights(targets[0])
    assert drive(core) == truths[0]


def no_more_than_embeddings(tensors: dict) -> dict:
    """Layers that add nothing."""
    idle = ("o_proj.weight", "down_proj.weight")
    return {
        name: torch.zeros_like(one) if name.endswith(idle) else one for name, one in tensors.items()
    }


def write_foreseen(folder) -> tuple:
    """A target whose state is its token's embedding, another with a new lm_head, and a head that
    knows that state, so that all its greedy drafts are right with the target's lm_head."""
    old = write_llama(folder / "old", **SIZES)
    new = write_llama(folder / "new", **SIZES)
    tensors = no_more_than_embeddings(tensors_of(old))
    tensors["model.norm.weight"] = torch.ones_like(tensors["model.norm.weight"])
    save_file(tensors, old / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["lm_head.weight"].roll(7, 0)},
        new / "model.safetensors",
    )
    one = SIZES | {"num_hidden_layers": 1}
    own = no_more_than_embeddings(eagle1_tensors(**one))
    width = len(own["fc.weight"])
    own["fc.weight"] = torch.cat((torch.eye(width), torch.zeros(width, width)), 1)
    return old, new, write_eagle1(folder / "head", own, **one)


@pytest.fixture
def build():
    """Builds engines whose ranks end with the test, also where an error's traceback holds them."""
    cores = []

    def built(config):
        cores.append(build_engine(config))
        return LLM.from_engine(cores[-1], None)

    yield built
    for core in cores:
        if isinstance(core.peers, LeadingRank):
            core.peers.stop()


@pytest.mark.parametrize(("size", "mapped"), [(2, False), (2, True), (1, True)])
def test_a_shared_lm_head_follows_the_target(tmp_path, build, size, mapped):
    """A rank's rows, and copies cut to a token map: acceptance stays perfect."""
    old, new, head = write_foreseen(tmp_path)
    spec = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
    if mapped:
        (tmp_path / "map.json").write_text(json.dumps(list(range(VOCAB))))
        spec["token_map"] = str(tmp_path / "map.json")
    items = [request(f"g{i}", [i, 3, 5 * i], MAX_TOKENS) for i in range(4)]
    live = build(config_of(old, spec, tensor_parallel_size=size))
    before = drive(live._engine, items)
    assert before.accepted == before.offered > 0
    live.update_weights(tensors_of(new).items())
    after = drive(live._engine, items)
    assert after != before
    assert after.accepted == after.offered > 0
    # The head's own update takes the lm_head of the target in use.
    live.update_weights(tensors_of(head).items(), target="drafter")
    again = drive(live._engine, items)
    assert again == after
    assert again.accepted == again.offered > 0
    # A head with an lm_head of its own is another kind of head.
    own = tensors_of(head) | {"lm_head.weight": tensors_of(old)["lm_head.weight"]}
    with pytest.raises(WeightUpdateError, match="lm_head"):
        live.update_weights(own.items(), target="drafter")
    assert drive(live._engine, items) == after


def test_buffers_that_are_not_sent_stay_on_every_rank(tmp_path, build):
    old, new = (write_family(tmp_path / str(seed), "glm4_moe", seed) for seed in (0, 1))
    live, built = build(config_of(old, None)), build(config_of(new, None))
    buffers = {name: one for name, one in tensors_of(old).items() if name.endswith("_bias")}
    sent = {name: one for name, one in tensors_of(new).items() if name not in buffers}
    items = [request("g", [1, 3, 5], MAX_TOKENS)]
    built.update_weights((sent | buffers).items())
    before = drive(live._engine, items)
    live.update_weights(sent.items())
    assert drive(live._engine, items) == drive(built._engine, items) != before


def test_a_draft_model_that_becomes_its_target_is_always_right(build, targets):
    """Of every rank's part, also after hits of the prefix cache."""
    items = [one for one in requests() if one.params.top_p == 1]
    spec = {"method": "draft_model", "model": str(targets[1]), "num_speculative_tokens": 2}
    live = build(config_of(targets[0], spec | {"draft_limits": "fixed"}))
    before = drive(live._engine, items)
    live.update_weights(tensors_of(targets[0]).items(), target="drafter")
    after = drive(live._engine, items)
    assert before.accepted < before.offered
    assert after == before
    assert after.accepted == after.offered > 0
