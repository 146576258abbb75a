"""Random models of every family, of sizes that kernels of a GPU have tiles for, and of others."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from helpers.families import FAMILIES, random_model
from helpers.families import SIZES as FAMILY_SIZES
from helpers.hybrids import FULL, LINEAR, write_hybrid
from helpers.latents import LATENTS, ROPES
from helpers.latents import SIZES as LATENT_SIZES
from helpers.nemotron import write_nemotron

HYBRIDS = ("qwen3_5", "qwen3_next", "nemotron_h")
#: Names for ``write_drawn``.
DRAWN = (*FAMILIES, *LATENTS, *HYBRIDS)
#: Those with recurrent layers or latent attention, whose prompts have a fast form.
WITH_FAST_PROMPTS = (*LATENTS, *HYBRIDS, "granite_hybrid", "bamba", "falcon_h1")
#: Their ``head_dim`` may be any, beside any number of heads; others' follows, or is fixed.
_ANY_HEADS = ("ministral", "qwen3_moe", "seed_oss", "smollm3", "mixtral", "hunyuan_dense")
_HEAD_DIMS = (16, 24, 40, 64, 80, 96, 128, 192, 256)
_STATE_DIMS = (4, 5, 8, 16, 24, 32, 64, 128)


def write_drawn(draw, folder: Path, name: str) -> int:
    """Write a random model of a family; the size of its vocabulary."""
    sizes = {
        "hidden_size": draw(st.sampled_from([32, 64, 96, 128, 256, 320])),
        "intermediate_size": draw(st.sampled_from([48, 96, 200, 512])),
        "vocab_size": draw(st.sampled_from([61, 300, 1500])),
        "max_position_embeddings": 2048,
    }
    seed = draw(st.integers(0, 99))
    if name == "nemotron_h":
        write_nemotron(folder, seed, **sizes | _heads(draw) | _nemotron(draw))
    elif name in HYBRIDS:
        # Theirs rotate a quarter of a head.
        write_hybrid(folder, name, seed, **sizes | _heads(draw, (16, 64, 80, 256)) | _delta(draw))
    elif name in LATENTS:
        config_class, own, _ = LATENTS[name]
        changes = {"rope_parameters": ROPES[0]} | own(draw) | _latents(draw, sizes["hidden_size"])
        random_model(config_class(**LATENT_SIZES | changes | sizes), seed).save_pretrained(folder)
    else:
        config_class, _, own = FAMILIES[name]
        changes = own | sizes | _changes(draw, name, own)
        if name == "gemma4":
            changes["vocab_size_per_layer_input"] = sizes["vocab_size"]
        random_model(config_class(**FAMILY_SIZES | changes), seed).save_pretrained(folder)
    return sizes["vocab_size"]


def _heads(draw, dims: tuple[int, ...] = _HEAD_DIMS) -> dict:
    kv = draw(st.sampled_from([1, 2, 4]))
    return {
        "num_key_value_heads": kv,
        "num_attention_heads": kv * draw(st.sampled_from([1, 2, 3, 5, 7])),
        "head_dim": draw(st.sampled_from(dims)),
    }


def _changes(draw, name: str, own: dict) -> dict:
    """Sizes of a family of transformers that it alone has, or has beside others."""
    changes = _heads(draw) if name in _ANY_HEADS else {}
    if "moe_intermediate_size" in own:
        changes["moe_intermediate_size"] = draw(st.sampled_from([16, 40, 64, 96, 128]))
    if "mamba_n_heads" in own:
        groups = draw(st.sampled_from([1, 2]))
        heads = groups * draw(st.sampled_from([1, 2, 4]))
        changes |= {"mamba_n_groups": groups, "mamba_n_heads": heads}
        changes["mamba_d_state"] = draw(st.sampled_from(_STATE_DIMS))
        if name == "falcon_h1":
            size = draw(st.sampled_from([4, 16, 24, 64]))
            changes |= {"mamba_d_head": size, "mamba_d_ssm": heads * size}
        else:
            changes |= {"mamba_expand": draw(st.sampled_from([1, 2])), "mamba_d_head": "auto"}
    return changes


def _latents(draw, hidden: int) -> dict:
    heads = draw(st.sampled_from([count for count in (1, 2, 5, 16, 20) if hidden % count == 0]))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": draw(st.sampled_from([24, 64, 512])),
        "q_lora_rank": draw(st.sampled_from([None, 20, 64])),
        "qk_rope_head_dim": draw(st.sampled_from([8, 64])),
        "qk_nope_head_dim": draw(st.sampled_from([12, 64])),
        "v_head_dim": draw(st.sampled_from([16, 64])),
        "moe_intermediate_size": draw(st.sampled_from([16, 40, 64])),
    }


def _nemotron(draw) -> dict:
    groups = draw(st.sampled_from([1, 2, 4]))
    return {
        "n_groups": groups,
        "mamba_num_heads": groups * draw(st.sampled_from([1, 2, 4])),
        "mamba_head_dim": draw(st.sampled_from([6, 16, 32, 64])),
        "ssm_state_size": draw(st.sampled_from(_STATE_DIMS)),
        "conv_kernel": draw(st.sampled_from([2, 3, 4])),
        "moe_intermediate_size": draw(st.sampled_from([12, 40, 64])),
    }


def _delta(draw) -> dict:
    key_heads = draw(st.sampled_from([1, 2, 3]))
    types = draw(st.sampled_from([(LINEAR, FULL), (FULL, LINEAR), (LINEAR, LINEAR, FULL)]))
    return {
        "layer_types": list(types),
        "num_hidden_layers": len(types),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(st.sampled_from([1, 2, 3])),
        "linear_key_head_dim": draw(st.sampled_from(_STATE_DIMS)),
        "linear_value_head_dim": draw(st.sampled_from([4, 16, 24, 48, 128])),
        "linear_conv_kernel_dim": draw(st.sampled_from([2, 3, 4])),
    }
