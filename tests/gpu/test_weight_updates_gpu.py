"""Weights that change under captured graphs: an engine says what one of the new weights says."""

from __future__ import annotations

import gc

import pytest
import torch
from gpu_files import (
    HYBRID_SIZES,
    OPTIONS,
    SIZES,
    for_llm,
    plain_requests,
    write_hybrid_target,
    write_target,
)
from recorded_gpu import windows_must_be_captured

from helpers.checkpoints import head_tensors, write_safeailab
from helpers.hybrids import hybrid_config
from helpers.updates import same_weights, tensors_of
from sametoken import LLM
from sametoken.errors import WeightUpdateError
from sametoken.models.quantize import SCHEMES, quantize_checkpoint
from sametoken.runner.graphs import StepGraphs

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
DEVICES = ("auto", "cpu")
MAX_TOKENS = 24
#: Of requests that all run at once: none ends before the last has begun.
LONG = 64


def engine(path, spec: dict | None = NGRAM, **options) -> LLM:
    given = OPTIONS | {"max_num_seqs": 8, "skip_tokenizer_init": True} | options
    return LLM(str(path), speculative_config=spec, **given)


def items(count: int, max_tokens: int = MAX_TOKENS):
    """Greedy and sampled requests whose logits need no processing."""
    return plain_requests(4 * count, max_tokens)[:count]


def said(llm: LLM, count: int = 12) -> list:
    """Token ids and log-probabilities, to the bit."""
    outputs = llm.generate(*for_llm(items(count), logprobs=2))
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


def drive(core, asked, tokens: dict, until: int = LONG) -> None:
    """Step until the requests have ``until`` tokens each, and end those that have ``LONG``."""
    while any(len(tokens[item.request_id]) < until for item in asked) and core.has_unfinished:
        for update in core.step():
            known = tokens[update.request_id]
            known.extend(update.token_ids)
            if len(known) >= LONG:
                del known[LONG:]
                core.release(update.request_id)


