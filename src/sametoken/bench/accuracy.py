"""Accuracy on lm-eval's tasks."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken.bench.datasets import load_dataset
from sametoken.errors import ConfigError, UnsupportedError
from sametoken.types.option_values import closest, listed, option, require_least

if TYPE_CHECKING:
    from sametoken.engine.unloaded import UnloadedModel
    from sametoken.llm import LLM

GSM8K = "gsm8k"
#: lm-eval's task file; its eight worked examples are the few-shot examples of ``gsm8k``.
_GSM8K_CONFIG = "tasks/gsm8k/gsm8k-cot.yaml"
_HARNESS = "lm_eval"
#: Preferred metrics of a task that has several, best first.
_PREFERRED = ("exact_match,flexible-extract", "acc_norm,none", "acc,none")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one evaluation.

    Attributes:
        scores: by task, then by lm-eval's metric name.
        answers: all answers in order; equal answers give equal scores.
        num_truncated: prompts truncated on the left.
    """

    scores: dict[str, dict[str, float]]
    answers: list[Any]
    num_truncated: int

    def score(self, task: str, metric: str | None = None) -> tuple[str, float]:
        """Return a metric's name and value; by default the task's main metric.

        Raises:
            ConfigError: the task has no such metric.
        """
        scores = self.scores[task]
        name = metric or next((name for name in _PREFERRED if name in scores), next(iter(scores)))
        if name not in scores:
            raise ConfigError(f"{task} has no metric {name!r}", f"use {listed(scores)}")
        return name, scores[name]


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """The tasks to evaluate, and how.

    Attributes:
        tasks: ``gsm8k``, whose questions ship with the package, or tasks of lm-eval, which
            downloads their data.

    Raises:
        ConfigError: a path without ``gsm8k``, or a number that is too small.
    """

    tasks: tuple[str, ...]
    path: Path | None = option(None, "gsm8k: JSON lines with question and answer")
    limit: int | None = option(None, "maximum number of questions per task")
    num_fewshot: int | None = option(None, "number of few-shot examples [default: the task's]")
    max_tokens: int | None = option(None, "maximum tokens per answer [default: the task's]")
    chat: bool = option(False, "apply the chat template")
    lora_request: str | None = option(None, "adapter of --lora-modules that answers, by its name")

    def __post_init__(self) -> None:
        if self.path is not None and GSM8K not in self.tasks:
            raise ConfigError("only gsm8k takes questions from a file", "leave path out")
        require_least(self, limit=1, num_fewshot=0, max_tokens=1)


def require_harness() -> None:
    """Require that lm-eval is installed.

    Raises:
        UnsupportedError: it is not installed.
    """
    if importlib.util.find_spec(_HARNESS) is None:
        raise UnsupportedError("lm-eval is not installed", "run pip install 'sametoken[eval]'")


def require_usable(model: UnloadedModel, settings: TaskOptions) -> None:
    """Refuse a model that cannot answer as the settings say, before it is loaded.

    Raises:
        ConfigError: it has no tokenizer, no chat template, or too short a context.
    """
    tokenizer, longest = model.inputs.tokenizer, model.requested.max_model_len
    if tokenizer is None:
        raise ConfigError("an evaluation needs a tokenizer", "give --tokenizer")
    if settings.chat and not tokenizer.chat_template:
        raise ConfigError("the model has no chat template", "leave --chat out")
    if settings.max_tokens is not None and settings.max_tokens >= longest:
        raise ConfigError(
            f"max_tokens={settings.max_tokens} leaves no room for a prompt in {longest} tokens",
            "lower max_tokens",
        )


def evaluate(llm: LLM, tasks: Any, settings: TaskOptions, *, plain: bool = False) -> Evaluation:
    """Run lm-eval tasks.

    Args:
        llm: the engine.
        tasks: from ``load_tasks``; a second run needs others, since they draw their examples.
        settings: how to run them.
        plain: decode without drafts.

    Raises:
        UnsupportedError: a task needs an option that the engine lacks.
    """
    from lm_eval.evaluator import evaluate as run_tasks

    from sametoken.bench.harness import EngineLM

    model = EngineLM(llm, settings.lora_request, plain=plain, max_tokens=settings.max_tokens)
    output = run_tasks(
        model,
        tasks,
        limit=settings.limit,
        bootstrap_iters=0,
        log_samples=False,
        apply_chat_template=settings.chat,
        fewshot_as_multiturn=settings.chat,
    )
    scores = {task: _numbers(metrics) for task, metrics in output["results"].items()}
    return Evaluation(
        {task: numbers for task, numbers in scores.items() if numbers},
        model.answers,
        model.num_truncated,
    )


