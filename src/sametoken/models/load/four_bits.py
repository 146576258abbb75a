"""Linears in 4 bits by GPTQ and AWQ: all that are stored so, as their writers' configs tell.

``gptq`` is that of AutoGPTQ and GPTQModel, ``awq`` that of AutoAWQ; AutoRound exports to both.
"""

from __future__ import annotations

from sametoken.models.load.by_target import HEAD, ByTarget, all_stored
from sametoken.models.load.int4_linear import AWQ, GPTQ, GPTQ_V2, Int4Linear
from sametoken.models.load.settings import Settings, require_known, unsupported

#: The version of AWQ's layout that is read.
_GEMM = "gemm"
#: How a checkpoint was made, and by which kernels its writers run it.
OF_QUANTIZING = (
    "act_data_type", "act_dynamic", "act_group_aware", "act_group_size", "act_sym", "amp",
    "autoround_version", "backend", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "damp_auto_increment", "damp_percent",
    "dataset", "disable_exllama", "do_fuse", "enable_minmax_tuning", "enable_norm_bias_tuning",
    "enable_quanted_input", "exllama_config", "fuse_max_seq_len", "gradient_accumulate_steps",
    "hyb_act", "iters", "low_gpu_mem_usage", "lr", "max_input_length", "meta", "minmax_lr",
    "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "mse", "n_samples",
    "nsamples", "pack_impl", "pad_token_id", "provider", "quant_block_list", "quantizer",
    "scale_dtype", "seqlen", "static_attention_granularity", "static_kv_granularity",
    "to_quant_block_names", "tokenizer", "train_bs", "true_sequential", "use_cuda_fp16",
    "use_exllama",
)  # fmt: skip
#: What else writers of both 4-bit methods say, where it means what is read.
_OF_FOUR_BITS: dict[str, tuple[object, ...]] = {
    "sym": (True, False),
    "lm_head": (True, False),
    "pack_dtype": ("int32",),
    "data_type": ("int",),
    "act_bits": (16, 32),
}


def read_gptq(settings: Settings) -> ByTarget:
    """``quant_method: gptq``; errors as for ``read_quantization``."""
    layouts = (GPTQ, GPTQ_V2)
    require_known(
        settings,
        used=("bits", "group_size", "checkpoint_format", "dynamic"),
        only={
            **_OF_FOUR_BITS,
            "desc_act": (True, False),
            "static_groups": (True, False),
            "is_marlin_format": (False,),
            "format": layouts,
            "method": (GPTQ,),
        },
        unused=("quant_method", *OF_QUANTIZING),
    )
    _require_no_overrides(settings)
    layout = settings.get("checkpoint_format", settings.get("format", GPTQ))
    if layout not in layouts:
        raise unsupported(settings, "checkpoint_format", f"use {GPTQ} or {GPTQ_V2}")
    return _four_bits_stored(settings, layout, symmetric=settings.get("sym") is True)


def read_awq(settings: Settings) -> ByTarget:
    """``quant_method: awq``; errors as for ``read_quantization``."""
    require_known(
        settings,
        used=("bits", "group_size", "version", "format", "dynamic"),
        only={
            **_OF_FOUR_BITS,
            # Zeros are stored either way; AutoRound's symmetric ones are all 8.
            "zero_point": (True, False),
            "desc_act": (False,),
            "checkpoint_format": (_GEMM,),
            "method": (AWQ,),
        },
        unused=("quant_method", "modules_to_not_convert", *OF_QUANTIZING),
    )
    _require_no_overrides(settings)
    version = settings.get("version", settings.get("format", _GEMM))
    if str(version).lower() != _GEMM:
        raise unsupported(settings, "version", f"use {_GEMM}")
    return _four_bits_stored(settings, AWQ)


def _four_bits_stored(settings: Settings, layout: str, *, symmetric: bool = False) -> ByTarget:
    besides = () if settings.get("lm_head") else (HEAD,)
    return all_stored(Int4Linear(layout, _group_size(settings), symmetric), besides)


def _require_no_overrides(settings: Settings) -> None:
    """Refuse GPTQModel's ``dynamic`` where it gives some modules settings of their own.

    Rules of ``-:`` leave modules out, which is seen from what is stored; empty ones change nothing.
    """
    rules = settings.nested("dynamic").items()
    if any(own and not rule.startswith("-:") for rule, own in rules):
        raise unsupported(settings, "dynamic", "use a checkpoint whose linears share one form")


def _group_size(settings: Settings) -> int:
    if settings.get("bits") != 4:
        raise unsupported(settings, "bits", "use 4")
    size = settings.get("group_size", 128)
    return size if size == -1 else settings.integer("group_size", 128)
