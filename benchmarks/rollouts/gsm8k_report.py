"""Runs of gsm8k_grpo.py side by side: a Markdown table, and curves as a page that fetches nothing.

    python benchmarks/rollouts/gsm8k_report.py none.json ngram.json eagle3.json --html gsm8k.html

The exit status is 1 if a log-probability differed, or the final weights of two runs do.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from plotly.graph_objects import Scatter
from plotly.subplots import make_subplots

# What each curve shows, by its title.
CURVES = {
    "mean reward": "reward",
    "share of right answers": "right",
    "tokens of an answer": "length",
    "tokens per step of a request": "tokens_per_step",
    "accepted drafts over offered ones": "acceptance",
    "tokens/s of generation": "rate",
}
TIMES = ("generation", "training", "update", "head")
# Beginning and end of a training are means over this share of its steps.
SHARE = 0.1


def read_run(path: Path) -> dict[str, Any]:
    """A run, with lengths and rates of each step."""
    run: dict[str, Any] = json.loads(path.read_text())
    for step in run["steps"]:
        step["length"] = step["tokens"] / step["answers"]
        step["rate"] = step["tokens"] / step["generation_seconds"]
    return run


def total(run: dict[str, Any], key: str) -> Any:
    """Over all steps."""
    return sum(step[key] for step in run["steps"])


def ends(run: dict[str, Any], key: str) -> str:
    """The means at the beginning and at the end."""
    values = [step[key] for step in run["steps"]]
    count = max(int(len(values) * SHARE), 1)
    return f"{mean(values[:count]):.2f} to {mean(values[-count:]):.2f}"


def table(runs: list[dict[str, Any]]) -> str:
    """One row for each run; times leave the first step out, in which kernels are compiled."""
    rows = [
        "| drafter | reward | right | tokens | differing | tokens per step | generation | "
        "training | update | the head | peak GPU memory | SHA-256 of the weights |",
        "|" + "---|" * 12,
    ]
    for run in runs:
        later = {"steps": run["steps"][1:]}
        times = (f"{total(later, f'{name}_seconds'):.1f} s" for name in TIMES)
        rows.append(
            f"| {run['settings']['speculation']} | {ends(run, 'reward')} | {ends(run, 'right')} | "
            f"{total(run, 'tokens'):,} | {total(run, 'differing')} | "
            f"{ends(run, 'tokens_per_step')} | {' | '.join(times)} | "
            f"{run['peak_gpu_bytes'] / 2**30:.1f} GiB | `{run['sha256'][:16]}` |"
        )
    return "\n".join(rows)


def page(runs: list[dict[str, Any]]) -> str:
    """The curves of all runs; where two are one line, the later one is dashed over the other."""
    figure = make_subplots(rows=len(CURVES) // 2, cols=2, subplot_titles=[*CURVES])
    colours = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
    for index, run in enumerate(runs):
        line = {"color": colours[index % 4], "dash": ("solid", "dash", "dot", "dashdot")[index % 4]}
        name = run["settings"]["speculation"]
        for place, key in enumerate(CURVES.values()):
            values = [step[key] for step in run["steps"]]
            curve = Scatter(y=values, name=name, line=line, showlegend=not place, legendgroup=name)
            figure.add_trace(curve, row=place // 2 + 1, col=place % 2 + 1)
    device = ", ".join(dict.fromkeys(run["device"] for run in runs))
    title = f"GRPO on GSM8K with exact rollouts, {device}: every curve over the steps of training"
    figure.update_layout(title=title, height=900, template="plotly_white")
    return figure.to_html(include_plotlyjs=True, full_html=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="JSON files of gsm8k_grpo.py")
    parser.add_argument("--html", type=Path, help="write the curves to this file")
    given = parser.parse_args()
    runs = [read_run(path) for path in given.runs]
    print(table(runs))
    if given.html:
        given.html.write_text(page(runs))
    differing = sum(total(run, "differing") for run in runs)
    equal = len({run["sha256"] for run in runs}) == 1
    print(f"\n{differing} log-probabilities differ; weights {'equal' if equal else 'DIFFER'}")
    return 1 if differing or not equal else 0


if __name__ == "__main__":
    sys.exit(main())