def load_tasks(settings: TaskOptions) -> Any:
    """Load lm-eval's tasks and their data, and set their number of few-shot examples.

    Raises:
        UnsupportedError: lm-eval is missing.
        ConfigError: a task is unknown or its data cannot be loaded.
    """
    require_harness()
    from lm_eval.tasks import TaskManager

    # lm-eval warns about data that it is given, and every option that a task leaves at its default.
    logging.getLogger(_HARNESS).setLevel(logging.ERROR)
    others = [name for name in settings.tasks if name != GSM8K]
    manager = TaskManager(include_defaults=bool(others))
    configs: list[Any] = [_gsm8k(settings.path)] if GSM8K in settings.tasks else []
    unknown = [name for name in others if not manager.match_tasks([name])]
    if unknown:
        close = closest(unknown[0], [GSM8K, *manager.all_tasks])
        raise ConfigError(
            f"lm-eval has no task {', '.join(unknown)}",
            f"did you mean {close!r}?" if close is not None else "see lm-eval ls tasks",
        )
    try:
        loaded = manager.load(configs + others)
    except Exception as error:
        # The data set libraries document no exception types.
        raise ConfigError(
            f"the data of {', '.join(settings.tasks)} cannot be loaded "
            f"({type(error).__name__}: {error})",
            "tasks other than gsm8k need the Hugging Face hub",
        ) from error
    for name, task in loaded["tasks"].items():
        if settings.num_fewshot is not None:
            _require_examples(name, task, settings.num_fewshot)
            task.set_config(key="num_fewshot", value=settings.num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=0)
    return loaded


def _require_examples(name: str, task: Any, num_fewshot: int) -> None:
    samples = getattr(task.get_config("fewshot_config"), "samples", None)
    if isinstance(samples, list) and num_fewshot > len(samples):
        raise ConfigError(
            f"num_fewshot={num_fewshot} is above the {len(samples)} examples of {name}",
            f"use 0 to {len(samples)}",
        )


def require_metric(tasks: Any, metric: str) -> None:
    """Refuse a metric that a task lacks, before there are answers.

    Args:
        tasks: from ``load_tasks``.
        metric: lm-eval's name, with the filter of answers, as in ``acc,none``.

    Raises:
        ConfigError: a task has no such metric.
    """
    for name, task in tasks["tasks"].items():
        known = _metrics(task)
        if metric not in known:
            raise ConfigError(f"{name} has no metric {metric!r}", f"use {listed(known)}")


def require_higher_is_better(tasks: Any, metric: str | None) -> None:
    """Refuse metrics of which a minimum would pass the worst values, before there are answers.

    Args:
        tasks: from ``load_tasks``.
        metric: one that all tasks have; None for each task's main metric.

    Raises:
        ConfigError: lower values of a task's metric are better.
    """
    for name, task in tasks["tasks"].items():
        known = _metrics(task)
        # Without a preferred one the main metric is the first that there is an answer for.
        chosen = [metric] if metric else [one for one in _PREFERRED if one in known][:1] or known
        lower = [one for one in chosen if known[one] is False]
        if lower:
            higher = [one for one, is_higher in known.items() if is_higher]
            raise ConfigError(
                f"min_score is of no use for {lower[0]!r} of {name}, where lower is better",
                f"use metric {listed(higher)}" if higher else "leave min_score out",
            )


def _metrics(task: Any) -> dict[str, bool | None]:
    """lm-eval's names of a task's metrics, and whether higher values are better, if known."""
    higher = task.higher_is_better()
    return {
        f"{kind},{chosen.name}": higher.get(kind)
        for kind in task.aggregation()
        for chosen in task._filters
    }


def _gsm8k(path: Path | None) -> dict[str, Any]:
    """Build lm-eval's chain-of-thought task config of GSM8K over local questions.

    Raises:
        ConfigError: a question has no answer, or as ``load_dataset``.
    """
    import lm_eval
    import yaml  # type: ignore[import-untyped]

    rows = []
    for item in load_dataset(GSM8K if path is None else "custom", path=path):
        if not isinstance(item.answer, str):
            raise ConfigError(
                f"question {item.item_id} of {path} has no answer",
                'give JSON lines with "question" and "answer"',
            )
        rows.append({"question": item.turns[0], "answer": item.answer})
    file = Path(lm_eval.__file__).parent / _GSM8K_CONFIG
    config: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    for key in ("dataset_path", "dataset_name", "tag"):
        config.pop(key, None)
    return config | {"task": GSM8K, "custom_dataset": _dataset_of(rows)}


def _dataset_of(rows: Sequence[dict[str, str]]) -> Callable[..., Any]:
    """Return the function that lm-eval calls to load the data set."""
    import datasets  # type: ignore[import-untyped]

    def load(**options: Any) -> Any:
        return {"test": datasets.Dataset.from_list(list(rows))}

    return load


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Select the scores among lm-eval's results of a task."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if "_stderr" not in name
        and "," in name
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }
