"""Which hazards of a racecheck log are ours: ``python benchmarks/law/hazards.py LOG``.

Triton hands work to warp groups (``gl.warp_specialize``) through a byte of shared memory: written,
then a barrier of all warps, then read. racecheck does not see that barrier, since each side has its
own instruction for it, and reports the byte. It names the lines of the kernel's ``def`` and of
``gl.warp_specialize``; hazards between those two alone are counted and left aside.

Exit status: 0 if no other hazard was found, 1 otherwise.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
ACCESS = re.compile(r"(Read|Write) access at (\S+)\+0x[0-9a-f]+ in (\S+):(\d+)")
COUNT = re.compile(r"\[(\d+) hazards?\]")


def is_hand_over(file: str, line: int) -> bool:
    """Whether some source of this name has a kernel's ``def`` or its hand-over at this line."""
    for path in SOURCES.rglob(Path(file).name):
        lines = path.read_text().splitlines()
        if line <= len(lines) and re.match(
            r"def \w+_kernel\(|\s*gl\.warp_specialize\(", lines[line - 1]
        ):
            return True
    return False


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
        if is_hand_over(*first[1:]) and is_hand_over(*here[1:]):
            known += hazards
        else:
            found[f"{first[0]} and {here[0]}"] += hazards
    print(f"{known} hazards of the hand-over to warp groups, {found.total()} others")
    for pair, hazards in found.most_common():
        print(f"{hazards:6} {pair}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
