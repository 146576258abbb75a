"""GGUF's architectures as Hugging Face's: names of tensors, keys of settings, order of rows.

What llama.cpp's converter writes (``conversion/`` there) and what its loaders imply (``src/models``
there). Keys are given without the architecture's prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from sametoken.errors import UnsupportedError
from sametoken.models.layer_types import FULL, SLIDING, full_every
from sametoken.models.load.settings import ANOTHER, COMPARE, MAX_LAYERS, Settings, require_values

WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"
#: Factors on cos and sin of a scaled rope, by the converters of the time.
ATTENTION_FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
#: Stands for an expert's number where a tensor of the file holds those of all.
EACH = "*"
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3

_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>[\w.]+)\.(?P<ending>weight|bias)")
_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EACH}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EACH}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
#: Ends of texts, turns and messages, of which old files give the id of one. llama.cpp stops at all
#: that a vocabulary has.
_ENDS = ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")


def _nothing(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A GGUF architecture as a Hugging Face class.

    Attributes:
        name: the class.
        names: modules, or tensors with their endings, by the file's names; beside those of all.
        interleaved: whether llama.cpp rotates element 2j of q and k with 2j + 1, for which its
            converter reorders rows; our kernels rotate j with j + head_dim / 2.
        added_to_norms: what the converter adds to the weights of norms.
        of_one_row: ends of names of matrices of one row, which the converter makes vectors.
        sizes: counts without which there is no model, by their keys in config.json.
        keys: other settings, by their keys in config.json; an absent one keeps the class's default.
        values: settings of all files of the architecture.
        derived: settings that follow from several keys, or from the names of tensors.
        reads: the keys that ``derived`` reads.
        only: keys with the values that mean nothing else.
        rope: settings of a scaled rope that files leave out.
        ends: tokens at which a text, a turn or a message ends, beside those of all.
        forms: the architecture of files that set a key.
    """

    name: str
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    added_to_norms: float = 0.0
    of_one_row: tuple[str, ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[Settings, Collection[str]], dict[str, Any]] = _nothing
    reads: tuple[str, ...] = ()
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    forms: Mapping[str, Architecture] = field(default_factory=dict)

    @property
    def known(self) -> tuple[str, ...]:
        """The keys that it reads, beside those of all architectures."""
        return (*self.sizes.values(), *self.keys.values(), *self.reads, *self.only)

    @property
    def all_ends(self) -> tuple[str, ...]:
        """The tokens at which a text, a turn or a message ends."""
        return (*_ENDS, *self.ends)

    def of(self, settings: Settings) -> Architecture:
        """The form of a file's settings."""
        found = (form for key, form in self.forms.items() if settings.get(key))
        return next(found, self)

    def config(self, settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
        """What config.json has beside the keys of all architectures.

        Args:
            settings: the file's.
            tensors: names in the file.

        Raises:
            CheckpointError: a key is missing or impossible.
            UnsupportedError: a value is not implemented.
        """
        sizes = {key: settings.integer(own) for key, own in self.sizes.items()}
        given = {key: settings.get(own) for key, own in self.keys.items()}
        given = {key: value for key, value in given.items() if value is not None}
        return {**self.values, **sizes, **given, **self.derived(settings, tensors)}

    def hugging_face_name(self, name: str) -> str:
        """A tensor's name in checkpoints of transformers; one that has none keeps its own."""
        match = _NAME.fullmatch(name)
        if match is None:
            return name
        names, (stem, ending) = {**_NAMES, **self.names}, match.group("stem", "ending")
        layer = f"model.layers.{match['layer']}." if match["layer"] else ""
        if whole := names.get(f"{stem}.{ending}"):
            return layer + whole
        return f"{layer}{names[stem]}.{ending}" if stem in names else name


def _windows(settings: Settings, every: int) -> dict[str, Any]:
    """The window, and the layers that have it: all but each ``every``-th, if no pattern is given.

    Raises:
        UnsupportedError: the pattern is neither a period nor one switch for each layer.
    """
    num_layers = settings.integer("block_count", most=MAX_LAYERS)
    if not settings.get(WINDOW):
        return {"sliding_window": None, "layer_types": [FULL] * num_layers}
    pattern = settings.get(_PATTERN, every)
    if isinstance(pattern, list) and set(pattern) <= {False, True}:
        types = [SLIDING if has_window else FULL for has_window in pattern]
    elif isinstance(pattern, int) and pattern > 0:
        types = full_every(pattern, num_layers)
    else:
        raise UnsupportedError(
            f"{settings.location}: {settings.prefix}{_PATTERN}={short(pattern)} is not supported",
            COMPARE,
        )
    return {"sliding_window": settings.positions(WINDOW), "layer_types": types}


def _gemma3(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    """Windows in five layers of six; only the model of 62 layers has a scale of its own."""
    hidden, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    head_dim = settings.integer("attention.key_length", max(hidden // heads, 1))
    is_27b = settings.get("block_count") == 62
    scale = {"query_pre_attn_scalar": hidden // heads if is_27b else head_dim}
    return scale | _windows(settings, 6)


def _gpt_oss(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    return _windows(settings, 2)


def _olmo3(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    return _windows(settings, 4)


def _phi3(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    """Of Phi-4, which has no window, the converter writes one of 0."""
    return {"sliding_window": settings.get(WINDOW) or None}


def _seed_oss(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    return {"attention_out_bias": "blk.0.attn_output.bias" in tensors}


def _glm4_moe(settings: Settings, tensors: Collection[str]) -> dict[str, Any]:
    """``block_count`` counts the layers of a NextN module too."""
    key = "nextn_predict_layers"
    num_modules = settings.integer(key) if settings.get(key) else 0
    num_layers = settings.integer("block_count", most=MAX_LAYERS) - num_modules
    return {
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": num_modules,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }


_ROUTED: Mapping[str, str] = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_OF_DEEPSEEK: Mapping[str, str] = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_OLMO3 = Architecture(
    "Olmo3ForCausalLM",
    derived=_olmo3,
    reads=(WINDOW, _PATTERN, *ATTENTION_FACTORS),
    # Without a name of their own in config.json, windows rotate by it.
    keys={"rope_theta": "rope.freq_base_swa"},
)
_MIXTRAL = Architecture(
    "MixtralForCausalLM",
    names={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": f"block_sparse_moe.experts.{EACH}.w1",
        "ffn_up_exps": f"block_sparse_moe.experts.{EACH}.w3",
        "ffn_down_exps": f"block_sparse_moe.experts.{EACH}.w2",
    },
    interleaved=True,
    sizes={"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
)
_ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", interleaved=True, forms={"expert_count": _MIXTRAL}),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        sizes=_ROUTED,
        # llama.cpp normalises the weights of all files.
        values={"norm_topk_prob": True},
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        names={
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        of_one_row=("shared_expert_gate.weight",),
        sizes={**_ROUTED, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        names={"ffn_norm": "pre_feedforward_layernorm"},
        added_to_norms=1.0,
        keys={
            "final_logit_softcapping": "final_logit_softcapping",
            "rope_local_base_freq": "rope.freq_base_swa",
        },
        derived=_gemma3,
        reads=(WINDOW, _PATTERN),
        ends=("<end_of_turn>",),
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        names={"attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
        sizes={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": WINDOW,
        },
        derived=_gpt_oss,
        reads=(_PATTERN,),
        only={"expert_gating_func": (_SOFTMAX, _SOFTMAX_OF_CHOSEN)},
        rope={"truncate": False},
        ends=("<|return|>", "<|call|>", "<|endoftext|>"),
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys={"original_max_position_embeddings": "rope.scaling.original_context_length"},
        derived=_phi3,
        reads=(WINDOW, *ATTENTION_FACTORS),
        ends=("<|end|>", "<|endoftext|>"),
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        interleaved=True,
        keys={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        only={"rope.scaling.finetuned": (True,)},
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", forms={WINDOW: _OLMO3}),
    "smollm3": Architecture("SmolLM3ForCausalLM", interleaved=True),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        names={
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            "nextn.eh_proj": "eh_proj",
            "nextn.embed_tokens": "embed_tokens",
            "nextn.enorm": "enorm",
            "nextn.hnorm": "hnorm",
            "nextn.shared_head_head": "shared_head.head",
            "nextn.shared_head_norm": "shared_head.norm",
        },
        sizes=_OF_DEEPSEEK,
        keys={
            "n_shared_experts": "expert_shared_count",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
            "norm_topk_prob": "expert_weights_norm",
            "routed_scaling_factor": "expert_weights_scale",
            "first_k_dense_replace": "leading_dense_block_count",
        },
        derived=_glm4_moe,
        reads=("nextn_predict_layers",),
        only={"expert_gating_func": (_SIGMOID,)},
        ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
    ),
    "seed_oss": Architecture("SeedOssForCausalLM", derived=_seed_oss),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM",
        names={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        sizes=_OF_DEEPSEEK,
        keys={
            "n_shared_experts": "expert_shared_count",
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
        },
        reads=("expert_shared_feed_forward_length",),
    ),
}

#: Values that mean nothing else, in files of all architectures that do not read them.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (_SOFTMAX,),
}
#: For operations that an architecture does not have; a file that sets one is refused by name.
_REFUSED = (
    WINDOW,
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_scale",
    "expert_count",
    "expert_group_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_weights_scale",
    "leading_dense_block_count",
    "nextn_predict_layers",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor",
    *ATTENTION_FACTORS,
)


def require_architecture(name: str, location: object) -> Architecture:
    """The architecture of a name; any other is refused.

    Args:
        name: in GGUF's words.
        location: the file or its repository, for messages.

    Raises:
        UnsupportedError: it is not implemented.
    """
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{location} has GGUF architecture {short(name)}", f"known: {', '.join(_ARCHITECTURES)}"
        )
    return _ARCHITECTURES[name]


def form_of(name: str, settings: Settings) -> Architecture:
    """The architecture of a file, with its form of settings.

    Args:
        name: in GGUF's words.
        settings: the file's, by keys of the architecture.

    Raises:
        UnsupportedError: it is not implemented, or the file sets what it has not.
    """
    architecture = require_architecture(name, settings.location).of(settings)
    for key in _REFUSED:
        if key not in architecture.known and (value := settings.get(key)):
            raise UnsupportedError(
                f"{settings.location} sets {settings.prefix}{key}={short(value)}, "
                "which is not implemented",
                ANOTHER,
            )
    require_values(settings, {**_ONLY, **architecture.only})
    return architecture
