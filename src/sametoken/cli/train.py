"""``sametoken train``: train draft heads, drafters and small models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sametoken.cli.options import AsJson, engine_options, options_in, options_of, take, with_options
from sametoken.cli.report import announce, status_console
from sametoken.config import MODEL_HELP, EngineConfig
from sametoken.errors import ConfigError, EngineDeadError
from sametoken.io.files import is_there, require_writable
from sametoken.train.options import (
    DraftOptions,
    Eagle3Options,
    LMOptions,
    LoopOptions,
    MTPOptions,
    TokenMapOptions,
    require_seconds,
)
from sametoken.types.units import counted

if TYPE_CHECKING:
    from sametoken.io.journal import Journal
    from sametoken.text.tokenizer import Tokenizer
    from sametoken.train.distillation import DrafterResult
    from sametoken.train.generate import Written
    from sametoken.train.progress import Report
    from sametoken.types.sampling_params import SamplingParams

# Interval of progress lines without a terminal for a progress bar.
_LINE_INTERVAL_S = 20.0

train = typer.Typer(
    help="Train drafters and small models.", no_args_is_help=True, rich_markup_mode=None
)

Model = Annotated[str, typer.Argument(help=f"the target: {MODEL_HELP}")]
Output = Annotated[Path, typer.Argument(help="directory for the result and its checkpoint")]
AnswerTokens = Annotated[int, typer.Option(min=2, help="maximum tokens per answer")]


@train.command()
@with_options(engine_options(max_num_seqs=256))
def text(
    model: Model,
    output: Annotated[Path, typer.Argument(help="a new file for the answers, JSON lines")],
    prompts: Annotated[Path, typer.Option(help="JSON lines of prompts")],
    max_tokens: AnswerTokens = 512,
    max_seconds: Annotated[
        float | None, typer.Option(help="seconds after which no further answers are started")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="temperature of answers; a prompt's own temperature overrides it")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="seed of the first prompt")] = 0,
    **options: Any,
) -> None:
    """Answer prompts with a model, as training text for its drafters.

    After a stop or a crash, the same command continues with the remaining prompts.
    """
    _require_new(output)
    params = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    written = _write_text(model, prompts, output, params, max_seconds, options)
    before = f"; {written.kept} kept from an earlier run" if written.kept else ""
    announce(
        f"{counted(written.answers, 'answer')} of {counted(written.tokens, 'token')} in "
        f"{written.seconds:.1f} s, "
        f"{written.tokens / max(written.seconds, 1e-9):.0f} tokens/s{before}"
    )


def _source(
    *,
    text: Annotated[
        Path | None, typer.Option(help="JSON lines of prompts and answers, as text or as token ids")
    ] = None,
    generate_from: Annotated[
        Path | None, typer.Option(help="JSON lines of prompts, which the target answers first")
    ] = None,
    answer_tokens: AnswerTokens = 512,
    json_output: AsJson = False,
) -> None:
    """The options of every command that trains for a target."""


_SOURCE = options_in(_source)


@train.command()
@with_options(_SOURCE, options_of(Eagle3Options), options_of(LoopOptions))
def eagle3(
    model: Model,
    output: Output,
    states: Annotated[
        list[Path] | None,
        typer.Option(help="directory written by extract_hidden_states; may be repeated"),
    ] = None,
    **options: Any,
) -> None:
    """Train an EAGLE-3 head for a target, on --text, --generate-from or --states."""
    from sametoken.train.eagle3 import open_for_head, train_eagle3

    given = tuple(states or ())
    _train_drafter(train_eagle3, Eagle3Options, open_for_head, model, output, options, given)


@train.command()
@with_options(_SOURCE, options_of(MTPOptions), options_of(LoopOptions))
def mtp(model: Model, output: Output, **options: Any) -> None:
    """Train a hybrid's multi-token-prediction module, on --text or --generate-from."""
    import torch

    from sametoken.train.mtp import open_for_module, train_mtp

    def check(target: Path, _: MTPOptions) -> object:
        with torch.device("meta"):
            return open_for_module(target, output)

    _train_drafter(train_mtp, MTPOptions, check, model, output, options)


@train.command()
@with_options(_SOURCE, options_of(DraftOptions), options_of(LoopOptions))
def draft(model: Model, output: Output, **options: Any) -> None:
    """Train a small Llama that drafts for a target, on --text or --generate-from."""
    from sametoken.train.draft import train_draft
    from sametoken.train.target import open_target

    def check(target: Path, _: DraftOptions) -> object:
        return open_target(target)

    _train_drafter(train_draft, DraftOptions, check, model, output, options)


