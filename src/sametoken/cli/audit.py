"""``sametoken audit``: does speculation change a token, and why are drafts rejected?

With ``--trainer``: why do a trainer's log-probabilities differ from the rollouts'?
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from sametoken.cli.options import AsJson, engine_options, numbers, options_in, take, with_options
from sametoken.cli.report import announce
from sametoken.config import MODEL_HELP, EngineConfig
from sametoken.errors import ConfigError, RequestError
from sametoken.io.files import require_writable, write_text
from sametoken.types.lora_modules import parse_modules, require_adapter
from sametoken.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sametoken.audit.asks import AuditRequest
    from sametoken.audit.server_audit import Side
    from sametoken.audit.servers import Server
    from sametoken.audit.trainer_verdict import TrainerVerdict
    from sametoken.audit.verdict import Verdict
    from sametoken.bench.datasets import DatasetItem
    from sametoken.engine.load import Requested
    from sametoken.text.tokenizer import Tokenizer

DIFFERENT = 1


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The prompts of every side, and how they are sampled."""

    dataset: str
    items: Sequence[DatasetItem]
    temperatures: tuple[float, ...]
    max_tokens: int
    raw: bool
    adapter: str | None

    @classmethod
    def of(
        cls,
        *,
        dataset: str,
        prompts: Path | None,
        limit: int,
        temperature: str,
        max_tokens: int,
        raw: bool,
        lora_request: str | None,
        lora_modules: Sequence[str],
    ) -> _Prompts:
        """Load the prompts from the command's options.

        Raises:
            ConfigError: the dataset, its file, the list of temperatures or an adapter is invalid.
            RequestError: no request may have one of the temperatures, or the adapter.
        """
        from sametoken.bench.datasets import load_dataset

        require_adapter(parse_modules(lora_modules), lora_request)
        items = load_dataset(dataset, path=prompts, limit=limit)
        name = dataset if prompts is None else f"{dataset} from {prompts.name}"
        temperatures = _temperatures(temperature)
        return cls(name, items, temperatures, max_tokens, raw, lora_request)

    def requests(self, tokenizer: Tokenizer | None, *, templated: bool) -> list[AuditRequest]:
        """Make the requests, with token ids if there is a tokenizer."""
        from sametoken.audit.asks import make_requests

        return make_requests(
            self.items,
            tokenizer,
            temperatures=self.temperatures,
            max_tokens=self.max_tokens,
            templated=templated,
            adapter=self.adapter,
        )

    def as_chosen(self, tokenizer: Tokenizer | None) -> list[AuditRequest]:
        """Make the requests, through the chat template if there is one and it is wanted."""
        has_template = tokenizer is not None and bool(tokenizer.chat_template)
        return self.requests(tokenizer, templated=has_template and not self.raw)

    def workload(self, model: str | None) -> dict[str, Any]:
        """Describe what was run, for ``Verdict``."""
        return {
            "model": None if model is None else Path(model).name,
            "adapter": self.adapter,
            "dataset": self.dataset,
            "prompts": len(self.items),
            "temperatures": list(self.temperatures),
            "max_tokens": self.max_tokens,
        }


@dataclass(frozen=True, slots=True)
class _Servers:
    """The servers to audit."""

    url: str | None
    baseline_url: str | None
    served_model: str | None
    api_key: str | None
    concurrency: int

    def check(self) -> None:
        """Ask every server for one token.

        Raises:
            ConfigError: both are one server.
            RequestError: a server cannot be reached, or lacks what an audit needs.
        """
        from sametoken.audit.servers import require_server

        servers = [self._server(url) for url in (self.url, self.baseline_url) if url is not None]
        if len({server.address for server in servers}) < len(servers):
            raise ConfigError(
                f"--url and --baseline-url are one server, {servers[0].root}",
                "give --baseline-url a server without speculation",
            )
        for server in servers:
            require_server(server)

    def side(self, url: str) -> Side:
        """Make a side of one server."""
        from sametoken.audit.server_audit import server_side

        return server_side(self._server(url), self.concurrency)

    def _server(self, url: str) -> Server:
        from sametoken.audit.servers import Server

        return Server(url, self.served_model, self.api_key)


def _prompt_options(
    *,
    prompts: Annotated[
        Path | None, typer.Option(help="file of prompts, one JSON value per line")
    ] = None,
    dataset: Annotated[
        str, typer.Option(help="gsm8k, humaneval, mt-bench, random, or spec-bench with --prompts")
    ] = "gsm8k",
    limit: Annotated[int, typer.Option(min=1, help="maximum number of prompts")] = 50,
    max_tokens: Annotated[int, typer.Option(min=1, help="maximum tokens per answer")] = 128,
    temperature: Annotated[
        str, typer.Option(help="list of temperatures; each prompt runs at each of them")
    ] = "0,0.8",
    raw: Annotated[bool, typer.Option("--raw", help="do not apply the chat template")] = False,
    lora_request: Annotated[
        str | None, typer.Option(help="adapter of --lora-modules to audit", metavar="NAME")
    ] = None,
) -> None:
    """The options that select prompts."""


def _server_options(
    *,
    url: Annotated[
        str | None, typer.Option(help="address of the server with speculation to audit")
    ] = None,
    baseline_url: Annotated[
        str | None,
        typer.Option(help="address of a server without speculation; default: MODEL in this engine"),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="model name in requests to the servers")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SAMETOKEN_API_KEY", help="API key of the servers")
    ] = None,
) -> None:
    """The options that describe servers."""


def _trainer_options(
    *,
    trainer: Annotated[
        Path | None,
        typer.Option(
            help="file of rollouts with a trainer's log-probabilities, compared with MODEL's "
            "(docs/audit.md)"
        ),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            help="with --trainer: directory with other weights of MODEL that the trainer may "
            "have had; may be repeated"
        ),
    ] = None,
) -> None:
    """The options that describe a trainer."""


_TRAINER = options_in(_trainer_options)
_PROMPTS = options_in(_prompt_options)
_SERVERS = options_in(_server_options)
_ENGINE = engine_options()
#: What only audits of this engine read, what a trainer's does not, and what needs MODEL.
_ENGINE_ONLY = ("alone", "diagnose", "speculative_config")
_NOT_OF_TRAINERS = (
    *_ENGINE_ONLY,
    *(one.name for one in (*_SERVERS, *_PROMPTS) if one.name != "limit"),
)
_OF_MODELS = ("raw", *(one.name for one in _ENGINE))


@with_options(_PROMPTS, _SERVERS, _TRAINER, _ENGINE)
def audit(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    *,
    concurrency: Annotated[
        int, typer.Option(min=1, help="maximum number of requests that run at once")
    ] = 8,
    alone: Annotated[
        int, typer.Option(min=1, help="number of requests that also run one at a time")
    ] = 8,
    diagnose: Annotated[bool, typer.Option(help="also measure why drafts are rejected")] = True,
    html: Annotated[Path | None, typer.Option(help="write an HTML report to this file")] = None,
    json_output: AsJson = False,
    **options: Any,
) -> None:
    """Run prompts with speculation and without, and compare token by token.

    Exits with 0 only if everything is identical, with 1 if anything differs.
    """
    if html is not None:
        require_writable(html)
    servers = _Servers(concurrency=concurrency, **take(options, _SERVERS))
    of_prompts, of_trainer = take(options, _PROMPTS), take(options, _TRAINER)
    if of_trainer["trainer"] is not None:
        _refuse_unread(context, _NOT_OF_TRAINERS, "is of no use with --trainer", "leave it out")
        config, limit = _config(model, options), of_prompts["limit"]
        of_rollouts = _audit_trainer(config, **of_trainer, limit=limit, concurrency=concurrency)
        _report(of_rollouts, html, json_output)
    _refuse_unread(context, ("checkpoint",), "is of use with --trainer alone", "give --trainer")
    if servers.url is None:
        of_servers = ("baseline_url", "served_model", "api_key")
        _refuse_unread(context, of_servers, "is of use with --url alone", "give --url")
    else:
        _refuse_unread(context, _ENGINE_ONLY, "is of no use with --url", "leave it out")
        if model is None:
            _refuse_unread(context, _OF_MODELS, "is of no use without MODEL", "give MODEL")
    prompts = _Prompts.of(**of_prompts, lora_modules=options["lora_modules"])
    if servers.url is None:
        settings = {"concurrency": concurrency, "num_alone": alone, "diagnose": diagnose}
        verdict = _audit_engine(_config(model, options), prompts, settings)
    else:
        verdict = _audit_servers(model, options, prompts, servers)
    verdict = replace(verdict, workload=prompts.workload(model or servers.served_model))
    _report(verdict, html, json_output)


