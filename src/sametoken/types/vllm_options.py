"""vLLM's options that this engine does not have: which change nothing here, and which are refused.

Options that mean the same in both engines are fields of ``EngineConfig`` and ``ServerConfig``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sametoken.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of vLLM that are treated alike, for one reason.

    Attributes:
        names: with underscores.
        switches: those that are true or false.
        why: the reason, a clause.
        instead: the remedy of a refusal; without one all values change nothing here.
        accepted: with one, the values that change nothing.
    """

    names: tuple[str, ...]
    switches: tuple[str, ...]
    why: str
    instead: str
    accepted: tuple[str, ...]

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


def read_options(table: str) -> tuple[VllmOptions, ...]:
    """The entries of a table, ``NAMES = ACCEPTED: WHY -> INSTEAD``.

    The first line of an entry alone is not indented; a name that ends in a slash is a switch.
    """
    return tuple(_entry(" ".join(text.split())) for text in re.split(r"\n(?=\S)", table.strip()))


def _entry(text: str) -> VllmOptions:
    options, _, reason = text.partition(": ")
    spelled, _, accepted = options.partition(" = ")
    why, _, instead = reason.partition(" -> ")
    names = tuple(name.removesuffix("/") for name in spelled.split())
    switches = tuple(name[:-1] for name in spelled.split() if name.endswith("/"))
    return VllmOptions(names, switches, why, instead, tuple(accepted.split()))


#: Further spellings on vLLM's command line.
SHORT_FLAGS: Mapping[str, tuple[str, ...]] = {
    "api_server_count": ("-asc",),
    "attention_config": ("-ac",),
    "compilation_config": ("-cc",),
    "data_parallel_address": ("-dpa",),
    "data_parallel_backend": ("-dpb",),
    "data_parallel_external_lb": ("-dpe",),
    "data_parallel_hybrid_lb": ("-dph",),
    "data_parallel_multi_port_external_lb": ("-dpm",),
    "data_parallel_rank": ("-dpn",),
    "data_parallel_rpc_port": ("-dpp",),
    "data_parallel_size": ("-dp",),
    "data_parallel_size_local": ("-dpl",),
    "data_parallel_start_rank": ("-dpr",),
    "decode_context_parallel_size": ("-dcp",),
    "enable_expert_parallel": ("-ep",),
    "nnodes": ("-n",),
    "node_rank": ("-r",),
    "optimization_level": ("-O",),
    "pipeline_parallel_size": ("-pp",),
    "prefill_context_parallel_size": ("-pcp",),
    "quantization": ("-q",),
}

_WITHOUT_EFFECT = """
code_revision trust_remote_code/:
    code of a checkpoint is never run
async_scheduling/ disable_async_output_proc/:
    steps are always enqueued ahead of the host; --steps-in-flight says how many
enable_reasoning/:
    --reasoning-parser alone says how reasoning is parted from the answer
compilation_config optimization_level cudagraph_capture_sizes cuda_graph_sizes
    max_cudagraph_capture_size max_seq_len_to_capture:
    CUDA graphs are captured for fixed shapes; --enforce-eager turns them off
limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_encoder_tp_mode media_io_kwargs
    allowed_local_media_path language_model_only/ skip_mm_profiling/ disable_mm_preprocessor_cache/
    allowed_media_domains enable_mm_embeds/ interleave_mm_strings/ mm_processor_cache_type
    mm_shm_cache_max_object_size_mb mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
    mm_tensor_ipc video_pruning_rate disable_chunked_mm_input/ enable_tower_connector_lora/
    enable_mm_processor_stats/ renderer_num_workers:
    only text is served
max_log_len disable_log_requests/:
    requests and answers are never logged
disable_access_log_for_endpoints:
    /health, /ready and /metrics are never logged
enable_auto_tool_choice/:
    requests with tools need no flag
additional_config fail_on_environ_validation/ enable_cumem_allocator/ ray_workers_use_nsight/
    disable_nccl_for_dp_synchronization/:
    these settings are vLLM's own
attention_backend moe_backend all2all_backend mamba_backend disable_cascade_attn/
    use_v2_block_manager/ attention_config kernel_config gdn_prefill_backend linear_backend
    ir_op_priority enable_flashinfer_autotune/ performance_mode specialize_active_lora/:
    one implementation serves each device
mamba_block_size mamba_cache_mode disable_hybrid_kv_cache_manager/:
    recurrent state has memory of its own
max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold:
    chunks of several prompts share a step; --prefill-chunk-size is the largest
scheduler_reserve_full_isl/ prefill_schedule_interval watermark:
    requests are admitted as docs/scheduling.md says
stream_interval:
    tokens are sent after every step
prefix_caching_hash_algo:
    blocks have one hash
safetensors_load_strategy max_parallel_loading_workers model_loader_extra_config ignore_patterns
    use_tqdm_on_load/ safetensors_prefetch_num_threads safetensors_prefetch_block_size
    pt_load_map_location allow_deprecated_quantization/:
    checkpoints have one loader
disable_frontend_multiprocessing/:
    the engine always has a process of its own
structured_outputs_config:
    offline, a grammar that xgrammar compiles holds from the first token on
enable_prompt_tokens_details/:
    usage shows prompt tokens from the prefix cache
enable_server_load_tracking/ kv_cache_metrics/ kv_cache_metrics_sample cudagraph_metrics/
    enable_mfu_metrics/ show_hidden_metrics_for_version enable_logging_iteration_details/
    aggregate_engine_logging/ jit_monitor_verbose/ enable_layerwise_nvtx_tracing/:
    /metrics and the log show the load in one form
use_fp64_gumbel/:
    what is drawn depends on logits, seed and position alone
h11_max_incomplete_event_size h11_max_header_count:
    a request's head has limits of its own
numa_bind/ numa_bind_nodes numa_bind_cpus:
    the system places processes; numactl before the command binds them
max_cpu_loras lora_dtype fully_sharded_loras/:
    adapters that are there are on the device, in the dtype of the model
"""

