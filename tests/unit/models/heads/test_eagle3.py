"""EAGLE-3 heads of both layouts against the definition in plain PyTorch."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import (
    DRAFT_IDS,
    HIDDEN,
    NO_FC,
    VOCAB,
    as_pickle,
    head_tensors,
    write_safeailab,
    write_speculators,
)
from helpers.heads import (
    OPTIONS,
    SharedTarget,
    attended,
    both_kernels,
    empty_kv,
    gated_mlp,
    linear,
    require_defined_states,
    require_kept_rows_alone,
    require_target_of_its_sizes,
    rms_norm,
    rotated,
    rows_of_one_slot,
)
from sametoken.errors import CheckpointError, DrafterMismatchError, UnsupportedError
from sametoken.layers.parallel import of_rank
from sametoken.models.base import HiddenStates
from sametoken.models.heads.eagle3 import Eagle3Checkpoint
from sametoken.ops.reference import ReferenceKernels


def load(directory, target=None, kernels=OPTIONS["kernels"]):
    options = OPTIONS | {"kernels": kernels}
    return Eagle3Checkpoint(directory).load(target or SharedTarget(kernels=kernels), **options)


def defined_head(tensors, embedding, flags, token_ids, hidden):
    """The whole sequence at once: what is fed back."""

    def norm(x, name):
        return rms_norm(x, tensors[f"{name}.weight"])

    def heads(x, name):
        return linear(tensors, x, f"layers.0.self_attn.{name}_proj").view(len(x), -1, 8)

    layer = "layers.0"
    normed = norm(hidden, f"{layer}.hidden_norm")
    residual = normed if flags.get("norm_before_residual") else hidden
    x = torch.cat((norm(embedding[token_ids], f"{layer}.input_layernorm"), normed), -1)
    q, k, v = (heads(x, name).transpose(0, 1) for name in "qkv")
    if f"{layer}.self_attn.q_norm.weight" in tensors:
        q, k = norm(q, f"{layer}.self_attn.q_norm"), norm(k, f"{layer}.self_attn.k_norm")
    width = flags.get("rotated", 8)
    x = attended(rotated(q, width), rotated(k, width), v, flags.get("window"))
    x = residual + linear(tensors, x, f"{layer}.self_attn.o_proj")
    x = x + gated_mlp(tensors, norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
    return norm(x, "norm") if flags.get("norm_output") else x


def require_defined(head, tensors, **flags) -> None:
    """That a head computes what it is defined as, from states that are combined already."""
    embedding = tensors.get("embed_tokens.weight", SharedTarget().embedding_matrix)

    def norm(states):
        return states if flags.get("norm_output") else rms_norm(states, tensors["norm.weight"])

    definition = partial(defined_head, tensors, embedding, flags)
    require_defined_states(head, definition, tensors["lm_head.weight"], norm=norm)


def defined_combine(tensors, auxiliary, flags):
    def norm(x, name):
        return rms_norm(x, tensors[f"{name}.weight"])

    if flags.get("norm_before_fc"):
        auxiliary = norm(auxiliary, "input_norm")
    if flags.get("fc_norm"):
        parts = auxiliary.chunk(3, -1)
        auxiliary = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
    return auxiliary @ tensors["fc.weight"].T


FLAGS = (
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "norm_before_residual": True},
    {"attention_bias": True},
    {"own_embedding": True},
    {"full_vocab": True},
)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags) or "plain")
@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_logits_and_states_are_those_of_the_definition(tmp_path, layout, flags):
    tensors = head_tensors(5, **flags)
    settings = {k: v for k, v in flags.items() if k not in ("own_embedding", "full_vocab")}
    if layout == "safeailab":
        write_safeailab(tmp_path, tensors, **settings)
    else:
        bias = {"attention_bias": settings.pop("attention_bias", False)}
        write_speculators(tmp_path, tensors, bias, **settings)
    head = load(tmp_path)
    auxiliary = torch.randn(9, 3 * HIDDEN, generator=torch.Generator().manual_seed(1))
    combined = defined_combine(tensors, auxiliary, flags)
    torch.testing.assert_close(head.combine(auxiliary), combined, atol=1e-4, rtol=1e-4)
    require_defined(head, tensors, **flags)
    proposed = None if head.token_ids is None else tuple(head.token_ids.tolist())
    assert proposed == (None if flags.get("full_vocab") else DRAFT_IDS)


@both_kernels
@pytest.mark.parametrize(
    "flags", [*FLAGS, {"eagle_config": NO_FC}], ids=lambda flags: "-".join(flags) or "plain"
)
def test_a_pass_leaves_the_target_s_states_as_they_are(tmp_path, flags, kernels):
    settings = {k: v for k, v in flags.items() if k not in ("own_embedding", "full_vocab")}
    head = load(write_safeailab(tmp_path, head_tensors(5, **flags), **settings), kernels=kernels)
    hidden = HiddenStates(torch.randn(5, HIDDEN), torch.randn(5, 3 * HIDDEN))
    auxiliary, last, rows = hidden.auxiliary.clone(), hidden.last.clone(), torch.tensor([3, 0])
    given = head.target_states(hidden, None)
    assert torch.equal(head.target_states(hidden, rows), given[rows])
    head.forward(torch.arange(5), given, rows_of_one_slot(0, 5), empty_kv(head))
    assert torch.equal(hidden.auxiliary, auxiliary)
    assert torch.equal(hidden.last, last)


def test_a_head_with_qk_norm(tmp_path):
    tensors = head_tensors(6)
    for name in ("q_norm", "k_norm"):
        tensors[f"layers.0.self_attn.{name}.weight"] = torch.linspace(0.5, 2.0, 8)
    require_defined(load(write_speculators(tmp_path, tensors)), tensors)


@both_kernels
@pytest.mark.parametrize(
    "settings",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10_000.0}},
    ],
    ids=["top", "rope_parameters"],
)
def test_a_head_that_rotates_a_part_as_those_for_qwen3_5(tmp_path, settings, kernels):
    tensors = head_tensors(6)
    head = load(write_safeailab(tmp_path, tensors, **settings), kernels=kernels)
    require_defined(head, tensors, rotated=4)


SLIDING = {"layer_types": ["sliding_attention"]}


@both_kernels
@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
@pytest.mark.parametrize(
    ("settings", "window"),
    [
        (SLIDING | {"sliding_window": 3}, 3),
        ({"use_sliding_window": True, "sliding_window": 2}, 2),
        ({"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1}, None),
        (SLIDING | {"sliding_window": 40}, 40),
        # To a Llama's layers it means nothing.
        ({"sliding_window": 3}, None),
        ({"layer_types": ["full_attention"], "sliding_window": 3}, None),
    ],
)
def test_a_head_sees_its_layer_s_window(tmp_path, settings, window, layout, kernels):
    tensors = head_tensors(6)
    if layout == "safeailab":
        write_safeailab(tmp_path, tensors, **settings)
    else:
        write_speculators(tmp_path, tensors, settings)
    head = load(tmp_path, kernels=kernels)
    assert [cache.window for cache in head.caches] == [window]
    require_defined(head, tensors, window=window)


def test_a_window_of_no_width_or_of_other_layers_is_refused(tmp_path):
    for number, settings in enumerate((SLIDING, {"layer_types": [*SLIDING["layer_types"] * 2]})):
        write_safeailab(tmp_path / str(number), head_tensors(), **settings)
        with pytest.raises(CheckpointError, match=r"sliding_window=None|2 layer_types for 1 lay"):
            Eagle3Checkpoint(tmp_path / str(number))


def test_rope_settings_by_layer_type_are_those_of_the_layer(tmp_path):
    ropes = {
        "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 10_000.0},
        "sliding_attention": {"rope_theta": 10_000.0},
    }
    tensors = head_tensors(6)
    for kind, flags in (("full", {"rotated": 4}), ("sliding", {"window": 4})):
        types = {"layer_types": [f"{kind}_attention"], "sliding_window": 4}
        head = load(write_speculators(tmp_path / kind, tensors, types | {"rope_parameters": ropes}))
        require_defined(head, tensors, **flags)


@both_kernels
@pytest.mark.parametrize("flags", [{}, {"norm_before_residual": True, "norm_output": True}])
def test_rows_that_are_not_kept_leave_their_kv_alone(tmp_path, flags, kernels):
    head = load(write_safeailab(tmp_path, head_tensors(5), **flags), kernels=kernels)
    require_kept_rows_alone(head, VOCAB, HIDDEN)


@pytest.mark.parametrize("write", [write_safeailab, write_speculators])
@pytest.mark.parametrize("chunk_elements", [1 << 20, 2 * HIDDEN], ids=["whole", "chunks"])
def test_a_draft_vocabulary_in_any_order_is_sorted(tmp_path, monkeypatch, write, chunk_elements):
    monkeypatch.setattr("sametoken.models.load.sources.CHUNK_ELEMENTS", chunk_elements)
    tensors = head_tensors(8)
    ascending = load(write(tmp_path / "ascending", tensors))
    order = torch.randperm(len(DRAFT_IDS), generator=torch.Generator().manual_seed(4))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = torch.tensor(DRAFT_IDS)[order] - torch.arange(len(order))
    shuffled = load(write(tmp_path / "shuffled", tensors))
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(4))
    assert shuffled.token_ids.tolist() == list(DRAFT_IDS)
    assert torch.equal(shuffled.compute_logits(states), ascending.compute_logits(states))


class Packing(ReferenceKernels):
    """Notes the shapes of what it packs."""

    def __init__(self):
        self.shapes = []

    def pack(self, weight):
        self.shapes.append(tuple(weight.shape))
        return super().pack(weight)


@pytest.mark.parametrize("full_vocab", [False, True])
def test_a_rank_reads_no_more_than_its_rows_of_an_lm_head(tmp_path, full_vocab):
    tensors = head_tensors(8, full_vocab=full_vocab)
    checkpoint = Eagle3Checkpoint(write_safeailab(tmp_path, tensors))
    matrix = tensors["lm_head.weight"]
    for rank in range(2):
        kernels = Packing()
        ranks = SimpleNamespace(rank=rank, size=2)
        head = checkpoint.load(SharedTarget(), **OPTIONS | {"kernels": kernels, "parallel": ranks})
        own = of_rank(range(len(matrix)), ranks)
        assert torch.equal(head.lm_head.rows(torch.arange(len(own))), matrix[own.start : own.stop])
        assert (len(own), HIDDEN) in kernels.shapes
        assert tuple(matrix.shape) not in kernels.shapes


def test_an_lm_head_may_come_from_the_target(tmp_path):
    tensors = head_tensors(7, full_vocab=True)
    write_safeailab(tmp_path, tensors)
    del tensors["lm_head.weight"]
    target = SharedTarget()
    save_file(tensors, tmp_path / "model.safetensors")
    assert load(tmp_path, target).lm_head is target.head


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 32]}, (1, 5, 32)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 15, 28],
                "eagle_aux_layer_semantics": "sglang",
            },
            (2, 16, 29),
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [20, 26, 32]}}, (20, 26, 32)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}, (2, 16, 29)),
    ],
    ids=["default", "vllm", "sglang", "nested", "nested-up-to-the-end", "nested-inputs"],
)
def test_auxiliary_layers(tmp_path, settings, layers):
    write_safeailab(tmp_path, head_tensors(), **settings)
    assert Eagle3Checkpoint(tmp_path).aux_layers(32) == layers


@pytest.mark.parametrize("rows", [None, torch.arange(9)])
def test_a_head_without_fc_takes_the_target_s_last_states(tmp_path, rows):
    tensors = head_tensors(5, eagle_config=NO_FC)
    write_safeailab(tmp_path, tensors, eagle_config=NO_FC)
    head, last = load(tmp_path), torch.randn(9, HIDDEN)
    assert Eagle3Checkpoint(tmp_path).aux_layers(8) == ()
    hidden = HiddenStates(last.clone(), torch.empty(9, 0))
    assert torch.equal(head.target_states(hidden, rows), last)
    require_defined(head, tensors)


def test_an_fc_that_no_auxiliary_states_enter_is_refused(tmp_path):
    """NVIDIA's heads of the first EAGLE say so too, and have one of embedding and state."""
    write_safeailab(tmp_path, head_tensors(), eagle_config=NO_FC)
    with pytest.raises(UnsupportedError, match=r"fc\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("n", [24, 32, 36, 61])
def test_the_default_of_nvidia_s_trainer_is_the_reference_s(tmp_path, n):
    """It counts outputs; nvidia/gpt-oss-120b-Eagle3-long-context says 1, 17 and 32 of 36."""
    ids = {"eagle_aux_hidden_state_layer_ids": [1, n // 2 - 1, n - 4]}
    nvidia = write_safeailab(tmp_path / "nvidia", head_tensors(), eagle_config=ids)
    default = write_safeailab(tmp_path / "default", head_tensors())
    layers = Eagle3Checkpoint(nvidia).aux_layers(n)
    assert layers == Eagle3Checkpoint(default).aux_layers(n) == (2, n // 2, n - 3)


def test_a_layer_that_the_target_lacks_is_refused(tmp_path):
    write_safeailab(tmp_path, head_tensors(), eagle_aux_hidden_state_layer_ids=[1, 5, 9])
    with pytest.raises(DrafterMismatchError, match=r"\(1, 5, 9\), the target has 8 layers"):
        Eagle3Checkpoint(tmp_path).aux_layers(8)


def test_a_head_for_another_target_is_refused(tmp_path):
    write = partial(write_safeailab, tensors=head_tensors())
    require_target_of_its_sizes(Eagle3Checkpoint, write, "target_hidden_size", tmp_path)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"speculators_model_type": "peagle"}, "peagle"),
        ({"num_hidden_layers": 2, "eagle_config": {"next_layer_regular": True}}, "2 decoder"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 4}, "latent attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
        (
            {"layer_types": ["full_attention"] * 2, "rope_parameters": {"sliding_attention": {}}},
            "rope settings per layer type",
        ),
        ({"eagle_config": NO_FC, "target_hidden_size": 8}, "no fc and another hidden size"),
        ({"fc_norm": True, "norm_before_fc": True}, "two places"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, settings, what):
    write_safeailab(tmp_path, head_tensors(), **settings)
    with pytest.raises(UnsupportedError, match=what):
        Eagle3Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size=24 is not at most 23"),
        ({"norm_output": "false"}, "norm_output='false' is not true or false"),
        ({"eagle_config": {"norm_before_fc": []}}, r"norm_before_fc=\[\] is not true or false"),
    ],
)
def test_impossible_settings_are_named(tmp_path, settings, message):
    """A dummy's token map would lead to ids beyond the vocabulary."""
    write_safeailab(tmp_path, head_tensors(), **settings)
    with pytest.raises(CheckpointError, match=message):
        Eagle3Checkpoint(tmp_path, load_format="dummy")


