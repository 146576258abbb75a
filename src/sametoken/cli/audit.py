"""``sametoken audit``: does speculation change a token, and why are drafts refused?"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sametoken.cli.options import engine_options, with_options
from sametoken.config import MODEL_HELP, EngineConfig
from sametoken.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from sametoken.audit.asks import Ask
    from sametoken.audit.engine_audit import AuditSettings
    from sametoken.audit.server_audit import Side
    from sametoken.audit.verdict import Verdict
    from sametoken.bench.datasets import DatasetItem
    from sametoken.text.tokenizer import Tokenizer

DIFFERENT = 1


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of every side."""

    items: Sequence[DatasetItem]
    temperatures: tuple[float, ...]
    max_tokens: int
    raw: bool

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
    ) -> _Asked:
        """From the options.

        Raises:
            ConfigError: the dataset, its file or the temperatures are impossible.
        """
        from sametoken.bench.datasets import load_dataset

        items = load_dataset(dataset, path=prompts, limit=limit)
        return cls(items, _temperatures(temperature), max_tokens, raw)

    def asks(self, tokenizer: Tokenizer | None, *, templated: bool) -> list[Ask]:
        """The asks, with prompts made by the model's tokenizer if there is one."""
        from sametoken.audit.asks import make_asks

        return make_asks(
            self.items,
            tokenizer,
            temperatures=self.temperatures,
            max_tokens=self.max_tokens,
            templated=templated,
        )


@dataclass(frozen=True, slots=True)
class _Servers:
    """The servers to ask."""

    url: str | None
    baseline_url: str | None
    served_model: str | None
    api_key: str | None
    concurrency: int

    def side(self, url: str) -> Side:
        """One of them."""
        from sametoken.audit.server_audit import server_side
        from sametoken.audit.servers import Server

        return server_side(Server(url, self.served_model, self.api_key), self.concurrency)


def _prompts(
    *,
    prompts: Annotated[
        Path | None, typer.Option(help="file of prompts, one JSON value a line")
    ] = None,
    dataset: Annotated[
        str, typer.Option(help="gsm8k, humaneval, mt-bench, random, or spec-bench with --prompts")
    ] = "gsm8k",
    limit: Annotated[int, typer.Option(min=1, help="prompts at most")] = 50,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer, in tokens")] = 128,
    temperature: Annotated[str, typer.Option(help="as in 0,0.8: every prompt at each")] = "0,0.8",
    raw: Annotated[bool, typer.Option("--raw", help="no chat template around prompts")] = False,
) -> None:
    """The options that describe what is asked."""


def _servers(
    *,
    url: Annotated[str | None, typer.Option(help="a server with speculation to audit")] = None,
    baseline_url: Annotated[
        str | None, typer.Option(help="a server without; default: MODEL in this engine")
    ] = None,
    served_model: Annotated[str | None, typer.Option(help="the name that servers know")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SAMETOKEN_API_KEY", help="of the servers")
    ] = None,
) -> None:
    """The options that name servers."""


_PROMPTS = list(inspect.signature(_prompts, eval_str=True).parameters.values())
_SERVERS = list(inspect.signature(_servers, eval_str=True).parameters.values())


@with_options(_PROMPTS, _SERVERS, engine_options())
def audit(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    *,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once")] = 8,
    alone: Annotated[int, typer.Option(min=1, help="requests that also run one at a time")] = 8,
    diagnose: Annotated[bool, typer.Option(help="also measure why drafts are refused")] = True,
    html: Annotated[Path | None, typer.Option(help="write the report to this file")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    **options: Any,
) -> None:
    """Run prompts with speculation and without, and compare token by token.

    Exits with 0 only if everything is identical, with 1 if anything differs.
    """
    from sametoken.audit.engine_audit import AuditSettings
    from sametoken.audit.verdict import (
        html_of,
        lines_of,
    )

    asked = _Asked.of(**{one.name: options.pop(one.name) for one in _PROMPTS})
    servers = _Servers(concurrency=concurrency, **{o.name: options.pop(o.name) for o in _SERVERS})
    if servers.url is None:
        settings = AuditSettings(concurrency=concurrency, num_alone=alone, diagnose=diagnose)
        verdict = _audit_engine(_config(model, options), asked, settings)
    else:
        verdict = _audit_servers(model, options, asked, servers)
    if html is not None:
        html.write_text(html_of(verdict), encoding="utf-8")
    if json_output:
        typer.echo(json.dumps(verdict.as_json()))
    else:
        for line in lines_of(verdict):
            typer.echo(line)
    raise typer.Exit(0 if verdict.identical else DIFFERENT)


def _config(model: str | None, options: dict[str, Any]) -> EngineConfig:
    if model is None:
        raise ConfigError("there is nothing to audit", "give MODEL, or --url of a server")
    return EngineConfig.from_options(model=model, **options)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"temperature={text!r} is not a list of numbers", "give 0 or 0,0.8"
        ) from error
    if min(values) < 0:
        raise ConfigError(f"temperature={text!r} is below 0", "give 0 or 0,0.8")
    return tuple(dict.fromkeys(values))