# With the values that describe what happens here anyway.
_LIMITED = """
enable_chunked_prefill/ = true:
    prefill is always chunked -> leave the option out; --prefill-chunk-size is the largest chunk
quantization = auto none:
    a checkpoint's config.json says how its weights are quantized -> leave the option out; sametoken
    quantize writes a copy in fp8 or 4 bits, and a draft head takes "quantization": "fp8" in
    --speculative-config
calculate_kv_scales/ = false:
    scales of KV are the checkpoint's, or 1 -> use a checkpoint with a kv_cache_scheme
mamba_cache_dtype mamba_ssm_cache_dtype = auto:
    recurrent state is kept in one dtype -> use auto
pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size
    dcp_kv_cache_interleave_size cp_kv_cache_interleave_size = 1:
    a model is divided by layer widths alone -> use --tensor-parallel-size N
enable_expert_parallel/ enable_eplb/ enable_ep_weight_filter/ enable_elastic_ep/ enable_dbo/
    = false:
    experts are divided by their width -> use --tensor-parallel-size N
data_parallel_size data_parallel_size_local api_server_count = 1:
    one server runs one engine -> use --ray --replicas N
data_parallel_rank data_parallel_start_rank data_parallel_address data_parallel_rpc_port
    data_parallel_backend data_parallel_hybrid_lb/ data_parallel_external_lb/
    data_parallel_multi_port_external_lb/ = false 0:
    one server runs one engine -> use --ray --replicas N
distributed_executor_backend = mp uni:
    ranks are processes of one machine -> use --tensor-parallel-size N, or --ray --replicas N
nnodes = 1:
    all ranks of a model are on one machine -> use --ray --replicas N for several machines
node_rank master_addr master_port = 0:
    all ranks of a model are on one machine -> use --ray --replicas N for several machines
cpu_offload_gb offload_backend offload_group_size = 0 0.0 none auto:
    weights stay on the device -> use a smaller model, or --tensor-parallel-size N
scheduling_policy = fcfs:
    requests run in the order in which they came -> leave the option out
runner task = auto generate:
    every model is a decoder that generates text -> leave the option out
tokenizer_mode config_format convert model_impl = auto hf none vllm:
    checkpoints and tokenizers are read in Hugging Face's formats and GGUF -> use auto
guided_decoding_backend = auto xgrammar:
    xgrammar compiles every grammar -> use xgrammar
chat_template_content_format = auto string:
    a message's content reaches the template as text -> use string
exclude_tools_when_tool_choice_none/ = false:
    the template sees the tools of a request, with tool_choice "none" too -> send no tools where the
    model is not to see them
enable_log_requests/ enable_log_outputs/ enable_log_deltas/ = false:
    requests and answers are never logged -> the access log has a line for each request
"""

_REFUSED = """
tokenizer_revision:
    a tokenizer's revision is part of its name -> use --tokenizer ORG/NAME@REVISION
download_dir:
    downloads go to the cache of Hugging Face -> set HF_HUB_CACHE
hf_token:
    keys on a command line are seen by every user of the machine -> set HF_TOKEN
hf_overrides hf_config_path rope_scaling rope_theta override_generation_config
    override_pooler_config pooler_config quantization_config override_attention_dtype
    kv_cache_dtype_skip_layers diffusion_config mamba_config:
    a checkpoint is served as it describes itself -> change its config.json, or use
    --generation-config DIR
disable_sliding_window/ = false:
    a model attends as it was trained -> leave the option out
device_ids:
    the devices are those that the process sees -> set CUDA_VISIBLE_DEVICES
kv_offloading_backend = native:
    KV is swapped to host memory, and to files of --swap-dir -> use --kv-offloading-size alone
enable_prompt_embeds/ = false:
    a prompt is a text or token ids -> send these
lora_target_modules:
    an adapter's own config says what it changes -> leave the option out
tool_server:
    tools are the client's to run -> send "tools" with a request
profiler_config:
    a server profiles nothing -> run it under a profiler
skip_tokenizer_init/ = false:
    a server needs its tokenizer -> use LLM(skip_tokenizer_init=True) for prompts of token ids
tool_parser_plugin reasoning_parser_plugin logits_processors logits_processor_pattern middleware
    worker_cls worker_extension_cls scheduler_cls io_processor_plugin:
    code from outside the package is never run -> use the parsers that are built in, or a proxy
    before the server
reasoning_config:
    a model has its own marks of reasoning, and a spent budget forces the end without a phrase ->
    use --reasoning-parser alone
trust_request_chat_template/ = false:
    a request's template could take the server's time -> use --chat-template FILE
default_chat_template_kwargs:
    variables of the template belong to a request -> send chat_template_kwargs, or use
    --chat-template FILE
qlora_adapter_name_or_path default_mm_loras enable_prompt_adapter/ = false:
    adapters are LoRA's, and a request names its own -> use --lora-modules NAME=PATH
speculative_model num_speculative_tokens ngram_prompt_lookup_max ngram_prompt_lookup_min
    speculative_draft_tensor_parallel_size speculative_disable_by_batch_size
    spec_decoding_acceptance_method:
    speculation has one option -> use --speculative-config, as in {"method": "ngram",
    "num_speculative_tokens": 5}
kv_transfer_config kv_events_config ec_transfer_config:
    KV stays in the engine that computed it -> use --ray --replicas N, which sends equal beginnings
    to one engine
enable_sleep_mode/ = false:
    an engine sleeps without a flag for it -> use --weight-transfer-config, with which the server
    answers /sleep
otlp_traces_endpoint collect_detailed_traces:
    no traces are sent -> read /metrics
return_tokens_as_token_ids/ enable_force_include_usage/ enable_per_request_metrics/ = false:
    a request asks for what its answer shows -> send return_tokens_as_token_ids, stream_options or
    include_speculation_stats
allowed_methods allowed_headers = * ["*"] ['*']:
    pages of --allowed-origins may use every method and header -> let a proxy before the server
    refuse some
allow_credentials/ = false:
    browsers add no key or cookie by themselves -> send the key in the header Authorization
response_role = assistant:
    answers are the assistant's -> name the role in a --chat-template
enable_request_id_headers/ = false:
    answers carry their id in the body -> read the field "id"
enable_tokenizer_info_endpoint/ tokens_only/ headless/ disable_fastapi_docs/ enable_offline_docs/
    = false:
    the endpoints are those of docs/server.md -> hide or add paths in a proxy before the server
ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh/ = false:
    the server ends TLS with a certificate and a key -> let a proxy end TLS
uds:
    the server listens on a port -> use --host and --port
log_config_file:
    the log has one form -> use --log-level, --disable-log-stats or --disable-uvicorn-access-log
"""

#: The table. What vLLM's command lines have and is neither here nor an option of ours is unknown.
VLLM_OPTIONS = read_options(_WITHOUT_EFFECT + _LIMITED + _REFUSED)

#: What ``LLM`` does otherwise than the server.
OFFLINE_OPTIONS = read_options("""
enable_sleep_mode/:
    an engine sleeps without a flag for it
served_model_name disable_log_stats/:
    only a server logs its load and has a name
spec_method spec_model spec_tokens:
    speculation has one option -> use speculative_config, as in {"method": "ngram",
    "num_speculative_tokens": 5}
reasoning_parser:
    an answer is one text, and thinking_token_budget finds the marks in the tokenizer
max_logprobs = 20:
    a request has up to 20 log-probabilities of a position -> leave it out
weight_transfer_config:
    a trainer in this process has LLM.update_weights -> leave it out, or serve the model with
    --weight-transfer-config
""")

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
