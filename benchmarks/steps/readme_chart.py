"""Draw README's chart of decode steps from the results page.

    python benchmarks/steps/readme_chart.py > docs/assets/decode-steps.svg

Reads the first table of benchmarks/results/h200-beside-vllm.md: ms at 1 / 8 / 64 requests.
tests/e2e/test_readme.py holds the file to the page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "results" / "h200-beside-vllm.md"
REQUESTS = (1, 8, 64)
#: Labels of the page's rows, and of the chart.
ROWS = {
    "Qwen3-8B plain": "Qwen3-8B",
    "EAGLE-3, k=3": "Qwen3-8B, EAGLE-3",
    "Qwen3.5-9B plain": "Qwen3.5-9B",
}
WIDTH, LEFT, BAR, GAP, TOP = 760, 178, 13, 26, 46
PIXELS_PER_MS = 44
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .vllm { fill: #8c959f } .ours { fill: #1a7f37 }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .ours { fill: #3fb950 } }
"""


class Steps(NamedTuple):
    """Milliseconds of a decode step at each number of requests."""

    label: str
    vllm: tuple[float, ...]
    ours: tuple[float, ...]


def steps_of(page: str) -> list[Steps]:
    """The chart's rows of the page's table.

    Raises:
        ValueError: the page has no row of a label, or a row without three times.
    """
    found = []
    for row, label in ROWS.items():
        match = re.search(rf"^\| {re.escape(row)} \| ([^|]+) \| ([^|]+) \|", page, re.MULTILINE)
        if match is None:
            raise ValueError(f"no row {row!r} in the results page")
        vllm, ours = (tuple(map(float, cell.split("/"))) for cell in match.groups())
        if not len(vllm) == len(ours) == len(REQUESTS):
            raise ValueError(f"the row {row!r} has not {len(REQUESTS)} times")
        found.append(Steps(label, vllm, ours))
    return found


def chart(rows: list[Steps]) -> str:
    """The SVG: a pair of bars for every row and number of requests."""
    parts, y = [], TOP
    for row in rows:
        for number, vllm, ours in zip(REQUESTS, row.vllm, row.ours, strict=True):
            plural = "" if number == 1 else "s"
            name = row.label if number == REQUESTS[0] else ""
            parts.append(f'<text x="8" y="{y + BAR}">{name}</text>')
            parts.append(
                f'<text x="{LEFT - 8}" y="{y + BAR + 6}" text-anchor="end">{number}'
                f"{'' if name else f' request{plural}'}</text>"
            )
            for engine, ms in (("vllm", vllm), ("ours", ours)):
                width = round(ms * PIXELS_PER_MS)
                parts.append(
                    f'<rect class="{engine}" x="{LEFT}" y="{y}" width="{width}" height="{BAR}"/>'
                    f'<text x="{LEFT + width + 6}" y="{y + BAR - 2}">{ms:.2f}</text>'
                )
                y += BAR + 1
            y += GAP - BAR
        y += GAP - BAR
    head = (
        '<text x="8" y="20">Decode step, ms, one H200: random weights, synthetic acceptance</text>'
        f'<rect class="vllm" x="{LEFT + 300}" y="9" width="12" height="12"/>'
        f'<text x="{LEFT + 318}" y="20">vLLM 0.24.0</text>'
        f'<rect class="ours" x="{LEFT + 410}" y="9" width="12" height="12"/>'
        f'<text x="{LEFT + 428}" y="20">sametoken</text>'
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">\n'
        f"<title>Decode steps of vLLM 0.24.0 and sametoken in milliseconds</title>\n"
        f"<style>{STYLE}</style>\n{head}\n{body}\n</svg>"
    )


if __name__ == "__main__":
    print(chart(steps_of(PAGE.read_text(encoding="utf-8"))))
