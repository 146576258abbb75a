"""Linears in 4 bits by GPTQ and AWQ: all that are stored so, as their writers' configs tell.

``gptq`` is that of AutoGPTQ and GPTQModel, ``awq`` that of AutoAWQ; AutoRound exports to both.
Its own ``auto-round`` (github.com/intel/auto-round) is stored as one of them, and ``extra_config``
gives modules settings of their own, by name or by an expression.
"""

from __future__ import annotations

from collections import defaultdict

from sametoken.models.load.by_target import HEAD, ByTarget, Targeted, all_stored
from sametoken.models.load.int4_linear import AWQ, GPTQ, GPTQ_V2, Int4Linear
from sametoken.models.load.settings import (
    Settings,
    chosen,
    compiled,
    require_known,
    require_quick,
    unsupported,
)

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
#: Layouts by AutoRound's ``packing_format``; its own stores zeros as they are, its GPTQ less 1.
_PACKED_BY_AUTO_ROUND = {
    "auto_round:auto_gptq": GPTQ,
    "auto_round:gptq": GPTQ,
    "auto": GPTQ,
    "auto_round": GPTQ_V2,
    "auto_round:gptqmodel": GPTQ_V2,
    "auto_round:auto_awq": AWQ,
    "auto_round:awq": AWQ,
}
#: Of weights that are not quantized, and more.
_FLOAT_BITS = 16
#: What only an expression has, of the keys of ``extra_config``.
_SPECIAL = frozenset("*+?^$()[]{}|\\")


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
    layout = chosen(settings, "checkpoint_format", layouts, settings.get("format", GPTQ))
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


def read_auto_round(settings: Settings) -> ByTarget:
    """``quant_method: auto-round``; errors as for ``read_quantization``.

    The blocks that it names need no reading: what is stored shows them.
    """
    names: dict[Int4Linear | None, set[str]] = defaultdict(set)
    expressions = []
    for key, own in settings.objects("extra_config").items():
        given = {name: value for name, value in own.values.items() if value is not None}
        linear = _of_auto_round(Settings({**settings.values, **given}, own.location))
        if _SPECIAL.isdisjoint(key):
            names[linear].add(key)
        else:
            found = compiled(settings, f".*(?:{key})")
            expressions.append(Targeted(expressions=(found,), format=linear))
    named = [Targeted(frozenset(modules), format=one) for one, modules in names.items()]
    head = Targeted(expressions=(HEAD,))
    others = Targeted(everything=True, format=_of_auto_round(settings))
    whole = ByTarget((*named, head, *expressions, others))
    require_quick(settings, whole.expressions)
    return whole


def _of_auto_round(settings: Settings) -> Int4Linear | None:
    """The format of linears with these settings; None: unquantized."""
    bits = settings.get("bits")
    if isinstance(bits, int) and bits >= _FLOAT_BITS:
        return None
    require_known(
        settings,
        used=("bits", "group_size", "packing_format", "extra_config"),
        only={
            "sym": (True, False),
            "data_type": ("int",),
            "act_bits": (16, 32),
            "desc_act": (False,),
            "model_free": (True, False),
        },
        unused=("quant_method", *OF_QUANTIZING),
    )
    # Until May 2025 it was called backend, which names kernels since.
    key = "backend" if settings.get("packing_format") is None else "packing_format"
    packing, symmetric = settings.get(key, "auto"), settings.get("sym") is True
    if not isinstance(packing, str) or packing not in _PACKED_BY_AUTO_ROUND:
        raise unsupported(settings, key, f"use one of {', '.join(_PACKED_BY_AUTO_ROUND)}")
    if settings.get("model_free") and not symmetric:
        # This writer stores zeros less 1 and names the layout that has them as they are.
        raise unsupported(
            settings, "model_free", "use symmetric weights, or AutoRound's tuned ones"
        )
    return Int4Linear(_PACKED_BY_AUTO_ROUND[packing], _group_size(settings), symmetric)


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
