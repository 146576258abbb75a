"""The NextN module against its definition in plain PyTorch, with expanded attention."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import change_config, read_checkpoint, write_checkpoint, write_llama
from helpers.families import VOCAB
from helpers.heads import (
    CPU,
    KERNELS,
    both_kernels,
    empty_kv,
    gated_mlp,
    linear,
    require_defined_states,
    require_kept_rows_alone,
    require_reads_what_logits_are_made_from,
    rms_norm,
    rows_of_one_slot,
)
from helpers.latents import YARN, fixed_latent, write_latent, write_nextn
from helpers.nextn_files import nextn_prefix
from sametoken.errors import CheckpointError, DrafterMismatchError, UnsupportedError
from sametoken.models.heads.nextn import NextNCheckpoint
from sametoken.models.heads.own_module import open_module
from sametoken.models.loader import load_model, read_config
from sametoken.models.rounding import float8, int4
from sametoken.ops.weight import UnquantizedWeight

HIDDEN = 32
OPTIONS = {"kernels": KERNELS, "dtype": torch.float32, "device": CPU, "max_positions": 64}


def opened(path, kernels=KERNELS):
    """A target and its module."""
    options = OPTIONS | {"kernels": kernels}
    target = load_model(path, **options)
    return target, NextNCheckpoint(path).load(target, **options)


class Definition:
    """The module over a whole sequence: what is fed back, and the norm that logits need."""

    def __init__(self, path, config):
        self.tensors, self.config = load_file(path / "model.safetensors"), config
        self.prefix = nextn_prefix(config)
        self.lm_head = self.tensors[f"{self.prefix}shared_head.head.weight"]

    def norm(self, x, name, eps=1e-6):
        return rms_norm(x, self.tensors[f"{self.prefix}{name}.weight"], eps)

    def linear(self, x, name):
        return linear(self.tensors, x, f"{self.prefix}{name}")

    def feedback(self, token_ids, hidden):
        eps = self.config.rms_norm_eps
        embedded = self.tensors["model.embed_tokens.weight"][token_ids].clone()
        embedded[0] = 0
        both = (self.norm(embedded, "enorm", eps), self.norm(hidden, "hnorm", eps))
        x = self.linear(torch.cat(both, -1), "eh_proj")
        x = x + self.attention(self.norm(x, "input_layernorm", eps))
        return x + self.experts(self.norm(x, "post_attention_layernorm", eps))

    def last_norm(self, feedback):
        return self.norm(feedback, "shared_head.norm", self.config.rms_norm_eps)

    def attention(self, x):
        """Expanded: keys and values of every head from the latents."""
        config, count = self.config, len(x)
        heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, 8
        q = self.linear(self.norm(self.linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm"),
                        "self_attn.q_b_proj").view(count, heads, -1)  # fmt: skip
        latent, key = self.linear(x, "self_attn.kv_a_proj_with_mqa").split((24, rope), -1)
        latent = self.norm(latent, "self_attn.kv_a_layernorm")
        kv = self.linear(latent, "self_attn.kv_b_proj").view(count, heads, -1)
        q = torch.cat((q[..., :nope], self.rotated(q[..., nope:])), -1)
        k = torch.cat((kv[..., :nope], self.rotated(key[:, None]).expand(-1, heads, -1)), -1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * self.scale() / (nope + rope) ** 0.5
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", weights, kv[..., nope:])
        return self.linear(attended.flatten(1), "self_attn.o_proj")

    def scale(self):
        """YaRN's mscale_all_dim is 1 here, and its mscale 0.7."""
        return (0.1 * math.log(YARN["factor"]) + 1) ** 2

    def rotated(self, x):
        """Neighbours are a pair; frequencies blend as YaRN's, times mscale / mscale_all_dim."""
        dim, base, factor, original = 8, 10_000.0, YARN["factor"], 32

        def at(rotations):
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(at(32)), 0), min(math.ceil(at(1)), dim - 1)
        place = torch.arange(dim // 2).float()
        ramp = ((place - low) / (high - low)).clamp(0, 1)
        plain = base ** (-2 * place / dim)
        angles = torch.arange(len(x))[:, None, None] * (plain / factor * ramp + plain * (1 - ramp))
        length = (0.07 * math.log(factor) + 1) / (0.1 * math.log(factor) + 1)
        turned = torch.polar(torch.full_like(angles, length), angles)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turned).flatten(-2)

    def experts(self, x):
        """Sigmoid scores; the bias chooses, in the best two of four groups, and does not weigh."""
        config, prefix = self.config, f"{self.prefix}mlp"
        scores = self.linear(x, "mlp.gate").sigmoid()
        chooses = scores + self.tensors[f"{prefix}.gate.e_score_correction_bias"]
        out = gated_mlp(self.tensors, x, f"{prefix}.shared_experts")
        for row in range(len(x)):
            groups = chooses[row].view(4, 2).sum(-1).topk(2).indices.tolist()
            inside = torch.tensor([expert // 2 in groups for expert in range(8)])
            chosen = chooses[row].masked_fill(~inside, -torch.inf).topk(3).indices
            weights = scores[row, chosen] / scores[row, chosen].sum()
            for weight, expert in zip(weights, chosen.tolist(), strict=True):
                one = gated_mlp(self.tensors, x[row : row + 1], f"{prefix}.experts.{expert}")[0]
                out[row] += config.routed_scaling_factor * weight * one
        return out


@both_kernels
def test_logits_and_states_are_those_of_the_definition(tmp_path, kernels):
    config = fixed_latent("deepseek_v3", num_nextn_predict_layers=1)
    _, head = opened(write_nextn(tmp_path), kernels)
    defined = Definition(tmp_path, config)
    require_defined_states(head, defined.feedback, defined.lm_head, norm=defined.last_norm)


def test_rows_that_are_not_kept_leave_their_latents_alone(tmp_path):
    _, head = opened(write_nextn(tmp_path))
    require_kept_rows_alone(head, VOCAB, HIDDEN)


def test_it_reads_what_the_target_makes_its_logits_from(tmp_path):
    target, head = opened(write_nextn(tmp_path))
    require_reads_what_logits_are_made_from(head, HIDDEN)
    assert NextNCheckpoint(tmp_path).aux_layers(3) == ()
    assert head.caches == target.caches[:1]


def test_copies_of_the_target_s_embedding_and_head_are_not_kept(tmp_path):
    target, head = opened(write_nextn(tmp_path))
    assert head.embedding is target.embedding
    assert head.lm_head is target.head
    path, prefix = tmp_path / "model.safetensors", nextn_prefix(fixed_latent("deepseek_v3"))
    tensors = load_file(path)
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"{prefix}{name}.weight"][5] += 1
    save_file(tensors, path)
    target, head = opened(tmp_path)
    for own, shared in ((head.embedding, target.embedding), (head.lm_head, target.head)):
        found = own.rows(torch.arange(VOCAB)) - shared.rows(torch.arange(VOCAB))
        assert found.abs().sum(1).nonzero().flatten().tolist() == [5]


def write_quantized(folder, group_size, *modules) -> None:
    """Some of a checkpoint's modules in compressed-tensors' form, fp8 without a group size."""
    config, tensors = read_checkpoint(folder)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    if group_size is not None:
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
    kind = "float-quantized" if group_size is None else "pack-quantized"
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"all": {"targets": ["Linear"], "weights": weights, "format": kind}},
        "ignore": ["re:.*(proj|mqa|gate)$"],
    }
    scheme = float8("channel") if group_size is None else int4(group_size)
    for module in modules:
        tensors |= scheme.tensors(module, tensors.pop(f"{module}.weight"))
    write_checkpoint(folder, config, tensors)


