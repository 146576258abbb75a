"""Options of the server. Imports neither torch nor FastAPI, so that CLI help stays cheap."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sametoken.config import EngineConfig, option
from sametoken.errors import ConfigError, shown
from sametoken.serving.http.structured_config import StructuredOutputsConfig
from sametoken.serving.http.transfer_config import WeightTransferConfig
from sametoken.types.option_values import require_choices, require_limits
from sametoken.types.sampling_params import MAX_LOGPROBS

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
#: Tool-call syntaxes by name; ``serving/http/tool_parsers.py`` has a parser for each.
TOOL_CALL_PARSERS = (
    *("deepseek_v3", "deepseek_v31", "ernie45", "gemma4", "glm45", "glm47", "granite", "granite4"),
    *("hermes", "hunyuan_a13b", "kimi_k2", "llama3_json", "minimax_m2", "mistral", "olmo3"),
    *("openai", "qwen3_coder", "seed_oss"),
)
#: Forms of reasoning by name; ``serving/http/reasoning_parsers.py`` has each.
REASONING_PARSERS = (
    *("deepseek_r1", "deepseek_v3", "ernie45", "gemma4", "glm45", "glm47", "hunyuan_a13b"),
    *("kimi_k2", "minimax_m2", "mistral", "olmo3", "openai_gptoss", "qwen3", "seed_oss"),
)
#: The parsers of harmony, one of which needs the other.
OPENAI, OPENAI_GPTOSS = "openai", "openai_gptoss"
AUTO, NONE = "auto", "none"
#: Addresses that this machine alone reaches.
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: Characters that every HTTP library sends unchanged in a header.
_VISIBLE = re.compile(r"[!-~]+")
#: What browsers send as the origin of a page; null for a file.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+|null|\*")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Options of the server.

    Raises:
        ConfigError: a value is impossible, or two contradict each other.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every one")
    port: int = option(8000, "port to listen on; 0 lets the system choose", limits=(0, 65535))
    api_key: tuple[str, ...] = option(
        (),
        "bearer key that clients must show, of visible ASCII characters; may be repeated",
        secret=True,
    )
    served_model_name: tuple[str, ...] = option((), "name of the model in the API; may be repeated")
    allowed_origins: tuple[str, ...] = option((), "origin for CORS, * for all; may be repeated")
    max_request_bytes: int = option(4 * 2**20, "largest request body", limits=(1, 2**40))
    max_bodies_bytes: int = option(
        256 * 2**20, "request bodies held at once, each beyond its first 64 KiB", limits=(1, 2**62)
    )
    body_timeout: float = option(
        60.0, "seconds that a request body may take to come", limits=(0.001, 86400.0)
    )
    header_timeout: float = option(
        20.0,
        "seconds that a TLS handshake, or the headers of a request, may take to come",
        limits=(0.001, 86400.0),
    )
    write_timeout: float = option(
        60.0,
        "seconds after which a client that reads nothing of its answer is disconnected",
        limits=(0.001, 86400.0),
    )
    max_connections: int = option(
        1024,
        "connections at once; beyond that, the one that has waited longest is closed",
        limits=(1, 2**20),
    )
    rate_limit: int = option(
        0, "requests per minute for each key, or address without keys; 0: any", limits=(0, 2**31)
    )
    max_completions: int = option(
        128, "completions of one request, over all its prompts", limits=(1, 2**16)
    )
    ssl_certfile: str | None = option(None, "TLS certificate")
    ssl_keyfile: str | None = option(None, "TLS key")
    root_path: str = option("", "path under which a proxy serves the API")
    max_logprobs: int = option(
        MAX_LOGPROBS,
        f"most log-probabilities of a position in a request, 0..{MAX_LOGPROBS}",
        limits=(0, MAX_LOGPROBS),
    )
    log_level: str = option(
        "info", "the least level that is logged", "--uvicorn-log-level", choices=LOG_LEVELS
    )
    disable_log_stats: bool = option(False, "log no line of load every ten seconds")
    disable_uvicorn_access_log: bool = option(False, "log no line for each request")
    tool_call_parser: str = option(
        AUTO,
        "syntax of tool calls; auto: by the chat template",
        choices=(AUTO, NONE, *TOOL_CALL_PARSERS),
    )
    reasoning_parser: str = option(
        AUTO,
        "form of reasoning before an answer; auto: openai_gptoss where gpt-oss's template or its "
        "tool calls are read, else none",
        choices=(AUTO, NONE, *REASONING_PARSERS),
    )
    structured_outputs_config: str = option(
        "{}",
        "how answers are constrained: JSON with enable_in_reasoning, true if from their first "
        "token on, else after the reasoning",
    )
    drain_timeout: float = option(
        60.0,
        "seconds that requests may still take after SIGTERM",
        "--shutdown-timeout",
        limits=(0.0, 86400.0),
    )
    weight_transfer_config: str | None = option(
        None,
        "answer vLLM's requests of trainers, to pause and to change weights: JSON with backend "
        "(files, gloo, nccl, ipc), directory and timeout",
    )
    allow_runtime_lora_updating: bool = option(
        False, "let clients load and unload LoRA adapters from paths of this machine"
    )

    def __post_init__(self) -> None:
        require_limits(self)
        require_choices(self)
        for name in ("api_key", "served_model_name"):
            if not all(getattr(self, name)):
                raise ConfigError(f"one {name} is empty", "give it, or leave it out")
        if self.max_bodies_bytes < self.max_request_bytes:
            raise ConfigError(
                f"max_bodies_bytes={self.max_bodies_bytes} is below "
                f"max_request_bytes={self.max_request_bytes}",
                "give room for one request at least",
            )
        if not all(_VISIBLE.fullmatch(key) for key in self.api_key):
            raise ConfigError(
                "one api_key has a space or a character beyond ASCII, which no client can show",
                "use letters, digits and punctuation of ASCII alone",
            )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins has {shown(origin)}, which no browser sends",
                    "use *, or scheme and host alone, as in http://localhost:3000",
                )
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path={self.root_path!r} has no leading /", "put one before it")
        self._check_tls()
        calls, reasoning = self.tool_call_parser, self.reasoning_parser
        if (calls == OPENAI and reasoning not in (AUTO, OPENAI_GPTOSS)) or (
            reasoning == OPENAI_GPTOSS and calls not in (AUTO, NONE, OPENAI)
        ):
            raise ConfigError(
                f"of tool_call_parser={calls!r} and reasoning_parser={reasoning!r} one reads "
                "harmony and the other does not",
                f"leave one of them out, or use {OPENAI!r} and {OPENAI_GPTOSS!r}",
            )
        StructuredOutputsConfig.parse(self.structured_outputs_config)
        self._require_guarded("weight_transfer_config", self.weight_transfer is not None)
        self._require_guarded("allow_runtime_lora_updating", self.allow_runtime_lora_updating)

    def _require_guarded(self, name: str, is_set: bool) -> None:
        """Refuse an option by which everybody could change what answers."""
        if is_set and not self.api_key and self.host not in _LOOPBACK:
            raise ConfigError(
                f"{name} without an api_key lets everybody at {self.host} change the weights",
                f"give an api_key, or listen on {_LOOPBACK[0]} alone",
            )

    def names(self, model: str) -> tuple[str, ...]:
        """Names of the model in the API: the configured ones, else ``model``."""
        return self.served_model_name or (model,)

    def require_apart(self, engine: EngineConfig) -> None:
        """Refuse an adapter with a name of the model, and adapters that come where none can.

        Raises:
            ConfigError: requests could not tell the two apart, or ``enable_lora`` is missing.
        """
        if self.allow_runtime_lora_updating and not engine.enable_lora:
            raise ConfigError(
                "allow_runtime_lora_updating needs room for adapters", "set enable_lora too"
            )
        names = self.names(engine.model)
        for one in engine.lora_modules:
            if one.name in names:
                raise ConfigError(
                    f"lora_modules has {shown(one.name)}, which is a name of the model",
                    "give the adapter another name, or the model by served_model_name",
                )

    @property
    def weight_transfer(self) -> WeightTransferConfig | None:
        """``weight_transfer_config``, parsed; None if the weights stay."""
        text = self.weight_transfer_config
        return None if text is None else WeightTransferConfig.parse(text)

    @property
    def constrains_reasoning(self) -> bool:
        """Whether constraints hold from the first token on, so that there is no reasoning."""
        return StructuredOutputsConfig.parse(self.structured_outputs_config).enable_in_reasoning

    def parsers(self, auto: str | None) -> tuple[str | None, str | None]:
        """The names of the parsers of tool calls and of reasoning, None for none.

        Args:
            auto: the parser of tool calls for the chat template.
        """
        calls: str | None = self.tool_call_parser
        reasoning: str | None = self.reasoning_parser
        if calls == AUTO:
            calls = OPENAI if reasoning == OPENAI_GPTOSS else auto
        if reasoning == AUTO:
            reasoning = OPENAI_GPTOSS if calls == OPENAI else NONE
        if calls == OPENAI and reasoning != OPENAI_GPTOSS:
            calls = NONE
        return (None if calls == NONE else calls), (None if reasoning == NONE else reasoning)

    def _check_tls(self) -> None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError(
                "only one of ssl_certfile and ssl_keyfile is given", "give both for TLS"
            )
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name}={path!r} is not a file", "give the path of a PEM file")