@train.command()
@with_options(options_of(TokenMapOptions))
def token_map(
    model: Model,
    output: Annotated[
        Path, typer.Argument(help="a new file for the map, a JSON list of token ids")
    ],
    text: Annotated[
        Path, typer.Option(help="JSON lines of prompts and answers, as written by train text")
    ],
    json_output: AsJson = False,
    **options: Any,
) -> None:
    """Choose the tokens that a draft head may propose: the most frequent ones in answers."""
    from sametoken.models.names import resolve_model
    from sametoken.train.text import require_text
    from sametoken.train.token_map import write_token_map

    _require_new(output)
    require_text(text)
    path = resolve_model(model, announce)
    chosen = TokenMapOptions(**take(options, TokenMapOptions))
    result = write_token_map(path, output, text, _encoder(path, text), chosen)
    measured = _measured_on(result.held_back, result.held_back)
    _show(
        result,
        json_output,
        f"{output}: {result.tokens} of {result.vocab_size} tokens, of {result.counted} counted; "
        f"they cover {100 * result.coverage:.2f} %, {measured}",
    )


@train.command()
@with_options(options_of(LMOptions), options_of(LoopOptions, ("validation", "prompt_rows")))
def lm(
    output: Output,
    text: Annotated[
        list[str], typer.Option(help="text or JSON lines, as PATH or PATH=SHARE; may be repeated")
    ],
    json_output: AsJson = False,
    **options: Any,
) -> None:
    """Train a small language model and its tokenizer from scratch."""
    from sametoken.train.corpus import Source
    from sametoken.train.lm import train_lm

    sources = [Source.parse(value) for value in text]
    model = LMOptions(**take(options, LMOptions))
    loop = LoopOptions(validation=0.0, prompt_rows=False, **options)
    with _progress(output) as report:
        result = train_lm(output, sources, model, loop, report=report, announce=announce)
    _show(
        result,
        json_output,
        f"{output}: {result.parameters} parameters, loss {result.loss:.3f} after "
        f"{counted(result.steps, 'step')}, perplexity {result.perplexity:.2f}; "
        f"{_rates(result.acceptance)}, on new windows of the training text",
    )


def _require_new(output: Path) -> None:
    """Refuse an output file that is there or cannot be written, before there is any work.

    Raises:
        ConfigError: it is there, or cannot be written.
    """
    require_writable(output)
    if is_there(output):
        raise ConfigError(f"{output} is there already", "remove it, or choose another output")


def _train_drafter(
    run: Callable[..., DrafterResult],
    kind: type[Any],
    check: Callable[[Path, Any], object],
    model: str,
    output: Path,
    options: dict[str, Any],
    states: tuple[Path, ...] = (),
) -> None:
    """Train a drafter for a target that ``check`` does not refuse, and report the result."""
    from sametoken.models.names import resolve_model
    from sametoken.train.distillation import TrainingText
    from sametoken.train.results import require_output
    from sametoken.train.text import require_text

    given = take(options, _SOURCE)
    text, prompts = given["text"], given["generate_from"]
    if sum(bool(source) for source in (text, prompts, states)) != 1:
        raise ConfigError(
            "training needs one source of text",
            "give --text, --generate-from or, for eagle3, --states",
        )
    drafter, loop = kind(**take(options, kind)), LoopOptions(**options)
    require_output(output, resume=loop.resume)
    if text is not None:
        require_text(text)
    path = resolve_model(model, announce)
    if prompts is not None:
        # Answers take hours.
        check(path, drafter)
        text = _generated(model, prompts, output, given["answer_tokens"], loop)
    source = TrainingText(file=text, states=states, encode=_encoder(path, text))
    with _progress(output) as report:
        result = run(path, output, source, drafter, loop, report=report, announce=announce)
    _show(
        result,
        given["json_output"],
        f"{output}: loss {result.loss:.3f} after {counted(result.steps, 'step')}; "
        f"{_rates(result.acceptance)}, acceptance length {result.acceptance_length:.2f}, "
        f"{_measured_on(result.held_back, result.measured)}",
    )


def _show(result: Any, as_json: bool, line: str) -> None:
    """Print a result: one JSON object on stdout, or a line on stderr."""
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
    else:
        announce(line)


def _rates(acceptance: Sequence[float]) -> str:
    rates = " ".join(f"{100 * rate:.0f}" for rate in acceptance)
    return f"drafts accepted one after the other {rates} %" if rates else "no drafts"


def _measured_on(held_back: int, measured: int) -> str:
    """What figures were measured on, and a word of caution where that is little."""
    if not held_back:
        return "measured on the training text itself: none was held back"
    if held_back == 1:
        return "measured on one held-back answer alone: use more text for a figure to rely on"
    of = f"{measured} of " if measured < held_back else ""
    return f"measured on {of}{held_back} held-back answers"


