"""An EAGLE-3 head: its unrolled network against the engine's head, and its training."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from helpers import training
from helpers.checkpoints import HIDDEN, LLAMA, VOCAB, write_llama
from helpers.forward import kept_at
from helpers.heads import OPTIONS, SharedTarget, empty_kv, rows_of_one_slot
from helpers.training import (
    ANSWER_LEN,
    GREEDY,
    NUM_PROMPTS,
    PROMPT_LEN,
    SIZES,
    open_llm,
    prompts_of,
)
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.layers.rotary import rotary_table
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.models.loader import read_config
from sametoken.train import distillation, eagle3
from sametoken.train import target as frozen
from sametoken.train.distillation import TrainingText
from sametoken.train.eagle3 import Eagle3Network, train_eagle3
from sametoken.train.loop import CHECKPOINT
from sametoken.train.options import Eagle3Options
from sametoken.train.results import HeadLayout, write_head
from sametoken.train.target import open_target
from sametoken.train.token_map import membership, offsets_of

DRAFT_IDS = torch.tensor([0, 2, 3, 7, 11, 12, 20])
UNROLLED = 4
K = 3
HEAD = Eagle3Options(ttt_steps=K, draft_vocab_size=40)
LOOP = replace(training.LOOP, steps=6)


def random_network(config, *, norm_before_residual: bool) -> Eagle3Network:
    rotary = rotary_table(
        config.rope, head_dim=config.head_dim, max_positions=32, device=torch.device("cpu")
    )
    network = Eagle3Network(
        config,
        draft_vocab_size=len(DRAFT_IDS),
        num_aux=3,
        norm_before_residual=norm_before_residual,
        rotary=rotary,
    )
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scaled = noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.1 * noise
            parameter.copy_(scaled)
        network.state_scale.copy_(torch.rand(3 * HIDDEN, generator=generator) + 0.5)
    return network


def write_network(directory, network: Eagle3Network, config, *, norm_before_residual: bool):
    tensors = network.export_tensors(torch.float32)
    tensors |= {"d2t": offsets_of(DRAFT_IDS), "t2d": membership(DRAFT_IDS, VOCAB)}
    layout = HeadLayout(
        layer=config,
        draft_vocab_size=len(DRAFT_IDS),
        aux_layers=(1, 2, 4),
        norm_before_residual=norm_before_residual,
        verifier="target",
    )
    write_head(directory, layout, tensors)
    return Eagle3Checkpoint(directory)


@pytest.fixture(params=[True, False], ids=["residual-normed", "residual-raw"])
def both(request, tmp_path):
    """A network, and the engine's head loaded from what it wrote."""
    config = read_config(write_llama(tmp_path / "target"))
    network = random_network(config, norm_before_residual=request.param)
    checkpoint = write_network(
        tmp_path / "head", network, config, norm_before_residual=request.param
    )
    target = SharedTarget()
    return network, checkpoint.load(target, **OPTIONS), target


def test_every_step_is_that_of_an_engine_s_chain(both):
    """To the text's own tokens; at every row, over the KV that drafting would find there."""
    network, head, target = both
    generator = torch.Generator().manual_seed(7)
    token_ids = torch.randint(VOCAB, (1, 11), generator=generator)
    auxiliary = torch.randn(1, 11, 3 * HIDDEN, generator=generator)
    with torch.no_grad():
        unrolled = network.unroll(target.embedding_matrix, token_ids, auxiliary, UNROLLED)
        logits = [network.lm_head(last)[0] for last in unrolled]
    combined = head.combine(auxiliary[0])
    for row in range(11 - UNROLLED):
        kv = empty_kv(head)
        rows = rows_of_one_slot(0, row + 1)
        last = kept_at(rows, [row])
        known = head.forward(token_ids[0, 1 : row + 2], combined[: row + 1], rows, kv, last)
        for step in range(UNROLLED):
            wanted = head.compute_logits(known.last)[0]
            torch.testing.assert_close(logits[step][row], wanted, rtol=1e-4, atol=1e-4)
            following = token_ids[0, row + step + 2 : row + step + 3]
            if step + 1 < UNROLLED:
                known = head.forward(
                    following, known.feedback, rows_of_one_slot(row + step + 1, 1), kv
                )


