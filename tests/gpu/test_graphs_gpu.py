"""Captured steps: no wait for the device, no stale layout, acceptance as in eager mode."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from gpu_files import OPTIONS, cut_requests, plain_requests, speculation, write_files
from recorded_gpu import windows_must_be_captured

from helpers.harness import requests_of
from sametoken.config import EngineConfig
from sametoken.engine.build import build_engine
from sametoken.engine.build_gpu import MOST_ROWS
from sametoken.errors import EngineDeadError, InvariantError, StaleInputsError
from sametoken.runner.async_output import PendingOutput
from sametoken.runner.graphs import LayoutRing, StepGraphs

MAX_TOKENS = 64


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


def build(files, method: str, **options):
    spec = speculation(files)[method]
    return build_engine(
        EngineConfig.from_options(
            model=str(files["target"]),
            # Adaptive limits follow the captured shapes.
            speculative_config=spec and spec | {"draft_limits": "fixed"},
            **OPTIONS | {"max_num_seqs": 8} | options,
        )
    )


def drive(core, items, guard=lambda step: step()):
    """Tokens by request, and (offered, accepted) by window position."""
    tokens = {item.request_id: [] for item in items}
    positions = [[0, 0] for _ in range(8)]
    for item in items:
        core.add_request(item)
    while core.has_unfinished:
        for update in guard(core.step):
            for place in range(update.num_drafts):
                positions[place][0] += 1
                positions[place][1] += place < update.num_accepted
            tokens[update.request_id].extend(update.token_ids)
            if len(tokens[update.request_id]) >= MAX_TOKENS:
                core.release(update.request_id)
    return tokens, positions


REQUESTS = {"plain": plain_requests, "cut": cut_requests}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("method", ["plain", "ngram", "other", "eagle3", "medusa", "mlp"])
def test_no_step_waits_for_the_device(files, method, kind):
    """Torch raises on any implicit synchronisation; only reading a landed result may wait."""
    core = build(files, method)
    items = [*REQUESTS[kind](12, MAX_TOKENS)]

    def guarded(step):
        try:
            torch.cuda.set_sync_debug_mode("error")
            return step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    tokens, _ = drive(core, items, guarded)
    assert all(len(out) >= MAX_TOKENS for out in tokens.values())


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("method", ["ngram", "self", "other", "eagle3", "medusa", "mlp"])
def test_acceptance_by_position_is_that_of_eager_mode(files, method, kind):
    items = [*REQUESTS[kind](16, MAX_TOKENS)]
    core = build(files, method)
    with pytest.MonkeyPatch.context() as patch:
        windows_must_be_captured(patch)
        graph_tokens, graph = drive(core, items)
    eager_tokens, eager = drive(build(files, method, enforce_eager=True), items)
    assert graph_tokens == eager_tokens
    assert graph == eager
    offered = sum(place[0] for place in graph)
    assert offered > 0
    if method == "self" and kind == "plain":
        assert sum(place[1] for place in graph) == offered


@pytest.mark.parametrize("method", ["plain", "ngram", "eagle3"])
def test_crowds_of_prompts_replay_large_graphs(files, method, monkeypatch):
    """Small models' steps of thousands of rows and many prompts are captured, with equal tokens."""
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "prefill_chunk_size": 4096}
    draw = random.Random(0)
    prompts = [draw.choices(range(1500), k=draw.randint(2, 500)) for _ in range(64)]
    items = requests_of(prompts, MAX_TOKENS, 0.0, 0.8)
    shapes, replay = [], StepGraphs._replay

    def noted(self, shape, layout, *rest):
        shapes.append(layout.shape)
        replay(self, shape, layout, *rest)

    monkeypatch.setattr(StepGraphs, "_replay", noted)
    captured = drive(build(files, method, **options), items)
    crowds = [one for one in shapes if one.num_chunks > 4 and one.num_rows > MOST_ROWS]
    assert len(crowds) > 1
    assert captured == drive(build(files, method, enforce_eager=True, **options), items)


def test_a_replay_of_another_steps_layout_is_refused(files, monkeypatch):
    """The class of vllm#38311: metadata of an earlier step inside the graph."""
    replay, first = StepGraphs._replay, {}

    def stale(self, shape, layout, *rest):
        known = first.setdefault((shape, layout.shape.num_windows, len(layout.slots)), layout)
        replay(self, shape, known, *rest)

    core = build(files, "other")
    monkeypatch.setattr(StepGraphs, "_replay", stale)
    with pytest.raises(EngineDeadError) as dead:
        drive(core, plain_requests(4, MAX_TOKENS))
    assert isinstance(dead.value.__cause__, StaleInputsError)


def test_a_replay_without_a_layout_is_refused(files, monkeypatch):
    core = build(files, "other")
    monkeypatch.setattr(LayoutRing, "write", lambda self, table: None)
    with pytest.raises(EngineDeadError) as dead:
        drive(core, plain_requests(4, MAX_TOKENS))
    assert isinstance(dead.value.__cause__, StaleInputsError | InvariantError)


def test_an_engine_starts_while_an_earlier_one_is_garbage(files, monkeypatch):
    """A search for garbage within a capture would free its graphs, which ends the capture."""
    forward = StepGraphs._forward

    def searching(self, layout):
        output = forward(self, layout)
        if gc.isenabled():
            gc.collect()
        return output

    earlier = [build(files, "other")]
    drive(earlier[0], plain_requests(2, MAX_TOKENS))
    earlier.append(earlier)
    del earlier
    monkeypatch.setattr(StepGraphs, "_forward", searching)
    tokens, _ = drive(build(files, "other"), plain_requests(2, MAX_TOKENS))
    assert all(len(out) >= MAX_TOKENS for out in tokens.values())


def test_a_copy_read_in_flight_is_refused(files, monkeypatch):
    """The class of vllm#38556: the host reads before the copy has landed."""
    run = StepGraphs.run

    def late(self, *step):
        # Half a second, in which the host comes to read.
        torch.cuda._sleep(1_000_000_000)
        run(self, *step)

    def at_once(self):
        result = self.buffer.read(self.plan)
        self.ring.release(self.buffer)
        return result

    core = build(files, "other")
    monkeypatch.setattr(StepGraphs, "run", late)
    monkeypatch.setattr(PendingOutput, "wait", at_once)
    with pytest.raises(EngineDeadError, match="in flight"):
        drive(core, plain_requests(4, MAX_TOKENS))