def test_a_head_of_safeailab_has_one_layer_whatever_it_says(tmp_path):
    """That for Vicuna-13B says 40, as its target."""
    one = load(write_safeailab(tmp_path / "one", head_tensors()))
    says_40 = load(write_safeailab(tmp_path / "40", head_tensors(), num_hidden_layers=40))
    assert says_40.caches == one.caches
    assert torch.equal(says_40.fc.weight.matrix, one.fc.weight.matrix)
    second = {"layers.1.self_attn.q_proj.weight": torch.zeros(16, HIDDEN)}
    two = write_safeailab(tmp_path / "two", head_tensors() | second, num_hidden_layers=2)
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn"):
        load(two)


def test_a_switch_that_is_null_is_as_good_as_absent(tmp_path):
    head = write_speculators(tmp_path, head_tensors(), norm_before_residual=None)
    assert load(head).config.norm_before_residual


def test_a_pickled_head_is_the_same(tmp_path):
    files = write_safeailab(tmp_path / "files", head_tensors())
    pickled = write_safeailab(tmp_path / "pickled", head_tensors())
    as_pickle(pickled)
    ours, expected = load(pickled), load(files)
    assert torch.equal(ours.fc.weight.matrix, expected.fc.weight.matrix)
    assert torch.equal(ours.token_ids, expected.token_ids)


def test_broken_tensors_are_refused(tmp_path):
    write_safeailab(tmp_path, head_tensors())
    for name, value, message in (
        ("fc.weight", None, "fc.weight"),
        ("d2t", None, "d2t"),
        ("d2t", torch.zeros(len(DRAFT_IDS)), "d2t has dtype float32, no integers"),
        ("d2t", torch.full((len(DRAFT_IDS),), VOCAB), "outside a vocabulary of 23"),
        ("d2t", torch.arange(len(DRAFT_IDS)) // -2, "d2t names a token twice"),
        ("fc.weight", torch.zeros(HIDDEN, 2 * HIDDEN), "fc.weight"),
    ):
        tensors = head_tensors()
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)
    save_file(
        head_tensors() | {"mask_hidden": torch.zeros(1, HIDDEN)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UnsupportedError, match="mask_hidden"):
        load(tmp_path)