def test_later_rows_and_padding_change_nothing(both):
    network, _, target = both
    generator = torch.Generator().manual_seed(8)
    token_ids = torch.randint(VOCAB, (1, 9), generator=generator)
    auxiliary = torch.randn(1, 9, 3 * HIDDEN, generator=generator)
    changed_ids, changed = token_ids.clone(), auxiliary.clone()
    changed_ids[0, 7:], changed[0, 4:] = 1, 5.0
    with torch.no_grad():
        runs = [
            list(network.unroll(target.embedding_matrix, ids, states, 3))
            for ids, states in ((token_ids, auxiliary), (changed_ids, changed))
        ]
    for step in range(3):
        # Row 3 sees states up to its own and tokens up to 4 + step.
        torch.testing.assert_close(runs[0][step][0, :4], runs[1][step][0, :4])


def test_more_steps_than_tokens(both):
    network, _, target = both
    outputs = network.unroll(
        target.embedding_matrix, torch.tensor([[1, 2]]), torch.zeros(1, 2, 3 * HIDDEN), 5
    )
    assert [output.shape for output in outputs] == [(1, 2, HIDDEN)] * 5


def test_what_was_written_is_taken_back(both):
    network, _, target = both
    token_ids = torch.tensor([[1, 2, 3, 4]])
    auxiliary = torch.randn(1, 4, 3 * HIDDEN)
    with torch.no_grad():
        (before,) = network.unroll(target.embedding_matrix, token_ids, auxiliary, 1)
        network.take(network.export_tensors(torch.float32))
        (after,) = network.unroll(target.embedding_matrix, token_ids, auxiliary, 1)
    torch.testing.assert_close(after, before)
    assert network.state_scale.eq(1).all()


def train(target, output, text, *, head=HEAD, loop=LOOP, report=print):
    return train_eagle3(target, output, text, head, loop, report=report, announce=print)


def weights(directory):
    return load_file(directory / "model.safetensors")


