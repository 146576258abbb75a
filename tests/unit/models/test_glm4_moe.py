"""GLM-4 MoE: its NextN module against transformers' layer, and checked sizes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import change_config, change_tensors, read_checkpoint, write_checkpoint
from helpers.families import fixed_config, random_model, write_family
from helpers.forward import CPU, load
from helpers.heads import require_defined_states, rms_norm
from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.models.heads.own_module import open_module
from sametoken.models.loader import read_config
from sametoken.models.registry import require_divisible
from sametoken.ops.reference import ReferenceKernels


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_family(tmp_path_factory.mktemp("glm"), "glm4_moe")


@pytest.fixture
def checkpoint(written, tmp_path):
    return write_checkpoint(tmp_path, *read_checkpoint(written))


@pytest.mark.parametrize(("layer", "known"), [(3, True), (4, False), (30, False)])
def test_the_next_layer_s_tensors_alone_are_left(checkpoint, layer, known):
    added = {f"model.layers.{layer}.eh_proj.weight": torch.zeros(32, 64)}
    change_tensors(checkpoint, lambda tensors: tensors | added)
    if known:
        assert load(checkpoint).config.num_layers == 3
    else:
        with pytest.raises(UnsupportedError, match=rf"model\.layers\.{layer}\.eh_proj"):
            load(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 4}, "2 of 6 experts in 1 of n_group=4 groups is not possible"),
        ({"topk_group": 3}, "in 3 of n_group=2 groups"),
        ({"num_experts_per_tok": 4}, "4 of 6 experts in 1 of n_group=2 groups"),
        ({"n_routed_experts": 10**9}, "n_routed_experts=1000000000 is not at most"),
        ({"n_routed_experts": 8}, r"has shape \[6, 32\], the config expects \[8, 32\]"),
        ({"first_k_dense_replace": "one"}, "first_k_dense_replace='one'"),
        ({"routed_scaling_factor": -1}, "routed_scaling_factor=-1"),
    ],
)
def test_impossible_sizes_are_named(checkpoint, changes, message):
    change_config(checkpoint, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)


def test_ranks_divide_experts_and_the_dense_layers_that_there_are(checkpoint):
    assert "moe_intermediate_size" in load(checkpoint).divided_sizes(read_config(checkpoint))
    require_divisible(read_config(checkpoint), 2)
    change_config(checkpoint, first_k_dense_replace=0, intermediate_size=47)
    require_divisible(read_config(checkpoint), 2)


def write_module(directory):
    """A model of three layers whose module has transformers' fourth; the model and all tensors."""
    theirs = random_model(fixed_config("glm4_moe", num_hidden_layers=4), seed=5)
    theirs.save_pretrained(directory)
    change_config(directory, num_hidden_layers=3, num_nextn_predict_layers=1)
    tensors, prefix = load_file(directory / "model.safetensors"), "model.layers.3."
    generator = torch.Generator().manual_seed(1)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = 1 + 0.3 * torch.randn(32, generator=generator)
    tensors[f"{prefix}eh_proj.weight"] = 0.2 * torch.randn(32, 64, generator=generator)
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / "model.safetensors")
    return theirs, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@torch.inference_mode()
def test_the_module_computes_what_it_is_defined_as(tmp_path):
    theirs, tensors = write_module(tmp_path)

    def norm(x, name="shared_head.norm"):
        return rms_norm(x, tensors[f"{name}.weight"], 1e-5)

    def definition(token_ids, hidden):
        embedded, count = tensors["embed_tokens.weight"][token_ids].clone(), len(token_ids)
        embedded[0] = 0
        both = torch.cat((norm(embedded, "enorm"), norm(hidden, "hnorm")), -1)
        x = (both @ tensors["eh_proj.weight"].T)[None]
        future = torch.full((count, count), -torch.inf).triu(1)[None, None]
        angles = theirs.model.rotary_emb(x, torch.arange(count)[None])
        return theirs.model.layers[3](x, attention_mask=future, position_embeddings=angles)[0]

    options = {"kernels": ReferenceKernels(), "dtype": torch.float32, "device": CPU}
    target = load(tmp_path)
    head = open_module(tmp_path).load(target, **options, max_positions=16)
    require_defined_states(head, definition, tensors["shared_head.head.weight"], norm=norm)
    assert head.lm_head is target.head, "a copy of the target's is not kept"
    quantized = open_module(tmp_path).load(target, **options, max_positions=16, quantize_fp8=True)
    plain, mixed = head.module.layer.mlp, quantized.module.layer.mlp
    assert mixed.routed.nbytes == plain.routed.nbytes
    assert mixed.shared.nbytes < plain.shared.nbytes
