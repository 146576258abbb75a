"""vLLM's options that this engine does not have: which change nothing here, and which are refused.

Options that mean the same in both engines are fields of ``EngineConfig`` and ``ServerConfig``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sametoken.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of vLLM that are treated alike, for one reason.

    Attributes:
        why: the reason, a clause.
        values: names of those that take a value, separated by spaces.
        switches: names of those that are true or false, separated by spaces.
        instead: the remedy of a refusal; without one all values change nothing here.
        accepted: with one, the values that change nothing.
    """

    why: str
    values: str = ""
    switches: str = ""
    accepted: tuple[str, ...] = ("false",)
    instead: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names, with underscores."""
        return (*self.values.split(), *self.switches.split())

    def accepts(self, value: object) -> bool:
        """Whether a value is accepted; ``True`` and ``None`` are written true and none."""
        return not self.instead or str(value).lower() in self.accepted

    def require_accepted(
        self, value: object, spelled: str, refusal: Callable[[str, str], Exception] = ConfigError
    ) -> None:
        """Refuse a value that asks for something else than what happens here.

        Raises:
            ConfigError: names the option as it is ``spelled``, the reason and the remedy; another
                ``refusal`` does in its place.
        """
        if not self.accepts(value):
            raise refusal(f"{spelled} is not offered: {self.why}", self.instead)


#: Further spellings on vLLM's command line.
SHORT_FLAGS: Mapping[str, tuple[str, ...]] = {
    "api_server_count": ("-asc",),
    "compilation_config": ("-cc",),
    "data_parallel_size": ("-dp",),
    "decode_context_parallel_size": ("-dcp",),
    "enable_expert_parallel": ("-ep",),
    "nnodes": ("-n",),
    "optimization_level": ("-O",),
    "pipeline_parallel_size": ("-pp",),
    "quantization": ("-q",),
}

#: The table. What vLLM's command lines have and is neither here nor an option of ours is unknown.
VLLM_OPTIONS = (
    # Accepted without effect.
    VllmOptions(
        "code of a checkpoint is never run",
        values="code_revision",
        switches="trust_remote_code",
    ),
    VllmOptions(
        "steps are always enqueued ahead of the host; --steps-in-flight says how many",
        switches="async_scheduling disable_async_output_proc",
    ),
    VllmOptions(
        "--reasoning-parser alone says how reasoning is parted from the answer",
        switches="enable_reasoning",
    ),
    VllmOptions(
        "CUDA graphs are captured for fixed shapes; --enforce-eager turns them off",
        values="compilation_config optimization_level cudagraph_capture_sizes cuda_graph_sizes "
        "max_cudagraph_capture_size max_seq_len_to_capture",
    ),
    VllmOptions(
        "only text is served",
        values="limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_encoder_tp_mode "
        "media_io_kwargs allowed_local_media_path",
        switches="language_model_only skip_mm_profiling disable_mm_preprocessor_cache",
    ),
    VllmOptions(
        "requests and answers are never logged",
        values="max_log_len",
        switches="disable_log_requests",
    ),
    VllmOptions(
        "/health, /ready and /metrics are never logged", "disable_access_log_for_endpoints"
    ),
    VllmOptions("requests with tools need no flag", switches="enable_auto_tool_choice"),
    VllmOptions("these settings are vLLM's own", values="additional_config"),
    VllmOptions(
        "one implementation serves each device",
        values="attention_backend moe_backend all2all_backend mamba_backend",
        switches="disable_cascade_attn disable_custom_all_reduce use_v2_block_manager",
    ),
    VllmOptions(
        "recurrent state has memory of its own",
        values="mamba_block_size mamba_cache_mode",
        switches="disable_hybrid_kv_cache_manager",
    ),
    VllmOptions(
        "chunks of several prompts share a step; --prefill-chunk-size is the largest",
        values="max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold",
    ),
    VllmOptions("tokens are sent after every step", values="stream_interval"),
    VllmOptions("blocks have one hash", values="prefix_caching_hash_algo"),
    VllmOptions(
        "checkpoints have one loader",
        values="safetensors_load_strategy max_parallel_loading_workers model_loader_extra_config "
        "ignore_patterns",
        switches="use_tqdm_on_load",
    ),
    VllmOptions(
        "the engine always has a process of its own", switches="disable_frontend_multiprocessing"
    ),
    VllmOptions(
        "offline, a grammar that xgrammar compiles holds from the first token on",
        values="structured_outputs_config",
    ),
    VllmOptions(
        "usage shows prompt tokens from the prefix cache", switches="enable_prompt_tokens_details"
    ),
    VllmOptions("/metrics shows the load", switches="enable_server_load_tracking"),
    VllmOptions(
        "adapters that are there are on the device, in the dtype of the model",
        values="max_cpu_loras lora_dtype",
        switches="fully_sharded_loras",
    ),
    # Accepted with the values that describe what happens here anyway.
    VllmOptions(
        "prefill is always chunked",
        switches="enable_chunked_prefill",
        accepted=("true",),
        instead="leave the option out; --prefill-chunk-size is the largest chunk",
    ),
    VllmOptions(
        "a checkpoint's config.json says how its weights are quantized",
        values="quantization",
        accepted=("auto", "none"),
        instead="leave the option out; sametoken quantize writes a copy in fp8 or 4 bits, and a "
        'draft head takes "quantization": "fp8" in --speculative-config',
    ),
    VllmOptions(
        "scales of KV are the checkpoint's, or 1",
        switches="calculate_kv_scales",
        instead="use a checkpoint with a kv_cache_scheme",
    ),
    VllmOptions(
        "recurrent state is kept in one dtype",
        values="mamba_cache_dtype mamba_ssm_cache_dtype",
        accepted=("auto",),
        instead="use auto",
    ),
    VllmOptions(
        "a model is divided by layer widths alone",
        values="pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size",
        accepted=("1",),
        instead="use --tensor-parallel-size N",
    ),
    VllmOptions(
        "experts are divided by their width",
        switches="enable_expert_parallel enable_eplb",
        instead="use --tensor-parallel-size N",
    ),
    VllmOptions(
        "one server runs one engine",
        values="data_parallel_size data_parallel_size_local api_server_count",
        accepted=("1",),
        instead="use --ray --replicas N",
    ),
    VllmOptions(
        "ranks are processes of one machine",
        values="distributed_executor_backend",
        accepted=("mp", "uni"),
        instead="use --tensor-parallel-size N, or --ray --replicas N",
    ),
    VllmOptions(
        "all ranks of a model are on one machine",
        values="nnodes",
        accepted=("1",),
        instead="use --ray --replicas N for several machines",
    ),
    VllmOptions(
        "weights stay on the device",
        values="cpu_offload_gb",
        accepted=("0", "0.0", "none"),
        instead="use a smaller model, or --tensor-parallel-size N",
    ),
    VllmOptions(
        "requests run in the order in which they came",
        values="scheduling_policy",
        accepted=("fcfs",),
        instead="leave the option out",
    ),
    VllmOptions(
        "every model is a decoder that generates text",
        values="runner task",
        accepted=("auto", "generate"),
        instead="leave the option out",
    ),
    VllmOptions(
        "checkpoints and tokenizers are read in Hugging Face's formats and GGUF",
        values="tokenizer_mode config_format convert model_impl",
        accepted=("auto", "hf", "none", "vllm"),
        instead="use auto",
    ),
    VllmOptions(
        "xgrammar compiles every grammar",
        values="guided_decoding_backend",
        accepted=("auto", "xgrammar"),
        instead="use xgrammar",
    ),
    VllmOptions(
        "a message's content reaches the template as text",
        values="chat_template_content_format",
        accepted=("auto", "string"),
        instead="use string",
    ),
    VllmOptions(
        'the template sees the tools of a request, with tool_choice "none" too',
        switches="exclude_tools_when_tool_choice_none",
        instead="send no tools where the model is not to see them",
    ),
    VllmOptions(
        "requests and answers are never logged",
        switches="enable_log_requests enable_log_outputs",
        instead="the access log has a line for each request",
    ),
    # Refused.
    VllmOptions(
        "a tokenizer's revision is part of its name",
        values="tokenizer_revision",
        accepted=(),
        instead="use --tokenizer ORG/NAME@REVISION",
    ),
    VllmOptions(
        "downloads go to the cache of Hugging Face",
        values="download_dir",
        accepted=(),
        instead="set HF_HUB_CACHE",
    ),
    VllmOptions(
        "keys on a command line are seen by every user of the machine",
        values="hf_token",
        accepted=(),
        instead="set HF_TOKEN",
    ),
    VllmOptions(
        "a checkpoint is served as it describes itself",
        values="hf_overrides hf_config_path rope_scaling rope_theta override_generation_config "
        "override_pooler_config pooler_config",
        accepted=(),
        instead="change its config.json, or use --generation-config DIR",
    ),
    VllmOptions(
        "a server needs its tokenizer",
        switches="skip_tokenizer_init",
        instead="use LLM(skip_tokenizer_init=True) for prompts of token ids",
    ),
    VllmOptions(
        "code from outside the package is never run",
        values="tool_parser_plugin reasoning_parser_plugin logits_processors "
        "logits_processor_pattern middleware worker_cls worker_extension_cls scheduler_cls",
        accepted=(),
        instead="use the parsers that are built in, or a proxy before the server",
    ),
    VllmOptions(
        "a request's template could take the server's time",
        switches="trust_request_chat_template",
        instead="use --chat-template FILE",
    ),
    VllmOptions(
        "variables of the template belong to a request",
        values="default_chat_template_kwargs",
        accepted=(),
        instead="send chat_template_kwargs, or use --chat-template FILE",
    ),
    VllmOptions(
        "adapters are LoRA's, and a request names its own",
        values="qlora_adapter_name_or_path default_mm_loras",
        switches="enable_prompt_adapter",
        instead="use --lora-modules NAME=PATH",
    ),
    VllmOptions(
        "speculation has one option",
        values="speculative_model num_speculative_tokens ngram_prompt_lookup_max "
        "ngram_prompt_lookup_min speculative_draft_tensor_parallel_size "
        "speculative_disable_by_batch_size spec_decoding_acceptance_method",
        accepted=(),
        instead='use --speculative-config, as in {"method": "ngram", "num_speculative_tokens": 5}',
    ),
    VllmOptions(
        "KV stays in the engine that computed it",
        values="kv_transfer_config kv_events_config ec_transfer_config",
        accepted=(),
        instead="use --ray --replicas N, which sends equal beginnings to one engine",
    ),
    VllmOptions(
        "an engine sleeps without a flag for it",
        switches="enable_sleep_mode",
        instead="use --weight-transfer-config, with which the server answers /sleep",
    ),
    VllmOptions(
        "no traces are sent",
        values="otlp_traces_endpoint collect_detailed_traces",
        accepted=(),
        instead="read /metrics",
    ),
    VllmOptions(
        "a request asks for what its answer shows",
        switches="return_tokens_as_token_ids enable_force_include_usage enable_per_request_metrics",
        instead="send return_tokens_as_token_ids, stream_options or include_speculation_stats",
    ),
    VllmOptions(
        "pages of --allowed-origins may use every method and header",
        values="allowed_methods allowed_headers",
        accepted=("*", '["*"]', "['*']"),
        instead="let a proxy before the server refuse some",
    ),
    VllmOptions(
        "browsers add no key or cookie by themselves",
        switches="allow_credentials",
        instead="send the key in the header Authorization",
    ),
    VllmOptions(
        "answers are the assistant's",
        values="response_role",
        accepted=("assistant",),
        instead="name the role in a --chat-template",
    ),
    VllmOptions(
        "answers carry their id in the body",
        switches="enable_request_id_headers",
        instead='read the field "id"',
    ),
    VllmOptions(
        "the endpoints are those of docs/server.md",
        switches="enable_tokenizer_info_endpoint tokens_only headless disable_fastapi_docs",
        instead="hide or add paths in a proxy before the server",
    ),
    VllmOptions(
        "the server ends TLS with a certificate and a key",
        values="ssl_ca_certs ssl_cert_reqs ssl_ciphers",
        switches="enable_ssl_refresh",
        instead="let a proxy end TLS",
    ),
    VllmOptions(
        "the server listens on a port", values="uds", accepted=(), instead="use --host and --port"
    ),
    VllmOptions(
        "the log has one form",
        values="log_config_file",
        accepted=(),
        instead="use --log-level, --disable-log-stats or --disable-uvicorn-access-log",
    ),
)

#: What ``LLM`` does otherwise than the server.
OFFLINE_OPTIONS = (
    VllmOptions("an engine sleeps without a flag for it", switches="enable_sleep_mode"),
    VllmOptions(
        "only a server logs its load and has a name",
        values="served_model_name",
        switches="disable_log_stats",
    ),
)

OPTION_OF = {name: options for options in VLLM_OPTIONS for name in options.names}
_OFFLINE_OPTION_OF = {name: options for options in OFFLINE_OPTIONS for name in options.names}


def as_keyword(name: str, value: object) -> str:
    """An option as a keyword argument in Python."""
    return f"{name}={shown(value)}"


def take_vllm_options(
    options: dict[str, Any],
    spelled: Callable[[str, object], str] = as_keyword,
    kept: Collection[str] = (),
    *,
    offline: bool = False,
) -> str | None:
    """Remove vLLM's options from others, and say which of them have no effect.

    Args:
        options: values by name, with underscores; None stands for an option that is not given.
        spelled: writes a name and a value as the user does.
        kept: names that are options of the caller too, and stay.
        offline: the caller is ``LLM``, not a server.

    Returns:
        One line with all that were given, each with the reason; None without any.

    Raises:
        ConfigError: an option asks for something else than what happens here.
    """
    known = {**OPTION_OF, **_OFFLINE_OPTION_OF} if offline else OPTION_OF
    reasons = []
    for name in [name for name in options if name in known and name not in kept]:
        value, about = options.pop(name), known[name]
        if value is None:
            continue
        about.require_accepted(value, spelled(name, value))
        reasons.append(f"{spelled(name, value)} ({about.why})")
    return f"without effect here: {', '.join(reasons)}" if reasons else None