def assert_equal_heads(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize(
    "sizes", [{}, {"num_kv_heads": LLAMA["num_attention_heads"], "intermediate_size": 80}]
)
def test_a_trained_head_is_accepted_as_training_said(target, text, tmp_path, sizes):
    reports = []
    loop = replace(LOOP, steps=80, warmup_steps=10, batch_tokens=512)
    head = replace(HEAD, **sizes)
    result = train(target, tmp_path, text, head=head, loop=loop, report=reports.append)
    assert reports[-1].loss < reports[0].loss - 0.3
    assert reports[-1].acceptance[0] > reports[0].acceptance[0]
    drafts = {"method": "eagle3", "draft_limits": "fixed", "num_speculative_tokens": K}
    drafts["model"] = str(tmp_path)
    metrics = training.require_accepted(target, target, drafts, result.acceptance_length, 0.02)
    assert metrics.acceptance_per_position == pytest.approx(
        result.acceptance_per_position, abs=0.02
    )
    assert result.acceptance_length > 1.3


def test_what_is_written_beside_the_head(target, text, tmp_path):
    result = train(target, tmp_path, text)
    written = json.loads((tmp_path / "training.json").read_text())
    assert written["result"]["acceptance_length"] == result.acceptance_length
    assert written["settings"]["ttt_steps"] == K
    assert written["settings"]["loop"]["seed"] == 0
    tensors = weights(tmp_path)
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert tensors["lm_head.weight"].shape == (40, SIZES["hidden_size"])
    ids = torch.arange(40) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    # The text holds fewer kinds of tokens than fit, so that all of them are in.
    assert result.coverage > 0.9
    assert result.sequences == NUM_PROMPTS
    assert result.tokens == NUM_PROMPTS * ANSWER_LEN


def test_a_seed_names_the_bits(target, text, tmp_path):
    train(target, tmp_path / "a", text)
    train(target, tmp_path / "b", text)
    train(target, tmp_path / "c", text, loop=replace(LOOP, seed=1))
    assert_equal_heads(tmp_path / "a", tmp_path / "b")
    assert not torch.equal(
        weights(tmp_path / "a")["fc.weight"], weights(tmp_path / "c")["fc.weight"]
    )


def test_kept_states_are_those_run_anew(target, text, tmp_path):
    one = train(target, tmp_path / "a", text)
    other = train(target, tmp_path / "b", text, head=replace(HEAD, cache_states=False))
    assert one.loss == pytest.approx(other.loss, rel=1e-5)


def test_a_resumed_training_is_an_uninterrupted_one(target, text, tmp_path, cut_off):
    loop = replace(LOOP, steps=14, checkpoint_every=4)
    train(target, tmp_path / "a", text, loop=loop)
    cut_off(train, target, tmp_path / "b", text, loop=loop)
    assert (tmp_path / "b" / CHECKPOINT).is_file()
    assert not (tmp_path / "b" / "config.json").exists()
    training.require_own_settings(train, target, tmp_path / "b", loop)
    train(target, tmp_path / "b", text, loop=replace(loop, resume=True))
    assert_equal_heads(tmp_path / "a", tmp_path / "b")


def test_a_finished_head_is_kept_or_resumed(target, text, tmp_path):
    first = train(target, tmp_path, text)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != ".lock"}
    with pytest.raises(ConfigError, match="holds a model already") as refused:
        train(target, tmp_path, text, loop=replace(LOOP, seed=1))
    assert "remove it" in refused.value.remedy
    assert all((tmp_path / name).read_bytes() == data for name, data in written.items())
    again = train(target, tmp_path, text, loop=replace(LOOP, resume=True))
    assert (again.steps, again.loss) == (first.steps, first.loss)


def test_it_trains_on_extracted_states(target, text, tmp_path):
    speculative = {"method": "extract_hidden_states", "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    half = len(prompts_of()) // 2
    for part, prompts in enumerate((prompts_of()[:half], prompts_of()[half:])):
        speculative["shared_storage_path"] = str(tmp_path / f"states-{part}")
        open_llm(target, speculative_config=speculative).generate(prompts, GREEDY)
    source = TrainingText(states=(tmp_path / "states-0", tmp_path / "states-1"))
    # Before its weights are read.
    unreadable = training.with_bad_weights(target, tmp_path / "target")
    with pytest.raises(ConfigError, match=r"\[1, 2, 4\]|Extract with"):
        train(unreadable, tmp_path / "head", source, head=replace(HEAD, aux_layers="0,2,4"))
    speculative["shared_storage_path"] = str(tmp_path / "one")
    open_llm(target, speculative_config=speculative).generate(prompts_of()[:1], GREEDY)
    one, other = TrainingText(states=(tmp_path / "one",)), replace(HEAD, aux_layers="0,2,4")
    with pytest.raises(ConfigError, match="the states hold 1 sequence of layers"):
        train(unreadable, tmp_path / "head", one, head=other)
    head = replace(HEAD, aux_layers="1,2,4")
    short = replace(LOOP, max_length=PROMPT_LEN + 1)
    with pytest.raises(ConfigError, match="no sequence with an answer"):
        train(unreadable, tmp_path / "head", source, head=head, loop=short)
    given = train(target, tmp_path / "head", source, head=head)
    run = train(target, tmp_path / "other", text, head=head)
    # The shards lie in another order and end one row earlier.
    assert given.tokens == run.tokens
    assert math.isclose(given.loss, run.loss, rel_tol=0.2)


def test_what_is_held_back_is_measured(target, text, tmp_path):
    result = train(target, tmp_path, text, loop=replace(LOOP, validation=0.3))
    assert result.held_back >= 1
    assert result.sequences + result.held_back == NUM_PROMPTS
    assert result.measured == result.held_back


def test_positions_end_with_the_target_s_context(target, text, tmp_path):
    loop = replace(LOOP, steps=1, max_length=10**12)
    assert train(target, tmp_path, text, loop=loop).steps == 1


def test_the_answers_that_were_measured_are_counted(target, text, tmp_path, monkeypatch):
    """Of many held-back answers only some are measured."""
    monkeypatch.setattr(distillation, "_MEASURED_BATCHES", 2)
    one_each = replace(LOOP, validation=0.5, batch_tokens=1)
    result = train(target, tmp_path, text, loop=one_each)
    assert result.held_back > result.measured == 2


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"text": TrainingText()}, ConfigError, "either text or states"),
        ({"head": replace(HEAD, aux_layers="1,2,9")}, ConfigError, "no layers"),
        ({"loop": replace(LOOP, max_length=PROMPT_LEN + 1)}, ConfigError, "no answer"),
        ({"loop": replace(LOOP, resume=True)}, ConfigError, "does not exist"),
    ],
)
def test_what_cannot_be_is_refused(target, text, tmp_path, changes, error, says):
    arguments = {"text": text} | changes
    with pytest.raises(error, match=says):
        train(target, tmp_path, arguments.pop("text"), **arguments)


