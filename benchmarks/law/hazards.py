"""Which hazards of a racecheck log are ours: ``python benchmarks/law/hazards.py LOG``.

Triton hands work to warp groups (``gl.warp_specialize``) through bytes of shared memory: written,
then a barrier of all warps, then read. racecheck does not see that barrier, since each side has its
own instruction for it, and reports the bytes. It names the kernel's ``def`` for the groups' read,
and for the writes ``def`` and ``gl.warp_specialize``, an ``if`` around it, or a ``return``, which
tells the groups to end. Hazards between such lines of one kernel are counted and left aside.

Exit status: 0 if no other hazard was found, 1 otherwise.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
ACCESS = re.compile(r"(Read|Write) access at (\S+)\+0x[0-9a-f]+ in (\S+):(\d+)")
COUNT = re.compile(r"\[(\d+) hazards?\]")


def hand_overs(file: str) -> list[set[int]]:
    """By kernel that hands work to groups, in all sources of a name: the lines that do it."""
    found = []
    for path in SOURCES.rglob(Path(file).name):
        for kernel in ast.walk(ast.parse(path.read_text())):
            if not isinstance(kernel, ast.FunctionDef) or not kernel.name.endswith("_kernel"):
                continue
            calls = [node.lineno for node in ast.walk(kernel) if is_split(node)]
            around = [
                node.lineno
                for node in ast.walk(kernel)
                if isinstance(node, ast.If) and any(is_split(part) for part in ast.walk(node))
            ]
            ends = [node.lineno for node in ast.walk(kernel) if isinstance(node, ast.Return)]
            if calls:
                found.append({kernel.lineno, *calls, *around, *ends})
    return found


def is_split(node: ast.AST) -> bool:
    """Whether a node calls ``gl.warp_specialize``."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "gl.warp_specialize"


def main() -> None:
    known, found, first = 0, Counter[str](), None
    for text in Path(sys.argv[1]).read_text().splitlines():
        if not (access := ACCESS.search(text)):
            continue
        here = (f"{access[1]} {access[2]} {access[3]}:{access[4]}", access[3], int(access[4]))
        if "Race reported between" in text:
            first = here
            continue
        assert first, text
        hazards = int(count[1]) if (count := COUNT.search(text)) else 1
        both = {first[2], here[2]}
        if first[1] == here[1] and any(both <= lines for lines in hand_overs(here[1])):
            known += hazards
        else:
            found[f"{first[0]} and {here[0]}"] += hazards
    print(f"{known} hazards of the hand-over to warp groups, {found.total()} others")
    for pair, hazards in found.most_common():
        print(f"{hazards:6} {pair}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
