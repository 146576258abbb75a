"""Training text for a small language model: code, conversations, code edits.

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

# A conversation: the user's message and the answer.
Chat = tuple[str, str]
PACKAGES = (
    "sympy networkx sklearn scipy pandas numpy mypy rich jinja2 requests fastapi pydantic "
    "transformers stdlib"
)
# Of code, of pieces of code to edit, and of generated calculators to edit.
MOST_CHARACTERS, MOST_PIECES, CALCULATORS = 110_000_000, 45_000, 12_000
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


def all_sources(wheels: Path | None) -> Iterator[str]:
    if wheels:
        yield from wheel_sources(wheels)
    for name in PACKAGES.split():
        yield from package_sources(name)


def is_code(text: str) -> bool:
    """Return whether a file is written code, neither a stub nor data."""
    if not 200 < len(text) < 60_000 or text.count("\n") < 8:
        return False
    return max(map(len, text.splitlines())) <= 400


def whole_files(wheels: Path | None, choose: random.Random) -> list[str]:
    """Return each file once, in random order."""
    files = list(dict.fromkeys(text for text in all_sources(wheels) if is_code(text)))
    choose.shuffle(files)
    return files


def within(files: list[str], num_characters: int) -> list[str]:
    """Return the first files within a total size."""
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
    prompt, answer = chat
    return {
        "messages": [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": answer},
        ]
    }


def write(path: Path, rows: Iterable[object]) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    # Without a time stamp, so that the output is reproducible.
    path.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    size = sum(map(len, lines))
    print(f"{path.name}: {len(lines)} documents, {size} characters, {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--wheels", type=Path, help="folder of wheels with more code")
    args = parser.parse_args()
    # Old code has invalid escapes, which warn when parsed; generated code can be deeply nested.
    warnings.simplefilter("ignore", SyntaxWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    sys.setrecursionlimit(5000)
    choose = random.Random(0)
    args.output.mkdir(parents=True, exist_ok=True)
    files = whole_files(args.wheels, choose)
    edits = code_edits(files, choose, MOST_PIECES) + calculator_edits(choose, CALCULATORS)
    choose.shuffle(edits)
    write(args.output / "code.jsonl.gz", within(files, MOST_CHARACTERS))
    write(args.output / "chat.jsonl.gz", map(messages, conversations(args.datasets)))
    write(args.output / "edits.jsonl.gz", map(messages, edits))


if __name__ == "__main__":
    main()
