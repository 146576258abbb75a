"""Accuracy by lm-eval's tasks, and a bar to hold it to."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sametoken.bench.datasets import load_dataset
from sametoken.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from sametoken.llm import LLM

GSM8K = "gsm8k"
#: lm-eval's task whose eight worked examples stand before every question of ``gsm8k``.
_GSM8K_FORM = "tasks/gsm8k/gsm8k-cot.yaml"
_HARNESS = "lm_eval"
#: Metrics that are preferred where a task has several.
_PREFERRED = ("exact_match,flexible-extract", "acc_norm,none", "acc,none")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one evaluation brought.

    Attributes:
        scores: by task, then by metric under lm-eval's names.
        answers: all that was answered, in order; equal answers give equal scores.
        num_truncated: prompts that lost their beginning.
    """

    scores: dict[str, dict[str, float]]
    answers: list[Any]
    num_truncated: int

    def score(self, task: str, metric: str | None = None) -> tuple[str, float]:
        """A metric of a task with its name; without one the task's main metric.

        Raises:
            ConfigError: the task has no such metric.
        """
        scores = self.scores[task]
        name = metric or next((name for name in _PREFERRED if name in scores), next(iter(scores)))
        if name not in scores:
            raise ConfigError(f"{task} has no metric {name!r}", f"use one of {tuple(scores)}")
        return name, scores[name]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is evaluated.

    Attributes:
        tasks: ``gsm8k``, whose questions ship with the package, or names that lm-eval knows,
            whose data it fetches.
        path: questions for ``gsm8k`` in place of those: JSON lines with question and answer.
        limit: questions of each task at most.
        num_fewshot: worked examples before each; None leaves it to the task.
        max_tokens: longest answer; None leaves it to the task.
        chat: ask through the chat template.

    Raises:
        ConfigError: a path without ``gsm8k``.
    """

    tasks: tuple[str, ...]
    path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    max_tokens: int | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        if self.path is not None and GSM8K not in self.tasks:
            raise ConfigError("only gsm8k takes questions from a file", "leave path out")


def require_harness() -> None:
    """Fail early where lm-eval is missing.

    Raises:
        UnsupportedError: it is not installed.
    """
    if importlib.util.find_spec(_HARNESS) is None:
        raise UnsupportedError("lm-eval is not installed", "pip install 'sametoken[eval]'")


def evaluate(llm: LLM, asked: Asked, *, plain: bool = False) -> Evaluation:
    """Run tasks.

    Args:
        llm: the engine.
        asked: what is run.
        plain: decode without drafts, whatever the engine's drafter.

    Raises:
        UnsupportedError: lm-eval is missing, or a task asks for what the engine lacks.
        ConfigError: a task is not known or its data cannot be had.
    """
    require_harness()
    from lm_eval.evaluator import evaluate as run_tasks

    from sametoken.bench.harness import EngineLM

    # lm-eval warns of every default that a task leaves to it.
    logging.getLogger(_HARNESS).setLevel(logging.ERROR)
    model = EngineLM(llm, plain=plain, max_tokens=asked.max_tokens)
    found = run_tasks(
        model,
        _load_tasks(asked),
        limit=asked.limit,
        bootstrap_iters=0,
        log_samples=False,
        apply_chat_template=asked.chat,
        fewshot_as_multiturn=asked.chat,
    )
    scores = {task: _numbers(metrics) for task, metrics in found["results"].items()}
    return Evaluation(
        {task: numbers for task, numbers in scores.items() if numbers},
        model.answers,
        model.num_truncated,
    )


def _load_tasks(asked: Asked) -> Any:
    """Tasks as lm-eval wants them, with their worked examples set."""
    from lm_eval.tasks import TaskManager

    others = [name for name in asked.tasks if name != GSM8K]
    manager = TaskManager(include_defaults=bool(others))
    wanted: list[Any] = [_gsm8k(asked.path)] if GSM8K in asked.tasks else []
    unknown = [name for name in others if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(f"lm-eval has no task {', '.join(unknown)}", "see lm-eval ls tasks")
    try:
        loaded = manager.load(wanted + others)
    except Exception as error:
        # Data comes through libraries that raise what they like.
        raise ConfigError(
            f"the data of {', '.join(asked.tasks)} cannot be had ({type(error).__name__}: {error})",
            "tasks other than gsm8k need the Hugging Face hub",
        ) from error
    for task in loaded["tasks"].values():
        if asked.num_fewshot is not None:
            task.set_config(key="num_fewshot", value=asked.num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=0)
    return loaded


def _gsm8k(path: Path | None) -> dict[str, Any]:
    """lm-eval's chain-of-thought form of GSM8K, over local questions.

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
    form = Path(lm_eval.__file__).parent / _GSM8K_FORM
    config: dict[str, Any] = yaml.safe_load(form.read_text(encoding="utf-8"))
    for key in ("dataset_path", "dataset_name", "tag"):
        config.pop(key, None)
    return config | {"task": GSM8K, "custom_dataset": _dataset_of(rows)}


def _dataset_of(rows: Sequence[dict[str, str]]) -> Callable[..., Any]:
    """What lm-eval calls to get its data."""
    import datasets  # type: ignore[import-untyped]

    def load(**options: Any) -> Any:
        return {"test": datasets.Dataset.from_list(list(rows))}

    return load


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The scores among what lm-eval says of a task."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if "_stderr" not in name
        and "," in name
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }
