"""Parameters by their Hugging Face names, and what an exact model refuses."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from helpers.checkpoints import write_llama
from helpers.exact import all_equal, write_exact
from helpers.families import write_family
from helpers.latents import write_latent
from helpers.updates import engine, said, tensors_of
from sametoken.errors import ConfigError, NumericalError, RequestError, UnsupportedError
from sametoken.exact import ExactModel
from sametoken.exact import model as exact_model
from sametoken.exact.packed import PackedSequences


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(llama):
    return ExactModel(str(llama), device="cpu", max_model_len=20)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "phi3", "qwen3_moe"])
def test_parameters_are_the_checkpoints_tensors(name, tmp_path):
    path = write_exact(tmp_path, name)
    found = ExactModel(str(path), dtype="float32", device="cpu").state_dict()
    tensors = tensors_of(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())


def test_a_second_copy_of_a_tied_head_is_no_parameter(tmp_path):
    path = write_exact(tmp_path, "llama-tied")
    tensors = tensors_of(path)
    copy = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": copy}, path / "model.safetensors", {"format": "pt"})
    assert ExactModel(str(path), device="cpu").state_dict().keys() == tensors.keys()


def test_an_engine_takes_the_parameters(llama, model, tmp_path):
    live = engine(write_llama(tmp_path, seed=1))
    live.update_weights(model.state_dict().items())
    assert said(live) == said(engine(llama))


def test_no_weight_is_stale_even_if_no_version_counts_its_change(llama, tmp_path):
    other = ExactModel(str(write_llama(tmp_path, seed=1)), device="cpu")
    model = ExactModel(str(llama), device="cpu")
    before = model([[1, 2, 3]])
    for parameter, wanted in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(wanted.data)
    assert all_equal(model([[1, 2, 3]]), other([[1, 2, 3]]))
    assert not all_equal(before, other([[1, 2, 3]]))


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_fsdp2_wraps_the_whole_module(llama, one_rank):
    plain, model = (ExactModel(str(llama), device="cpu") for _ in range(2))
    fully_shard(model, mesh=one_rank)
    sequences = [[1, 2, 3], [4, 5]]
    found, wanted = model(sequences), plain(sequences)
    assert all_equal(found, wanted)
    torch.cat(found).sum().backward()
    torch.cat(wanted).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize(
    ("sequences", "starts"),
    [
        ([], None),
        ([[1, 2]], [1, 1]),
        ([[1]], None),
        ([[1, 2], []], None),
        ([[1, 2]], [0]),
        ([[1, 2]], [2]),
        ([[1] * 21], None),
        ([[1, 2], [1, 23]], None),
        ([[1, -1]], None),
        ([[1.5, 2.0]], None),
        (torch.ones(1, 2), None),
        (["ab"], None),
        ([1, 2], None),
        ([[1, 2, 3]], [1.5]),
    ],
)
def test_bad_sequences_are_refused(sequences, starts, model):
    with pytest.raises(RequestError, match="sequence"):
        model(sequences, starts)


def test_a_tensor_of_sequences_is_as_good_as_lists(model):
    rows = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert all_equal(model(torch.tensor(rows), torch.tensor([2, 1])), model(rows, [2, 1]))
    with pytest.raises(RequestError, match=r"2 starts for 1 sequence\."):
        model(rows[:1], [2, 1])
    with pytest.raises(RequestError, match="0 starts for 0 sequences"):
        model(torch.zeros(0, 3, dtype=torch.int64))


def test_the_longest_sequence_is_not_refused(model):
    (logprobs,) = model([[1] * 20])
    assert logprobs.shape == (19,)
    assert logprobs.dtype == torch.float32


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("looked_at", [1, 5, 64])
def test_a_value_that_is_not_finite_is_refused_by_name(value, looked_at, llama, monkeypatch):
    monkeypatch.setattr(exact_model, "LOOKED_AT", looked_at)
    model = ExactModel(str(llama), device="cpu")
    with torch.no_grad():
        model.get_parameter("model.layers.2.mlp.up_proj.weight")[3, 1] = value
    with pytest.raises(NumericalError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        model([[1, 2]])


@pytest.mark.parametrize(
    "write",
    [lambda path: write_latent(path, "deepseek_v3"), lambda path: write_family(path, "gpt_oss")],
    ids=["deepseek_v3", "gpt_oss"],
)
def test_layers_without_gradients_are_refused(write, tmp_path):
    with pytest.raises(UnsupportedError, match="no gradients"):
        ExactModel(str(write(tmp_path)), device="cpu")


def test_quantized_weights_are_refused(tmp_path):
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UnsupportedError, match="quantized"):
        ExactModel(str(write_llama(tmp_path, **quantized)), device="cpu")


def test_options_are_the_engines(llama):
    with pytest.raises(ConfigError, match="max_model_len"):
        ExactModel(str(llama), device="cpu", max_model_len=65)
    with pytest.raises(ConfigError, match="dtype"):
        ExactModel(str(llama), device="cpu", dtype="int8")


def test_sequences_have_slots_and_blocks_of_their_own():
    packed = PackedSequences.of(
        [[7, 8, 9], [5], [1, 2, 3, 4, 5]], [1, 1, 3], 2, torch.device("cpu")
    )
    assert packed.token_ids.tolist() == [7, 8, 9, 5, 1, 2, 3, 4, 5]
    assert packed.rows.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert packed.rows.slots.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert packed.rows.block_table.tolist() == [[0, 1, 6], [2, 6, 6], [3, 4, 5], [6, 6, 6]]
    assert packed.rows.kv_slots.tolist() == [0, 1, 2, 4, 6, 7, 8, 9, 10]
    assert packed.rows.runs.starts.tolist() == [0, 3, 4, 9]
    assert packed.scored.tolist() == [0, 1, 6, 7]
    assert packed.chosen.tolist() == [8, 9, 4, 5]
    assert packed.num_scored == (2, 0, 2)
