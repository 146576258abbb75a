"""Prompt data sets: test sets that ship with the package, and the user's files."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from sametoken.errors import ConfigError
from sametoken.io.json_text import json_lines

RANDOM, SPEC_BENCH = "random", "spec-bench"
_RANDOM_ITEMS, _RANDOM_LEN = 1000, 64
_RANDOM_WORDS = "time year people way day thing man world life hand part child eye place work week"


@dataclass(frozen=True, slots=True)
class DatasetItem:
    """One conversation of a dataset.

    Attributes:
        item_id: a name for reports, of the file or its place there.
        turns: the user's messages in order; at least one.
        answer: the reference answer, if there is one.
    """

    item_id: str
    turns: tuple[str, ...]
    answer: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The first turn as a conversation for a chat template."""
        return [{"role": "user", "content": self.turns[0]}]


def _gsm8k(index: int, row: Mapping[str, Any]) -> DatasetItem:
    return DatasetItem(f"gsm8k-{index}", (row["question"],), row["answer"])


def _humaneval(index: int, row: Mapping[str, Any]) -> DatasetItem:
    text = f"Complete this Python function. Answer with the whole function.\n\n{row['prompt']}"
    return DatasetItem(row["task_id"], (text,), row["canonical_solution"])


def _turns(index: int, row: Mapping[str, Any]) -> DatasetItem:
    """Parse a row of FastChat's or Spec-Bench's question files."""
    return DatasetItem(_item_id(row["question_id"]), _texts(row["turns"]))


_SHIPPED: dict[str, Callable[[int, Mapping[str, Any]], DatasetItem]] = {
    "gsm8k": _gsm8k,
    "humaneval": _humaneval,
    "mt-bench": _turns,
}
DATASETS = (*_SHIPPED, RANDOM, SPEC_BENCH)


def load_dataset(
    name: str,
    *,
    path: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    input_len: int = _RANDOM_LEN,
) -> tuple[DatasetItem, ...]:
    """Load a dataset by name or from a file.

    Args:
        name: one of ``DATASETS``; any name if ``path`` is given.
        path: for ``spec-bench`` its ``question.jsonl``; otherwise one JSON value per line: a
            string, or an object with ``prompt``, ``question``, ``turns`` or ``messages``.
        limit: maximum number of items.
        seed: seed of ``random``, which draws common words.
        input_len: words per item of ``random``, about one token each.

    Raises:
        ConfigError: the name is unknown, or the file is missing or malformed.
    """
    require_dataset(name, path)
    if path is not None:
        items = _of_file(path, *(_SPEC_BENCH_LINE if name == SPEC_BENCH else _USER_LINE))
    elif name == RANDOM:
        items = _random_items(seed, _RANDOM_ITEMS if limit is None else limit, input_len)
    else:
        items = _of_package(name)
    return tuple(items if limit is None else items[:limit])


def require_dataset(name: str, path: Path | None) -> None:
    """Refuse a dataset that is not there, before anything is loaded for it.

    Raises:
        ConfigError: the name is unknown, or there is no such file.
    """
    if path is not None and not path.exists():
        raise ConfigError(f"{path} cannot be read (it does not exist)", "give a file of prompts")
    by_option = "by --path (in an audit by --prompts)"
    if path is None and name not in DATASETS:
        raise ConfigError(
            f"dataset {name!r} is not known",
            f"use {', '.join(DATASETS)}, or give a file {by_option}",
        )
    if path is None and name == SPEC_BENCH:
        raise ConfigError("spec-bench does not ship with the package", f"give its file {by_option}")


def require_named(name: str, path: Path | None) -> None:
    """Refuse a file under the name of prompts that it does not hold.

    Raises:
        ConfigError: the name is that of a dataset of this package.
    """
    if path is not None and name in (*_SHIPPED, RANDOM):
        raise ConfigError(
            f"dataset {name!r} takes no file, and path is {path}",
            f"give --dataset custom or {SPEC_BENCH}, or leave path out",
        )


def _of_package(name: str) -> list[DatasetItem]:
    data = resources.files("sametoken.bench").joinpath(f"data/{name}.jsonl.gz").read_bytes()
    rows = map(json.loads, gzip.decompress(data).decode().splitlines())
    return [_SHIPPED[name](i, row) for i, row in enumerate(rows)]


def _of_file(
    path: Path, parse: Callable[[int, Any], DatasetItem], wanted: str
) -> list[DatasetItem]:
    items = []
    for number, row in json_lines(path):
        try:
            items.append(parse(number - 1, row))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"line {number} of {path} is no prompt", f"give {wanted}") from error
    if not items:
        raise ConfigError(f"{path} holds no prompts", "give one JSON value a line")
    return items


def _of_user(index: int, row: Any) -> DatasetItem:
    if isinstance(row, str):
        row = {"prompt": row}
    return DatasetItem(_item_id(row.get("id", index)), _user_turns(row), row.get("answer"))


def _user_turns(row: Mapping[str, Any]) -> tuple[str, ...]:
    for key in ("prompt", "question"):
        if key in row:
            return _texts([row[key]])
    if "messages" in row:
        return _texts([m["content"] for m in row["messages"] if m["role"] == "user"])
    return _texts(row["turns"])


def _texts(values: Any) -> tuple[str, ...]:
    is_list = isinstance(values, list) and bool(values)
    if not is_list or not all(isinstance(text, str) and text for text in values):
        raise ValueError("no text")
    return tuple(values)


def _item_id(value: Any) -> str:
    if not isinstance(value, str | int):
        raise ValueError(f"{type(value).__name__} in place of a name")
    return str(value)


#: Readers of a line, and what it must be.
_USER_LINE = _of_user, "a text, or an object with texts in prompt, question, turns or messages"
_SPEC_BENCH_LINE = _turns, "an object with question_id and turns, as in its question.jsonl"


def _random_items(seed: int, count: int, input_len: int) -> list[DatasetItem]:
    choose = random.Random(seed)
    words: Sequence[str] = _RANDOM_WORDS.split()
    return [
        DatasetItem(f"random-{i}", (" ".join(choose.choices(words, k=input_len)),))
        for i in range(count)
    ]
