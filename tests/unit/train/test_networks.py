"""Trainable decoders against the engine's models, their parts against the engine's parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import HIDDEN, VOCAB, write_checkpoint, write_llama
from helpers.forward import Bench, kept_at
from helpers.heads import OPTIONS, empty_kv, rows_of_one_slot
from helpers.hybrids import FULL, LINEAR, hybrid_config, write_hybrid
from helpers.nemotron import nemotron_config, nemotron_tensors, write_nemotron
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.heads.mtp import MTPCheckpoint
from sametoken.models.loader import load_model, read_config
from sametoken.ops.model.gated_delta_rule.reference import advance
from sametoken.ops.model.mamba2.reference import advance as advance_mamba2
from sametoken.train.nemotron_h import selective_scan
from sametoken.train.networks import DecoderNetwork, in_drawing_order, load_weights, open_decoder
from sametoken.train.qwen3_5 import delta_rule

STEPS = 3
# Rows that transformers' gated delta rule takes at once.
CHUNK = 64


def write_latent_experts(directory):
    config = nemotron_config("MEM*", moe_latent_size=8, use_bias=True)
    tensors = nemotron_tensors(config)
    for index in (0, 2):
        for name in ("in_proj", "out_proj"):
            weight = tensors[f"backbone.layers.{index}.mixer.{name}.weight"]
            tensors[f"backbone.layers.{index}.mixer.{name}.bias"] = weight[:, 0].clone()
    return write_checkpoint(directory, config, tensors)


def load_decoder(path: Path, *, mtp: bool = False) -> DecoderNetwork:
    network, source = open_decoder(path, mtp=mtp)
    load_weights(network, source)
    return network


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", [1, 7, CHUNK + 5])
@pytest.mark.parametrize("write", [write_llama, write_hybrid, write_nemotron, write_latent_experts])
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


def module_tensor(directory, name):
    """A tensor of the module as training has it: experts of one matrix are one tensor."""
    tensors = load_file(directory / "model.safetensors")
    if f"mtp.{name}" in tensors:
        return tensors[f"mtp.{name}"]
    experts, _, projection = name.rpartition(".")
    return torch.stack([tensors[f"mtp.{experts}.{i}.{projection}.weight"] for i in range(4)])


@pytest.mark.parametrize("write", [write_hybrid, write_nemotron])
def test_every_step_of_the_module_is_that_of_an_engine_s_chain(tmp_path, write):
    write(tmp_path)
    target = load_model(tmp_path, **OPTIONS)
    head = MTPCheckpoint(tmp_path).load(target, **OPTIONS)
    network = load_decoder(tmp_path, mtp=True)
    with torch.no_grad():
        for name, tensor in network.mtp.state_dict().items():
            tensor.copy_(module_tensor(tmp_path, name))
        token_ids = random_ids(10)
        states = torch.randn(1, 10, target.config.hidden_size)
        unrolled = [last[0] for last in network.unroll(token_ids, states, STEPS)]
    for row in range(10 - STEPS):
        kv = empty_kv(head)
        rows = rows_of_one_slot(0, row + 1)
        last = kept_at(rows, [row])
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


def test_a_new_nemotron_h_forgets_and_skips_as_mamba_2_begins(tmp_path):
    network = DecoderNetwork(read_config(write_nemotron(tmp_path)), mtp=True)
    network.initialise(0)
    mixer = "model.layers.0.mixer"
    tensors = network.state_dict()
    assert torch.equal(tensors[f"{mixer}.D"], torch.ones(4))
    assert not tensors[f"{mixer}.conv1d.bias"].any()
    assert ((tensors[f"{mixer}.A_log"].exp() >= 1) & (tensors[f"{mixer}.A_log"].exp() <= 16)).all()
    experts = tensors["model.layers.1.mixer.experts.down_proj"]
    assert 0 < experts.std() < tensors["model.layers.1.mixer.experts.up_proj"].std()


def test_training_gives_every_expert_of_a_nemotron_h_tokens(tmp_path):
    """All routers, the module's too, first send every token to the same two of four experts."""
    network = DecoderNetwork(read_config(write_nemotron(tmp_path)), mtp=True)
    network.initialise(0)
    gates = [part for name, part in network.named_modules() if name.endswith("gate")]
    assert len(gates) == 3
    rows = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(0))
    for gate in gates:
        gate.e_score_correction_bias[:2] = 0.2
        assert gate(rows)[2].max() == 1
        for _ in range(250):
            gate(rows)
        bias = gate.e_score_correction_bias.clone()
        with torch.no_grad():
            load = gate(rows)[2].flatten().bincount(minlength=4)
        assert load.min() > 60
        assert torch.equal(gate.e_score_correction_bias, bias), "a measurement changes nothing"


def test_what_cannot_be_trained_is_refused(tmp_path):
    puzzle = write_nemotron(tmp_path / "p", block_configs=[{"block_type": "moe"}])
    with pytest.raises(UnsupportedError, match="of different sizes"):
        DecoderNetwork(read_config(puzzle))
    module = write_nemotron(tmp_path / "m", mtp_hybrid_override_pattern="EE")
    with pytest.raises(UnsupportedError, match="is not trained"):
        DecoderNetwork(read_config(module), mtp=True)
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


@pytest.mark.parametrize("write", [write_hybrid, write_nemotron])
def test_one_that_is_only_looked_at_takes_no_memory(tmp_path, write):
    path = write(tmp_path)
    with torch.device("meta"):
        network, _ = open_decoder(path, mtp=True)
    assert all(tensor.is_meta for tensor in network.state_dict().values())


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    path = write_hybrid(tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    tensors[name][0] = float("nan")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight .* holds NaN"):
        load_decoder(path)


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


def scanned_by_rows(x, steps, rates, into, out_of):
    outputs = torch.empty_like(x)
    for batch in range(len(x)):
        state = torch.zeros(*x.shape[2:], into.shape[-1])
        for row in range(x.shape[1]):
            part = (given[batch, row] for given in (x, into, out_of))
            step = steps[batch, row]
            outputs[batch, row] = advance_mamba2(state, *part, (step * rates).exp(), step)
    return outputs


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
@pytest.mark.parametrize("rate", [1e-6, 1.0, 1e4])
def test_the_selective_scan_is_that_of_the_engine_s_rows(length, rate):
    generator = torch.Generator().manual_seed(length)
    x, into, out_of = (
        torch.randn(2, length, *shape, generator=generator) for shape in ((4, 3), (2, 5), (2, 5))
    )
    steps = torch.rand(2, length, 4, generator=generator)
    rates = -rate * torch.rand(4, generator=generator)
    given = (x, steps, rates, into, out_of)
    wanted = scanned_by_rows(*given)
    torch.testing.assert_close(selective_scan(*given), wanted, rtol=1e-4, atol=1e-4)
    given = [tensor.requires_grad_() for tensor in given]
    gradients = torch.autograd.grad(selective_scan(*given).sum(), given)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_gradients_of_the_selective_scan_are_those_of_differences():
    generator = torch.Generator().manual_seed(0)
    x, into, out_of = (
        torch.randn(1, 5, *shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 2), (1, 3), (1, 3))
    )
    steps = torch.rand(1, 5, 2, generator=generator, dtype=torch.float64)
    rates = -torch.rand(2, generator=generator, dtype=torch.float64)
    given = [tensor.requires_grad_() for tensor in (x, steps, rates, into, out_of)]
    assert torch.autograd.gradcheck(selective_scan, given)