def test_a_target_that_is_not_there_and_an_output_that_is_a_file(target, text, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        train(tmp_path / "none", tmp_path / "out", text)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        train(target, tmp_path / "file", text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(target, text, tmp_path):
    with pytest.raises(UnsupportedError):
        train(target, tmp_path, text, loop=replace(LOOP, device="cuda"))


@pytest.mark.parametrize(
    "changes",
    [
        {"ttt_steps": 0},
        {"draft_vocab_size": 1},
        {"step_loss_decay": 0.0},
        {"intermediate_size": 0},
        {"num_kv_heads": 0},
        {"aux_layers": "1,2"},
        {"aux_layers": "1,2,x"},
        {"aux_layers": "1,2,²"},
    ],
)
def test_impossible_options_are_refused(changes):
    with pytest.raises(ConfigError):
        Eagle3Options(**changes)


def test_heads_that_cannot_share_are_refused(target, text, tmp_path):
    head = replace(HEAD, num_kv_heads=LLAMA["num_attention_heads"] + 1)
    with pytest.raises(ConfigError, match="cannot share"):
        train(target, tmp_path, text, head=head)


def test_rotary_settings_without_a_name_are_refused_before_the_training(
    target, text, tmp_path, monkeypatch
):
    """In a head's config.json."""
    files = open_target(target)
    rope = {"rope_type": "divided", "rope_theta": 1.0, "divisors": (1.0,) * 8}
    divided = replace(files, config=replace(files.config, rope=rope))
    monkeypatch.setattr(eagle3, "open_target", lambda path: divided)
    with pytest.raises(UnsupportedError, match="divisors"):
        train(target, tmp_path, text, report=None)


@pytest.mark.parametrize(("row", "says"), training.MISFITS)
def test_text_that_does_not_fit_is_refused_before_the_weights_are_read(target, tmp_path, row, says):
    training.require_refused_early(train, target, tmp_path, row, says)


def test_mixed_precision_runs(target, text, tmp_path):
    training.require_mixed_precision(
        lambda name, loop: train(target, tmp_path / name, text, loop=loop), LOOP
    )


def test_prompts_can_be_trained_on_as_well(target, text, tmp_path):
    answers = train(target, tmp_path / "answers", text)
    both = train(target, tmp_path / "both", text, loop=replace(LOOP, prompt_rows=True))
    # What is counted and measured are answers in either case.
    assert both.tokens == answers.tokens
    assert both.coverage == answers.coverage
    first, second = weights(tmp_path / "answers"), weights(tmp_path / "both")
    assert not torch.equal(first["fc.weight"], second["fc.weight"])


def test_a_target_that_does_not_fit_the_device_is_one_error(target, text, tmp_path):
    training.require_one_error_without_memory(
        lambda: train(target, tmp_path, text), frozen, "_read"
    )
