"""Text to train a small language model on: code, conversations, edits of code.

    python benchmarks/training/corpus.py DATASETS_DIR OUTDIR [--wheels DIR]

DATASETS_DIR holds the files of ``benchmarks/training/README.md``; code comes from installed
packages, and from wheels in a folder. Writes code.jsonl.gz, chat.jsonl.gz and edits.jsonl.gz,
as ``sametoken train lm --text`` reads them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from edits import calculator_edits, code_edits
from sources import exercise, fenced, instructed, mbpp_rows, package_sources, read_rows

# A conversation: what is asked, what is answered.
Chat = tuple[str, str]
PACKAGES = (
    "sympy networkx sklearn scipy pandas numpy mypy rich jinja2 requests fastapi pydantic "
    "transformers stdlib"
)
CALCULATION = re.compile(r"<<.*?>>")


def wheel_sources(folder: Path) -> Iterator[str]:
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".py"):
                    try:
                        yield archive.read(name).decode()
                    except UnicodeDecodeError:
                        continue


def all_sources(asked: argparse.Namespace) -> Iterator[str]:
    if asked.wheels:
        yield from wheel_sources(asked.wheels)
    for name in asked.packages.split():
        yield from package_sources(name)


def is_code(text: str) -> bool:
    """Neither a stub nor data: of some length, and in lines that someone wrote."""
    if not 200 < len(text) < 60_000 or text.count("\n") < 8:
        return False
    return max(map(len, text.splitlines())) <= 400


def whole_files(asked: argparse.Namespace, choose: random.Random) -> list[str]:
    """Each once, in random order."""
    files = list(dict.fromkeys(text for text in all_sources(asked) if is_code(text)))
    choose.shuffle(files)
    return files


def within(files: list[str], num_characters: int) -> list[str]:
    """The first files that fit together."""
    kept, used = [], 0
    for text in files:
        used += len(text)
        if used > num_characters:
            break
        kept.append(text)
    return kept


def conversations(folder: Path) -> Iterator[Chat]:
    for row in read_rows(folder, "gsm8k_train.jsonl"):
        answer = CALCULATION.sub("", row["answer"]).replace("#### ", "The answer is ")
        yield row["question"], answer + "."
    for row in read_rows(folder, "self_instruct_seed_tasks.jsonl"):
        for instance in row["instances"][:3]:
            yield instructed(row, instance), instance["output"]
    for row in mbpp_rows(folder):
        answer = fenced(row["code"])
        yield row["text"], answer
        yield f"{row['text']} Your code should pass this test:\n{row['test_list'][0]}", answer
    for row in read_rows(folder, "exercism_python.jsonl"):
        solution = fenced(row["solution"])
        yield exercise(row), solution
        yield f"Write tests for this Python code:\n\n{solution}", fenced(row["test"])


def messages(chat: Chat) -> dict:
    asked, answered = chat
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answered},
        ]
    }


def write(path: Path, rows: Iterable[object]) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    # Without a time stamp, so that the same text gives the same file.
    path.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    size = sum(map(len, lines))
    print(f"{path.name}: {len(lines)} documents, {size} characters, {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--packages", default=PACKAGES, help="names of installed packages")
    parser.add_argument("--wheels", type=Path, help="folder of wheels with more code")
    parser.add_argument("--characters", type=int, default=110_000_000, help="of code at most")
    parser.add_argument("--pieces", type=int, default=45_000, help="of code to edit, at most")
    parser.add_argument("--calculators", type=int, default=12_000, help="made-up code to edit")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    # Old code warns of its escapes when it is parsed; generated code can be deep.
    warnings.simplefilter("ignore", SyntaxWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    sys.setrecursionlimit(5000)
    choose = random.Random(asked.seed)
    asked.output.mkdir(parents=True, exist_ok=True)
    files = whole_files(asked, choose)
    edits = code_edits(files, choose, asked.pieces) + calculator_edits(choose, asked.calculators)
    choose.shuffle(edits)
    write(asked.output / "code.jsonl.gz", within(files, asked.characters))
    write(asked.output / "chat.jsonl.gz", map(messages, conversations(asked.datasets)))
    write(asked.output / "edits.jsonl.gz", map(messages, edits))


if __name__ == "__main__":
    main()
