"""The prompts of ``same_tokens_gpu.py``'s recorded run: 100 questions and 97 code edits.

    python benchmarks/law/same_prompts.py DATASETS_DIR OUT.jsonl [--model smollm2]

DATASETS_DIR holds gsm8k_test.jsonl (openai/grade-school-math, MIT) and exercism_python.jsonl
(exercism/python, MIT: one row per exercise, with the field ``solution``), possibly in a
subfolder. The edits use those of the first 100 solutions with 201 to 1499 characters: 97. Each
line of OUT is the token ids of a prompt in the model's chat format.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

from sametoken.models.names import resolve_model
from sametoken.text.tokenizer import load_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "training"))
from sources import read_rows

NUM_EACH = 100
EDIT = """\
<code>
{}
</code>
<update>
Add a docstring to every function. Output the whole file.
</update>"""


def texts(folder: Path) -> list[str]:
    questions = (row["question"] for row in read_rows(folder, "gsm8k_test.jsonl"))
    solutions = (row.get("solution") or "" for row in read_rows(folder, "exercism_python.jsonl"))
    edits = (EDIT.format(code) for code in solutions if 200 < len(code) < 1500)
    return [*islice(questions, NUM_EACH), *islice(edits, NUM_EACH)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--model", default="smollm2", help="model of the tokenizer and chat template"
    )
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve_model(args.model, print))
    lines = []
    for text in texts(args.datasets):
        messages = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        lines.append(json.dumps(tokenizer.encode(chat, add_special_tokens=False)))
    args.output.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} prompts")


if __name__ == "__main__":
    main()
