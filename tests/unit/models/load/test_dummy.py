"""Dummy weights: a config's shapes, no files, the same values every time."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.checkpoints import HIDDEN, LLAMA, VOCAB, write_llama
from helpers.heads import OPTIONS, SharedTarget
from helpers.hybrids import hybrid_config
from helpers.quantized import STATIC, block_config, compressed_config
from sametoken.bench.memory import load_shapes
from sametoken.errors import CheckpointError, ConfigError, UnsupportedError
from sametoken.models.heads.eagle import Eagle1Checkpoint
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.models.load.dummy import SCALE, VOCABULARY_SCALE, DummySource
from sametoken.models.load.sources import CHUNK_ELEMENTS
from sametoken.models.loader import load_model, read_config

CPU = torch.device("cpu")
DRAFT_VOCAB = 9


def write_config(directory, **changes):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    return directory


def tensor(name, *shape, device=CPU):
    source = DummySource("here", device)
    source.declare(name, shape)
    return torch.cat(list(source.chunks(name)))


def load(directory, **options):
    return load_model(directory, **OPTIONS | options, load_format="dummy")


def test_values_depend_on_the_name_alone():
    assert torch.equal(tensor("a", 5, 7), tensor("a", 5, 7))
    assert not torch.equal(tensor("a", 5, 7), tensor("b", 5, 7))


@pytest.mark.parametrize(
    ("name", "shape", "centre", "scale"),
    [
        ("m.weight", (400, 50), 0.0, SCALE),
        ("n.weight", (2000,), 1.0, SCALE),
        ("n.bias", (2000,), 0.0, SCALE),
        ("model.embed_tokens.weight", (400, 50), 0.0, VOCABULARY_SCALE),
        ("lm_head.weight", (400, 50), 0.0, VOCABULARY_SCALE),
    ],
)
def test_values_are_about_0_those_of_norms_about_1(name, shape, centre, scale):
    values = tensor(name, *shape)
    assert values.mean().item() == pytest.approx(centre, abs=scale / 10)
    assert values.std().item() == pytest.approx(scale, rel=0.1)


def test_the_head_holds_the_embedding_s_values():
    embedding = tensor("model.embed_tokens.weight", VOCAB, HIDDEN)
    assert torch.equal(tensor("lm_head.weight", VOCAB, HIDDEN), embedding)


def test_large_tensors_come_in_bounded_chunks_that_differ():
    source = DummySource("here", CPU)
    columns = CHUNK_ELEMENTS // 2
    source.declare("large", (5, columns))
    chunks = list(source.chunks("large"))
    assert [chunk.shape for chunk in chunks] == [(2, columns), (2, columns), (1, columns)]
    assert not torch.equal(chunks[0], chunks[1])


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_config_alone_makes_the_model_of_a_real_checkpoint_s_size(tmp_path, architecture, tied):
    changes = {"architectures": [architecture], "tie_word_embeddings": tied}
    dummy = load(write_config(tmp_path / "dummy", **changes))
    assert (dummy.head is dummy.embedding) == tied
    if architecture == "LlamaForCausalLM" and not tied:
        real = load_model(write_llama(tmp_path / "real", **changes), **OPTIONS)
        assert dummy.weights_bytes == real.weights_bytes
        assert dummy.caches == real.caches


def test_biases_that_the_config_asks_for_exist(tmp_path):
    model = load(write_config(tmp_path, attention_bias=True))
    assert model.layers[0].attention.qkv.bias is not None


def test_weights_beside_the_config_are_not_read(tmp_path):
    directory = write_llama(tmp_path)
    (directory / "model.safetensors").write_bytes(b"not weights")
    assert load(directory).weights_bytes > 0


def test_a_bf16_model_of_many_layers_stays_finite(tmp_path):
    changes = {"num_hidden_layers": 36, "hidden_size": 256, "intermediate_size": 512}
    directory = write_config(tmp_path, **changes, torch_dtype="bfloat16")
    model = load(directory, dtype=torch.bfloat16)
    residual = model.embedding.rows(torch.arange(8))
    for layer in model.layers:
        # Attention averages values, so the widest it can put out is that of its values.
        values = layer.attention.qkv(layer.input_norm(residual))[:, -8:]
        out = layer.attention.output(values.repeat(1, 2))
        x, residual = layer.post_attention_norm.add(out, residual)
        residual = residual + layer.mlp(x)
    logits = model.compute_logits(model.final_norm(residual))
    assert logits.isfinite().all()
    assert logits.std() > 0.01


def test_settings_are_checked_as_ever(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="needs a directory"):
        read_config(write_config(tmp_path) / "config.json", load_format="dummy")


@pytest.mark.parametrize("draft_vocab", [DRAFT_VOCAB, VOCAB])
def test_an_eagle3_head_of_a_config_alone(tmp_path, draft_vocab):
    directory = write_config(
        tmp_path,
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=draft_vocab,
    )
    target = SharedTarget()
    head = Eagle3Checkpoint(directory, load_format="dummy").load(target, **OPTIONS)
    assert head.embedding is target.embedding
    assert head.lm_head.out_features == draft_vocab
    assert head.fc.weight.in_features == 3 * HIDDEN
    if draft_vocab == VOCAB:
        assert head.lm_head is target.head
        assert head.token_ids is None
    else:
        assert torch.equal(head.token_ids, torch.arange(draft_vocab))
    with pytest.raises(CheckpointError, match="no safetensors"):
        Eagle3Checkpoint(directory).load(target, **OPTIONS)


def test_an_eagle_head_of_a_config_alone(tmp_path):
    directory = write_config(tmp_path, num_hidden_layers=1)
    target = SharedTarget()
    head = Eagle1Checkpoint(directory, load_format="dummy").load(target, **OPTIONS)
    assert (head.embedding, head.lm_head) == (target.embedding, target.head)
    assert head.fc.bias is None


def test_a_packed_weight_has_the_source_s_values(tmp_path):
    model = load(write_config(tmp_path))
    expected = tensor("lm_head.weight", VOCAB, HIDDEN)
    found = model.head.matmul(torch.eye(HIDDEN), out_dtype=torch.float32)
    assert torch.equal(found, expected.T.contiguous())


def packed_config(group_size: int) -> dict:
    config = compressed_config("channel", None, format="pack-quantized")
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
    config["config_groups"]["group_0"]["weights"] = weights
    return config


QUANTIZED = {
    "packed": packed_config(32),
    "block": block_config(),
    "channel": compressed_config("channel"),
    "static": compressed_config("tensor", STATIC),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_linears_of_a_quantized_config_have_its_bits(tmp_path, name):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    path = write_config(tmp_path, **sizes, quantization_config=QUANTIZED[name])
    model, shapes = load(path), load_shapes(read_config(path), path, torch.float32)
    weight = model.layers[0].attention.qkv.weight
    assert weight.matmul(torch.ones(2, 64)).isfinite().all()
    assert weight.nbytes < weight.out_features * weight.in_features * 2
    assert shapes.weights_bytes == model.weights_bytes


def test_linears_that_a_config_leaves_out_are_not_quantized_of_a_model_that_also_sees(tmp_path):
    """It names them as the checkpoint does, which nests the text decoder."""
    config = hybrid_config("qwen3_5", hidden_size=128)
    left_out = ["linear_attn.in_proj_a", "linear_attn.in_proj_b"]
    names = [f"model.language_model.layers.{at}.{name}" for at in range(8) for name in left_out]
    config["quantization_config"] = block_config() | {"modules_to_not_convert": names}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = load(tmp_path)
    weight = model.layers[0].attention.projection.weight
    assert [type(part).__name__ for part in weight.parts] == ["Fp8Weight", "PlainWeight"]
    shapes = load_shapes(read_config(tmp_path), tmp_path, torch.float32)
    assert shapes.weights_bytes == model.weights_bytes


def test_settings_of_4_bits_are_checked_as_ever(tmp_path):
    path = write_config(tmp_path, quantization_config=packed_config(16))
    with pytest.raises(UnsupportedError, match="multiple of 32"):
        load(path)
