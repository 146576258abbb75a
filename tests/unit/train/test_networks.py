"""Trainable decoders against the engine's models, their parts against the engine's parts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from helpers.checkpoints import VOCAB, write_llama
from helpers.forward import Bench
from helpers.heads import OPTIONS, empty_kv, rows_of_one_slot
from helpers.hybrids import FULL, LINEAR, hybrid_config, hybrid_tensors, write_hybrid
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.loader import load_model, read_config
from sametoken.ops.model.gated_delta_rule.reference import advance
from sametoken.train.networks import DecoderNetwork, delta_rule, in_drawing_order, load_decoder

STEPS = 3
# Rows that transformers' gated delta rule takes at once.
CHUNK = 64


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", [1, 7, CHUNK + 5])
@pytest.mark.parametrize("write", [write_llama, write_hybrid])
def test_states_and_logits_are_the_engine_s(tmp_path, write, length):
    write(tmp_path)
    options = OPTIONS | {"max_positions": 128}
    bench = Bench(load_model(tmp_path, **options))
    network = load_decoder(tmp_path)
    token_ids = random_ids(length)
    wanted = bench.run(token_ids[0].tolist(), 0).last
    with torch.no_grad():
        found = network(token_ids)[0]
        logits = found @ network.head.T
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(logits, bench.model.compute_logits(wanted), rtol=1e-3, atol=1e-3)


def test_every_step_of_the_module_is_that_of_an_engine_s_chain(tmp_path):
    write_hybrid(tmp_path)
    target = load_model(tmp_path, **OPTIONS)
    head = MTPCheckpoint(tmp_path).load(target, **OPTIONS)
    network = load_decoder(tmp_path, mtp=True)
    tensors = hybrid_tensors(hybrid_config("qwen3_5"))
    with torch.no_grad():
        for name, parameter in network.mtp.named_parameters():
            parameter.copy_(tensors[f"mtp.{name}"])
        token_ids = random_ids(10)
        states = torch.randn(1, 10, target.config.hidden_size)
        unrolled = [last[0] for last in network.unroll(token_ids, states, STEPS)]
    for row in range(10 - STEPS):
        kv = empty_kv(head)
        rows, last = rows_of_one_slot(0, row + 1), torch.tensor([row])
        known = head.forward(token_ids[0, 1 : row + 2], states[0, : row + 1], rows, kv, last)
        for step in range(STEPS):
            torch.testing.assert_close(unrolled[step][row], known.last[0], rtol=1e-3, atol=1e-4)
            if step + 1 < STEPS:
                following = token_ids[0, row + step + 2 : row + step + 3]
                rows = rows_of_one_slot(row + step + 1, 1)
                known = head.forward(following, known.feedback, rows, kv)


def test_a_seed_makes_the_same_weights_anywhere(tmp_path):
    config = read_config(write_hybrid(tmp_path))

    def made(seed):
        network = DecoderNetwork(config, mtp=True)
        network.initialise(seed)
        return network.state_dict()

    one, again, other = made(1), made(1), made(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    differ = {name for name in one if not torch.equal(one[name], other[name])}
    # All but norms.
    assert differ == {name for name in one if "norm" not in name}
    assert any(name.startswith("mtp.") for name in differ)
    decay = one["model.layers.0.linear_attn.A_log"].exp()
    assert ((decay >= 1) & (decay <= 16)).all()
    step = torch.nn.functional.softplus(one["model.layers.0.linear_attn.dt_bias"])
    assert ((step > 0.0009) & (step < 0.11)).all()


def test_weights_are_drawn_in_an_order_that_transformers_does_not_set(tmp_path):
    network = DecoderNetwork(read_config(write_hybrid(tmp_path)), mtp=True)
    drawn = [name.removesuffix(".weight") for name, _ in in_drawing_order(network)]
    drawn = [name for name in drawn if "norm" not in name]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    linear = [f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")]
    linear = ["linear_attn.dt_bias", "linear_attn.A_log", *linear]
    linear += ["linear_attn.conv1d", "linear_attn.out_proj"]
    full = [f"self_attn.{name}_proj" for name in "qkvo"]
    wanted = ["model.embed_tokens"]
    for index, mixer in enumerate((linear, linear, full, linear)):
        wanted += [f"model.layers.{index}.{name}" for name in (*mlp, *mixer)]
    wanted += ["mtp.fc", *(f"mtp.layers.0.{name}" for name in (*mlp, *full)), "lm_head"]
    assert drawn == wanted


def test_what_cannot_be_trained_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="cannot be trained"):
        DecoderNetwork(read_config(write_hybrid(tmp_path / "a", "qwen3_next")))
    llama = read_config(write_llama(tmp_path / "b"))
    with pytest.raises(UnsupportedError, match="no module"):
        DecoderNetwork(llama, mtp=True)
    with pytest.raises(UnsupportedError, match="not possible in transformers"):
        DecoderNetwork(replace(llama, num_heads=3))
    with pytest.raises(UnsupportedError, match="running length"):
        DecoderNetwork(replace(llama, rope=llama.rope | {"rope_type": "longrope"}))
    broken = write_hybrid(tmp_path / "c")
    config = hybrid_config("qwen3_5", layer_types=[FULL, LINEAR, FULL, LINEAR])
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="self_attn"):
        load_decoder(broken)


def drawn(length, key_heads=2, value_heads=4, key_dim=5, value_dim=3, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(2, length, *shape, generator=generator)

    q, k, v = rand(key_heads, key_dim), rand(key_heads, key_dim), rand(value_heads, value_dim)
    return q, k, v, -rand(value_heads).exp(), rand(value_heads).sigmoid()


def by_rows(q, k, v, log_decay, beta):
    outputs = torch.empty_like(v)
    for batch in range(len(q)):
        state = torch.zeros(v.shape[2], k.shape[3], v.shape[3])
        for row in range(q.shape[1]):
            part = (x[batch, row] for x in (q, k, v, log_decay, beta))
            outputs[batch, row] = advance(state, *part)
    return outputs


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_the_gated_delta_rule_is_that_of_the_engine_s_rows(length):
    given = drawn(length)
    torch.testing.assert_close(delta_rule(*given), by_rows(*given), rtol=1e-4, atol=1e-5)


def test_decays_that_leave_nothing_and_that_keep_everything():
    q, k, v, log_decay, beta = drawn(70)
    for rate in (0.0, -1e-6, -50.0, -1e4):
        given = (q, k, v, torch.full_like(log_decay, rate), beta)
        torch.testing.assert_close(delta_rule(*given), by_rows(*given), rtol=1e-4, atol=1e-5)


def test_keys_of_the_delta_rule_that_repeat():
    q, k, v, log_decay, _ = drawn(CHUNK)
    given = (q, k[:, :1].expand_as(k), v, torch.zeros_like(log_decay), torch.ones_like(log_decay))
    torch.testing.assert_close(delta_rule(*given), by_rows(*given), rtol=1e-4, atol=1e-4)


def test_gradients_of_the_delta_rule_are_those_of_the_rows():
    given = [x.requires_grad_() for x in drawn(9)]
    wanted = torch.randn(delta_rule(*given).shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((delta_rule(*given) * wanted).sum(), given)

    def rows(q, k, v, log_decay, beta):
        # The reference advances its state in place; the same row out of place.
        outputs = []
        for batch in range(2):
            state = torch.zeros(4, 5, 3)
            for row in range(9):
                one_q, one_k = (
                    torch.nn.functional.normalize(x[batch, row], dim=-1).repeat_interleave(2, 0)
                    for x in (q, k)
                )
                state = state * log_decay[batch, row].exp()[:, None, None]
                read = (state * one_k[..., None]).sum(1)
                update = (v[batch, row] - read) * beta[batch, row][:, None]
                state = state + one_k[..., None] * update[:, None]
                outputs.append((state * one_q[..., None]).sum(1) / 5**0.5)
        return torch.stack(outputs).view(2, 9, 4, 3)

    expected = torch.autograd.grad((rows(*given) * wanted).sum(), given)
    for name, one, other in zip(["q", "k", "v", "decay", "beta"], found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=name)