def _generated(model: str, prompts: Path, output: Path, max_tokens: int, loop: LoopOptions) -> Path:
    """Write answers to the prompts beside the drafter; a resumed training has them."""
    from sametoken.train.results import TEXT, output_directory

    text = output / TEXT
    params = {"max_tokens": max_tokens, "temperature": 0.0, "seed": 0}
    options = {"max_num_seqs": 256, "device": loop.device}
    with output_directory(output, resume=loop.resume):
        if not is_there(text):
            _write_text(model, prompts, text, params, None, options)
        elif loop.resume:
            announce(f"the answers in {text} are there and are trained on")
        else:
            raise ConfigError(
                f"{text} is there already",
                f"give --text {text} in place of --generate-from, remove it, or choose another "
                "output",
            )
    return text


def _write_text(
    model: str,
    prompts: Path,
    output: Path,
    params: dict[str, Any],
    max_seconds: float | None,
    options: dict[str, Any],
) -> Written:
    import gc

    import torch
    from rich.progress import Progress

    from sametoken.engine.unloaded import UnloadedModel
    from sametoken.llm import LLM
    from sametoken.train.generate import ask, read_prompts, write_text
    from sametoken.types.sampling_params import SamplingParams

    require_seconds(max_seconds)
    requests, sampling = read_prompts(prompts), SamplingParams(**params)
    config = EngineConfig.from_options(model=model, **options)
    with _answers(output, config, sampling) as kept:
        unloaded = UnloadedModel.of(config, announce)
        asked = ask(unloaded.inputs, requests, sampling)
        llm = LLM.from_unloaded(unloaded, announce)
        with Progress(console=status_console()) as progress:
            task = progress.add_task("answers", total=len(requests))
            written = write_text(
                llm,
                asked,
                output,
                kept,
                max_seconds=max_seconds,
                advance=lambda count: progress.advance(task, count),
            )
    if written.errors:
        announce(f"prompts without an answer: {len(written.errors)}; first: {written.errors[0]}")
    # Free the engine's memory for training.
    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return written


@contextmanager
def _answers(output: Path, config: EngineConfig, params: SamplingParams) -> Iterator[Journal]:
    """Open the answers of ``output`` for the block; an end before its time says that they stay."""
    from sametoken.train.generate import open_answers

    with open_answers(output, config, params) as kept:
        try:
            yield kept
        except (KeyboardInterrupt, EngineDeadError):
            if len(kept):
                announce(f"answers kept: {len(kept)}; the same command goes on from them")
            raise


def _encoder(model: Path, text: Path | None) -> Callable[[Any], list[int]] | None:
    """Return a function from messages to token ids; it loads the tokenizer on first use."""
    if text is None:
        return None

    @cache
    def tokenizer() -> Tokenizer:
        from sametoken.text.tokenizer import load_tokenizer

        return load_tokenizer(model)

    def encode(messages: Any) -> list[int]:
        is_prompt = not messages or messages[-1]["role"] != "assistant"
        rendered = tokenizer().apply_chat_template(messages, add_generation_prompt=is_prompt)
        return list(tokenizer().encode(rendered, add_special_tokens=False))

    return encode


@contextmanager
def _progress(output: Path) -> Iterator[Callable[[Report], None]]:
    """Show a progress bar with loss, learning rate and acceptance per position.

    An interrupt says what goes on from the checkpoint, if there is one.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from sametoken.train.loop import CHECKPOINT

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    console, last_line = status_console(), 0.0
    progress = Progress(*columns, console=console)
    task = progress.add_task("training", total=None, figures="")
    with ExitStack() as shown:

        def report(now: Report) -> None:
            nonlocal last_line
            # A training that is refused shows no empty bar.
            if not progress.live.is_started:
                shown.enter_context(progress)
            figures = _figures(now)
            progress.update(task, completed=now.step, total=now.steps, figures=figures)
            # The bar is drawn only on terminals; logs get lines.
            if not console.is_terminal and now.seconds - last_line >= _LINE_INTERVAL_S:
                last_line = now.seconds
                announce(f"step {now.step} of {now.steps}, {now.seconds:.0f} s: {figures}")

        try:
            yield report
        except KeyboardInterrupt:
            if is_there(output / CHECKPOINT):
                announce(f"{output / CHECKPOINT} is kept; --resume goes on from it")
            raise


def _figures(now: Report) -> str:
    figures = f"loss {now.loss:.3f}  lr {now.learning_rate:.1e}"
    if now.acceptance:
        rates = " ".join(f"{100 * rate:.0f}" for rate in now.acceptance)
        figures += f"  accepted {rates} %  length {now.length:.2f}"
    return figures