def _announce(text: str) -> None:
    typer.echo(text, err=True)


def _audit_engine(config: EngineConfig, asked: _Asked, settings: AuditSettings) -> Verdict:
    from sametoken.audit.engine_audit import audit_engine
    from sametoken.text.tokenizer import all_eos_ids

    path, tokenizer = _tokenizer(config)
    has_template = bool(tokenizer.hf.chat_template)
    asks = asked.asks(tokenizer, templated=has_template and not asked.raw)
    others = asked.asks(tokenizer, templated=True) if has_template and asked.raw else []
    config = replace(config, model=str(path))
    settings = replace(settings, stop_token_ids=all_eos_ids((), tokenizer))
    verdict = audit_engine(config, asks, settings, templated=others, announce=_announce)
    return replace(verdict, texts=_texts(verdict, tokenizer))


def _tokenizer(config: EngineConfig) -> tuple[Path, Tokenizer]:
    from sametoken.models.names import resolve_model
    from sametoken.text.tokenizer import load_tokenizer_of

    path = resolve_model(config.model, _announce)
    tokenizer = load_tokenizer_of(config, path)
    if tokenizer is None:
        raise RequestError("an audit needs a tokenizer", "leave skip_tokenizer_init out")
    return path, tokenizer


def _texts(verdict: Verdict, tokenizer: Tokenizer) -> dict[int | str, str]:
    tokens = {
        token
        for comparison in verdict.comparisons
        for divergence in comparison.divergences
        for token in (divergence.expected, divergence.found)
    }
    return {token: tokenizer.decode_token(token) for token in tokens if isinstance(token, int)}


def _audit_servers(
    model: str | None, options: dict[str, Any], asked: _Asked, servers: _Servers
) -> Verdict:
    from sametoken.audit.server_audit import audit_sides

    subject = servers.side(str(servers.url))
    if model is None:
        if servers.baseline_url is None:
            raise ConfigError("there is no baseline", "give --baseline-url, or MODEL")
        asks = asked.asks(None, templated=False)
        baseline = servers.side(servers.baseline_url)
        return audit_sides(subject, baseline, asks, announce=_announce)
    config = _config(model, options)
    path, tokenizer = _tokenizer(config)
    templated = bool(tokenizer.hf.chat_template) and not asked.raw
    asks = asked.asks(tokenizer, templated=templated)
    if servers.baseline_url is None:
        plain = replace(config, model=str(path), speculative_config=None)
        baseline = _engine_side(plain, tokenizer, servers.concurrency)
    else:
        baseline = servers.side(servers.baseline_url)
    return audit_sides(subject, baseline, asks, announce=_announce)


def _engine_side(config: EngineConfig, tokenizer: Tokenizer, concurrency: int) -> Side:
    """This engine, plain, as the baseline of a server."""
    from sametoken.audit.engine_runs import RunSettings, run_asks
    from sametoken.audit.server_audit import Side
    from sametoken.engine.build import build_engine
    from sametoken.text.tokenizer import all_eos_ids

    core = build_engine(config, _announce)
    eos = frozenset(all_eos_ids(core.resolved.model.eos_token_ids, tokenizer))
    settings = RunSettings(concurrency, top=True)
    return Side(
        f"{config.model}, plain, in this engine",
        lambda asks: run_asks(core, asks, settings, eos),
        text_of=tokenizer.decode_token,
    )