def tensors_on(path, device: str) -> dict[str, torch.Tensor]:
    where = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu"
    return {name: tensor.to(where) for name, tensor in tensors_of(path).items()}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    return [write_target(folder / str(seed), "Qwen3ForCausalLM", seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def answers(targets):
    """What engines that were built with them say, each with its eager twin."""
    found = [said(engine(path, None)) for path in targets]
    assert found[1] == said(engine(targets[1], None, enforce_eager=True))
    assert found[0] != found[1]
    return found


@pytest.fixture
def no_capture(monkeypatch):
    """Once it is called, no step is captured, and none of windows alone runs without a graph."""

    def begin() -> None:
        def refuse(self):
            raise AssertionError("an update captured graphs again")

        monkeypatch.setattr(StepGraphs, "capture_all", refuse)
        windows_must_be_captured(monkeypatch)

    return begin


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", [None, NGRAM], ids=["plain", "ngram"])
def test_captured_graphs_read_the_new_weights(targets, answers, spec, device, no_capture):
    live = engine(targets[0], spec)
    no_capture()
    for version, at in enumerate((1, 0, 1), start=1):
        assert live.update_weights(tensors_on(targets[at], device).items()) == version
        assert said(live) == answers[at]
    if spec is not None:
        assert live.speculation_metrics.num_accepted_tokens > 0


def test_sixty_four_requests_in_flight(targets, no_capture):
    """Those before are the old weights', those after the new ones', those in between a mixture."""
    asked = items(64, LONG)
    truths = []
    for path in targets:
        core, tokens = engine(path, max_num_seqs=64)._engine, {i.request_id: [] for i in asked}
        for item in asked:
            core.add_request(item)
        drive(core, asked, tokens)
        truths.append(tokens)
    live = engine(targets[0], max_num_seqs=64)
    no_capture()
    core, tokens = live._engine, {item.request_id: [] for item in asked}
    for item in asked:
        core.add_request(item)
    drive(core, asked, tokens, until=1)
    assert core.scheduler.num_running == 64
    assert live.update_weights(tensors_on(targets[1], "auto").items()) == 1
    # What steps in flight had emitted when the update came is in ``step``'s next answer.
    before = {name: len(known) for name, known in tokens.items()}
    drive(core, asked, tokens)
    assert all(len(known) == LONG for known in tokens.values())
    for name, known in tokens.items():
        assert known[: before[name]] == truths[0][name][: before[name]]
    assert tokens != truths[0]
    assert tokens != truths[1]
    again = {item.request_id: [] for item in asked}
    for item in asked:
        core.add_request(item)
    drive(core, asked, again)
    assert again == truths[1]
    core.scheduler.check_integrity()


def test_a_drafters_weights_change_alone(targets, answers, tmp_path, no_capture):
    paths = [
        write_safeailab(
            tmp_path / str(seed), head_tensors(seed, **SIZES), **SIZES | {"num_hidden_layers": 1}
        )
        for seed in (0, 1)
    ]
    spec = {"method": "eagle3", "num_speculative_tokens": 3}
    live, built = (engine(targets[0], spec | {"model": str(path)}) for path in paths)
    assert not same_weights(live, built)
    no_capture()
    assert live.update_weights(tensors_on(paths[1], "auto").items(), target="drafter") == 0
    assert same_weights(live, built)
    assert said(live) == said(built) == answers[0]
    mine, theirs = (llm.speculation_metrics.num_accepted_tokens for llm in (live, built))
    assert mine == theirs
    assert live.update_weights(tensors_on(targets[1], "cpu").items()) == 1
    assert said(live) == answers[1]


def test_a_hybrids_module_comes_with_it(tmp_path, no_capture):
    config = hybrid_config("qwen3_5", **HYBRID_SIZES)
    old, new = (write_hybrid_target(tmp_path / str(seed), config, seed) for seed in (0, 1))
    built, live = engine(new, MTP), engine(old, MTP)
    wanted, before = said(built), said(live)
    no_capture()
    live.update_weights(tensors_on(new, "auto").items())
    assert same_weights(live, built)
    assert said(live) == wanted != before


@pytest.mark.parametrize("scheme", SCHEMES)
def test_floats_become_what_a_quantized_copy_has(scheme, targets, tmp_path, no_capture):
    copies = [tmp_path / str(seed) for seed in (0, 1)]
    for path, copy in zip(targets, copies, strict=True):
        quantize_checkpoint(path, copy, scheme)
    built, live = engine(copies[1]), engine(copies[0])
    wanted, before = said(built), said(live)
    no_capture()
    for version, device in enumerate(DEVICES, start=1):
        sent = tensors_on(targets[1], device)
        assert live.update_weights(sent.items()) == 2 * version - 1
        assert same_weights(live, built)
        assert said(live) == wanted != before
        live.update_weights(tensors_of(copies[0]).items())
        assert said(live) == before


UP = "model.layers.2.mlp.up_proj.weight"


def spoilt(tensors: dict) -> dict:
    values = tensors[UP].clone()
    values.view(-1)[-1] = float("nan")
    return tensors | {UP: values}


BAD = {
    "missing": lambda good: {name: one for name, one in good.items() if name != UP},
    "shape": lambda good: good | {UP: good[UP][:-1]},
    "NaN": spoilt,
}


def test_a_refused_update_leaves_the_old_answers(targets, answers, no_capture):
    live, good = engine(targets[0]), tensors_on(targets[1], "auto")
    no_capture()
    for fault in BAD.values():
        with pytest.raises(WeightUpdateError, match=UP.replace(".", r"\.")):
            live.update_weights(fault(good).items())

    def breaks_off():
        yield from list(good.items())[:9]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError):
        live.update_weights(breaks_off())
    assert live.weight_version == 0
    assert said(live) == answers[0]


def test_two_hundred_updates_leave_memory_flat(targets, answers, no_capture):
    live = engine(targets[0])
    no_capture()
    sets = [tensors_on(path, "auto") for path in targets]

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    live.update_weights(sets[1].items())
    before = held()
    for number in range(200):
        live.update_weights(sets[number % 2].items())
    assert held() == before
    assert live.weight_version == 201
    assert said(live) == answers[1]
