"""``sametoken eval``: accuracy on lm-eval's tasks, with a minimum score for the exit code."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sametoken.bench import accuracy
from sametoken.cli.options import AsJson, engine_options, options_of, take, with_options
from sametoken.cli.report import status_console
from sametoken.config import DEFAULT_MODEL, MODEL_HELP, EngineConfig
from sametoken.errors import ConfigError
from sametoken.types.lora_modules import require_adapter

if TYPE_CHECKING:
    from sametoken.llm import LLM

BELOW = 1
_TASK = options_of(accuracy.TaskOptions, ("tasks",))


@with_options(_TASK, engine_options())
def evaluate(
    task: Annotated[
        str, typer.Argument(help="gsm8k, or a list of lm-eval's tasks, as in gsm8k,hellaswag")
    ],
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    *,
    min_score: Annotated[
        float | None, typer.Option(help="exit with 1 if a task's score is below this, 0..1")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="name of lm-eval's metric [default: the task's main metric]")
    ] = None,
    compare_plain: Annotated[
        bool,
        typer.Option(
            "--compare-plain", help="answer again without drafts; exit with 1 if answers differ"
        ),
    ] = False,
    json_output: AsJson = False,
    **options: Any,
) -> None:
    """Measure accuracy with lm-eval (the extra "eval") and check it against a minimum.

    gsm8k uses the eight few-shot examples of lm-eval's gsm8k_cot; its questions ship with the
    package. Data of other tasks is downloaded from the Hugging Face hub.
    """
    from sametoken.engine.unloaded import UnloadedModel
    from sametoken.llm import LLM

    accuracy.require_harness()
    if min_score is not None and not 0 <= min_score <= 1:
        raise ConfigError(f"min_score={min_score} is not possible", "use a number from 0 to 1")
    settings = accuracy.TaskOptions(tuple(task.split(",")), **take(options, _TASK))
    # Before the model is looked at: options, tasks and their data.
    config = EngineConfig.from_options(model=model, **options)
    if compare_plain and config.speculative_config is None:
        raise ConfigError("there is no speculation to compare", "give --speculative-config")
    require_adapter(config.lora_modules, settings.lora_request)
    status = status_console()
    status.print(f"loading the data of {task}")
    tasks = accuracy.load_tasks(settings)
    if metric is not None:
        accuracy.require_metric(tasks, metric)
    if min_score is not None:
        accuracy.require_higher_is_better(tasks, metric)
    unloaded = UnloadedModel.of(config, status.print)
    accuracy.require_usable(unloaded, settings)
    llm = LLM.from_unloaded(unloaded, status.print)
    found = _found(llm, tasks, settings, metric, min_score, compare_plain=compare_plain)
    typer.echo(json.dumps(found) if json_output else "\n".join(_lines(found)))
    if not found["passed"]:
        raise typer.Exit(BELOW)


def _found(
    llm: LLM,
    tasks: Any,
    settings: accuracy.TaskOptions,
    metric: str | None,
    min_score: float | None,
    *,
    compare_plain: bool,
) -> dict[str, Any]:
    """Evaluate, and collect scores, comparisons and whether all checks passed."""
    evaluation = accuracy.evaluate(llm, tasks, settings)
    speculation = llm.speculation_metrics
    scores = {name: evaluation.score(name, metric) for name in evaluation.scores}
    unscored = [name for name in tasks["tasks"] if name not in scores]
    differ = None
    if compare_plain:
        plain = accuracy.evaluate(llm, accuracy.load_tasks(settings), settings, plain=True)
        pairs = zip(evaluation.answers, plain.answers, strict=True)
        differ = sum(one != other for one, other in pairs)
    # A check of nothing fails, and so does a score that is not finite.
    high = min_score is None or (
        bool(scores)
        and not unscored
        and all(min_score <= score < math.inf for _, score in scores.values())
    )
    same = not compare_plain or (differ == 0 and bool(evaluation.answers))
    return {
        "model": str(llm.resolved.model_path),
        "asked": dataclasses.asdict(settings) | {"path": settings.path and str(settings.path)},
        "scores": {
            task: {name: _finite(score) for name, score in found.items()}
            for task, found in evaluation.scores.items()
        },
        "main": {
            task: {"metric": name, "score": _finite(score)}
            for task, (name, score) in scores.items()
        },
        "tasks_without_score": unscored,
        "min_score": min_score,
        "num_answers": len(evaluation.answers),
        "num_truncated": evaluation.num_truncated,
        "answers_that_differ": differ,
        "acceptance_length": speculation.acceptance_length
        if speculation.num_draft_tokens
        else None,
        "synthetic": list(llm.resolved.config.synthetic),
        "passed": high and same,
    }


def _finite(score: float) -> float | None:
    """The score; None for one that is not finite, which JSON has not."""
    return score if math.isfinite(score) else None


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines = []
    if found["synthetic"]:
        lines.append(f"{', '.join(found['synthetic']).upper()}: the scores are meaningless")
    for task, scores in found["scores"].items():
        lines += [f"{task}  {name}  {_in_digits(score)}" for name, score in scores.items()]
    lines += [f"{task} has no score" for task in found["tasks_without_score"]]
    if found["min_score"] is not None:
        lines += _against_minimum(found["main"], found["min_score"])
    if found["num_truncated"]:
        lines.append(f"{found['num_truncated']} prompts were too long and truncated on the left")
    if found["acceptance_length"] is not None:
        lines.append(f"acceptance length {found['acceptance_length']:.2f}")
    if found["answers_that_differ"] is not None and not found["num_answers"]:
        lines.append("there are no answers to compare with plain decoding")
    elif found["answers_that_differ"] is not None:
        lines.append(
            f"{found['answers_that_differ']} of {found['num_answers']} answers differ from "
            "plain decoding"
        )
    return lines


def _against_minimum(main: Mapping[str, Any], min_score: float) -> list[str]:
    if not main:
        return [f"no score is there to compare with {min_score:g}"]
    lines = []
    for task, one in main.items():
        score = one["score"]
        if score is None:
            lines.append(f"{task}: the score is not a number, or not finite")
        else:
            relation = "below" if score < min_score else "at least"
            lines.append(f"{task}: {score:.4f} is {relation} {min_score:g}")
    return lines


def _in_digits(score: float | None) -> str:
    return "-" if score is None else f"{score:.4f}"
