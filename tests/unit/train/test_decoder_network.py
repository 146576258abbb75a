"""Trainable decoders against the engine's models, and the module against the engine's head."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.checkpoints import VOCAB, write_llama
from helpers.forward import Bench
from helpers.heads import OPTIONS, empty_kv, rows_of_one_slot
from helpers.hybrids import FULL, LINEAR, hybrid_config, hybrid_tensors, write_hybrid
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.loader import load_model, read_config
from sametoken.models.mtp_checkpoint import MTPCheckpoint
from sametoken.train.checkpoints import load_decoder
from sametoken.train.decoder_network import DecoderNetwork
from sametoken.train.gated_delta import CHUNK

STEPS = 3


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", [1, 7, CHUNK + 5])
@pytest.mark.parametrize("write", [write_llama, write_hybrid])
def test_states_and_logits_are_the_engine_s(tmp_path, write, length):
    write(tmp_path)
    options = OPTIONS | {"max_positions": 128}
    bench = Bench(load_model(tmp_path, **options))
    network = load_decoder(tmp_path, max_positions=128)
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
    network = load_decoder(tmp_path, max_positions=32, mtp=True)
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
        network = DecoderNetwork(config, max_positions=8, mtp=True)
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


def test_what_cannot_be_trained_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="cannot be trained"):
        DecoderNetwork(read_config(write_hybrid(tmp_path / "a", "qwen3_next")), max_positions=8)
    llama = read_config(write_llama(tmp_path / "b"))
    with pytest.raises(UnsupportedError, match="no module"):
        DecoderNetwork(llama, max_positions=8, mtp=True)
    broken = write_hybrid(tmp_path / "c")
    config = hybrid_config("qwen3_5", layer_types=[FULL, LINEAR, FULL, LINEAR])
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="self_attn"):
        load_decoder(broken, max_positions=8)