def _refuse_unread(context: typer.Context, names: Iterable[str], why: str, remedy: str) -> None:
    """Refuse options that this audit would ignore; those of the environment may be for others.

    Raises:
        ConfigError: one of them is on the command line.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"--{name.replace('_', '-')} {why}", remedy)


def _report(verdict: Verdict | TrainerVerdict, html: Path | None, as_json: bool) -> NoReturn:
    for line in (json.dumps(verdict.as_json()),) if as_json else verdict.lines():
        typer.echo(line)
    if html is not None:
        write_text(html, verdict.html())
    raise typer.Exit(0 if verdict.identical else DIFFERENT)


def _audit_trainer(
    config: EngineConfig,
    *,
    trainer: Path,
    checkpoint: Sequence[Path] | None,
    limit: int,
    concurrency: int,
) -> TrainerVerdict:
    from sametoken.audit.trainer_audit import audit_trainer
    from sametoken.audit.trainer_rollouts import read_rollouts

    rollouts = read_rollouts(trainer, limit)
    requested, tokenizer = _look_at(replace(config, speculative_config=None))
    return audit_trainer(
        requested.located,
        rollouts,
        checkpoints=checkpoint or (),
        tokenizer=tokenizer,
        concurrency=concurrency,
        announce=announce,
    )


def _config(model: str | None, options: dict[str, Any]) -> EngineConfig:
    if model is None:
        raise ConfigError("there is nothing to audit", "give MODEL, or a server by --url")
    return EngineConfig.from_options(model=model, **options)


def _temperatures(text: str) -> tuple[float, ...]:
    values = numbers("temperature", text, float, "give 0 or 0,0.8")
    for value in values:
        SamplingParams(temperature=value)
    return tuple(dict.fromkeys(values))


def _audit_engine(config: EngineConfig, prompts: _Prompts, settings: dict[str, Any]) -> Verdict:
    """The verdict on this engine; ``settings`` are arguments of ``AuditSettings``."""
    from sametoken.audit.engine_audit import (
        AuditSettings,
        audit_engine,
        require_fitting,
        require_speculation,
    )
    from sametoken.text.tokenizer import all_eos_ids

    require_speculation(config)
    requested, tokenizer = _look_at(config)
    requests = prompts.as_chosen(tokenizer)
    is_raw = prompts.raw and bool(tokenizer.chat_template)
    others = prompts.requests(tokenizer, templated=True) if is_raw else []
    require_fitting([*requests, *others], requested.max_model_len)
    chosen = AuditSettings(**settings, stop_token_ids=all_eos_ids((), tokenizer))
    located = requested.located
    verdict = audit_engine(located, requests, chosen, templated=others, announce=announce)
    return replace(verdict, texts=_texts(verdict, tokenizer))


def _look_at(config: EngineConfig) -> tuple[Requested, Tokenizer]:
    """Refuse a model that cannot be audited, before it is loaded.

    Raises:
        RequestError: it has no tokenizer.
        ConfigError, CheckpointError, UnsupportedError, DrafterMismatchError: as ``build_engine``.
    """
    from sametoken.engine.unloaded import UnloadedModel

    unloaded = UnloadedModel.of(config, announce)
    return unloaded.requested, _require_tokenizer(unloaded.inputs.tokenizer)


def _tokenizer(config: EngineConfig) -> Tokenizer:
    """Load the tokenizer alone: two servers need no model here, nor torch."""
    from sametoken.models.hub import Needed
    from sametoken.models.names import resolve_model
    from sametoken.text.tokenizer import load_tokenizer_of

    path = resolve_model(config.model, announce, Needed.TOKENIZER)
    return _require_tokenizer(load_tokenizer_of(config, path))


def _require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise RequestError("an audit needs a tokenizer", "give --tokenizer")
    return tokenizer


def _texts(verdict: Verdict, tokenizer: Tokenizer) -> dict[int | str, str]:
    tokens = {
        token
        for comparison in verdict.comparisons
        for divergence in comparison.divergences
        for token in (divergence.expected, divergence.found)
    }
    return {token: tokenizer.decode_token(token) for token in tokens if isinstance(token, int)}


def _audit_servers(
    model: str | None, options: dict[str, Any], prompts: _Prompts, servers: _Servers
) -> Verdict:
    from sametoken.audit.server_audit import audit_sides

    subject = servers.side(str(servers.url))
    config = None if model is None else _config(model, options)
    if servers.baseline_url is not None:
        servers.check()
        requests = prompts.as_chosen(None if config is None else _tokenizer(config))
        baseline = servers.side(servers.baseline_url)
    elif config is not None:
        servers.check()
        requested, tokenizer = _look_at(replace(config, speculative_config=None))
        requests = prompts.as_chosen(tokenizer)
        baseline = _engine_side(requested, requests, tokenizer, servers.concurrency)
    else:
        raise ConfigError("there is no baseline", "give --baseline-url, or MODEL")
    return audit_sides(subject, baseline, requests, announce=announce)


def _engine_side(
    requested: Requested, requests: Sequence[AuditRequest], tokenizer: Tokenizer, concurrency: int
) -> Side:
    """Make a side of this engine without speculation, as the baseline of a server."""
    from sametoken.audit.engine_audit import require_fitting
    from sametoken.audit.engine_runs import RunSettings, run_plain
    from sametoken.audit.server_audit import Side
    from sametoken.engine.build import build_requested
    from sametoken.text.tokenizer import all_eos_ids

    require_fitting(requests, requested.max_model_len)
    core = build_requested(requested, announce)
    eos = frozenset(all_eos_ids(core.resolved.model.eos_token_ids, tokenizer))
    settings = RunSettings(concurrency, eos, top=True)
    return Side(
        f"{requested.path}, plain, in this engine",
        lambda requests: run_plain(core, requests, settings),
        text_of=tokenizer.decode_token,
    )