@pytest.mark.parametrize("group_size", [None, 32])
def test_a_quantized_copy_of_the_target_s_head_is_not_kept(tmp_path, group_size):
    own = f"{nextn_prefix(fixed_latent('deepseek_v3'))}shared_head.head"
    write_quantized(write_nextn(tmp_path), group_size, "lm_head", own)
    target, head = opened(tmp_path)
    assert head.lm_head is target.head
    assert not isinstance(head.lm_head, UnquantizedWeight)


@pytest.mark.parametrize("group_size", [None, 32])
def test_a_module_s_own_quantized_head_makes_its_logits(tmp_path, group_size):
    """Another one than the target's, which is quantized too or not."""
    own = f"{nextn_prefix(fixed_latent('deepseek_v3'))}shared_head.head"
    for name, modules in (("both", ["lm_head", own]), ("own", [own])):
        file = write_nextn(tmp_path / name) / "model.safetensors"
        tensors = load_file(file)
        meant = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(4))
        save_file(tensors | {f"{own}.weight": meant}, file)
        write_quantized(file.parent, group_size, *modules)
        target, head = opened(file.parent)
        assert isinstance(target.head, UnquantizedWeight) == (name == "own")
        x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(5))
        error = head.compute_logits(x) - x @ meant.T
        assert error.norm() < (0.05 if group_size is None else 0.2) * (x @ meant.T).norm()
        some = torch.tensor([2, 3, 7])
        few = NextNCheckpoint(file.parent).load(target, **OPTIONS, token_ids=some)
        torch.testing.assert_close(few.compute_logits(x), head.compute_logits(x)[:, some])


def test_the_module_of_an_architecture_is_chosen(tmp_path):
    assert isinstance(open_module(write_nextn(tmp_path / "a")), NextNCheckpoint)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM"):
        open_module(write_llama(tmp_path / "b"))
    with pytest.raises(UnsupportedError, match="has no NextN module"):
        NextNCheckpoint(tmp_path / "b")


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (0, CheckpointError, "holds no NextN module"),
        (2, UnsupportedError, "of 2 layers"),
    ],
)
def test_other_numbers_of_layers_are_refused(tmp_path, count, error, message):
    write_nextn(tmp_path)
    change_config(tmp_path, num_nextn_predict_layers=count)
    with pytest.raises(error, match=message) as caught:
        NextNCheckpoint(tmp_path)
    assert caught.value.remedy


def test_a_checkpoint_without_the_module_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no NextN module"):
        NextNCheckpoint(write_latent(tmp_path, "glm4_moe_lite"))


def test_another_target_is_refused(tmp_path):
    checkpoint = NextNCheckpoint(write_nextn(tmp_path / "a"))
    checkpoint.require_fit(checkpoint.config)
    with pytest.raises(DrafterMismatchError, match="64 tokens, the target has 72"):
        checkpoint.require_fit(
            read_config(write_latent(tmp_path / "b", "deepseek_v3", vocab_size=72))
        )


def test_dummy_weights_need_the_config_alone(tmp_path):
    fixed_latent("glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"]).save_pretrained(
        tmp_path
    )
    target = load_model(tmp_path, **OPTIONS, load_format="dummy")
    head = NextNCheckpoint(tmp_path, load_format="dummy").load(target, **OPTIONS)
    states = head.forward(
        torch.tensor([1, 2, 3]), torch.randn(3, HIDDEN), rows_of_one_slot(0, 3), empty_kv(head)
    )
    assert head.compute_logits(states.last).isfinite().all()
