"""The report of the cross-check: acceptance, tokens and times of both sides.

    python benchmarks/cross_check/report.py DIR PROMPTS.jsonl

DIR holds the sides' results: ours_plain.json, ours_eagle3.json, vllm_plain.json and
vllm_eagle3.json; missing ones are left out. Exits with 1 if the acceptance lengths differ by more
than 2 %, if our drafts changed one of our tokens, or if answers diverge where neither engine has a
near tie.

Acceptance is counted from the emitted tokens in the same way for both: a step counts if it had
room for all its drafts and was not its request's last, because engines end answers differently.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from passes import NUM_DRAFTS, ONE_BY_ONE, TOGETHER, Pass, Side, read_prompts, read_side

NAMES = ("ours_plain", "ours_eagle3", "vllm_plain", "vllm_eagle3")
TOLERANCE = 0.02
# In nats. bf16 logits between 16 and 32 are 1/8 apart, and the engines round differently.
NEAR_TIE = 0.25
EDGES = (0.05, 0.125, NEAR_TIE, 0.5)


@dataclass(frozen=True)
class Divergence:
    """The first divergence of two answers to one request.

    Attributes:
        position: index in the answer.
        one, other: the tokens there; None past an answer's end.
        margins: by engine, its log-probability difference between the two tokens, in nats;
            engines that were not probed at this prefix are missing.
    """

    request: str
    position: int
    one: int | None
    other: int | None
    margins: dict[str, float]

    @property
    def margin(self) -> float | None:
        """The smallest margin: a near tie in either engine explains the divergence."""
        return min(self.margins.values(), default=None)


def drafted(one: Pass, max_tokens: int) -> list[list[int]]:
    """Return the emitted tokens [request][step] of the steps that count; the last never does."""
    every = []
    for steps in one.steps:
        counted, first = [], 0
        for number, step in enumerate(steps):
            has_room = first + NUM_DRAFTS + 1 < max_tokens
            if number and number < len(steps) - 1 and has_room:
                counted.append(len(step))
            first += len(step)
        every.append(counted)
    return every


def flat(lists: list[list[int]]) -> list[int]:
    return [value for one in lists for value in one]


def mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else float("nan")


def first_difference(one: list[int], other: list[int]) -> int | None:
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def margin_at(side: Side, request: int, prefix: list[int], pair: tuple) -> float | None:
    """Return the difference of the pair's log-probabilities after the prefix.

    A token that is not among the candidates counts as the last of them: a lower bound.
    """
    position = len(prefix)
    if not side.probed or side.probed[request][:position] != prefix or None in pair:
        return None
    if position >= len(side.candidates[request]):
        return None
    found = side.candidates[request][position]
    known = dict(found)
    least = min(known.values())
    return abs(known.get(pair[0], least) - known.get(pair[1], least))


def divergences(
    names: list[str], one: Pass, other: Pass, probed: dict[str, Side]
) -> list[Divergence]:
    found = []
    for request, (mine, theirs) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        position = first_difference(mine, theirs)
        if position is None:
            continue
        pair = tuple(t[position] if position < len(t) else None for t in (mine, theirs))
        every = {n: margin_at(s, request, mine[:position], pair) for n, s in probed.items()}
        margins = {name: margin for name, margin in every.items() if margin is not None}
        found.append(Divergence(names[request], position, *pair, margins))
    return found


def in_common(one: Pass, other: Pass, max_tokens: int) -> tuple[list[int], list[int]]:
    """Return the emitted tokens of both sides' steps before their answers diverge."""
    kept: tuple[list[int], list[int]] = ([], [])
    for request, (mine, theirs) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        end = first_difference(mine, theirs)
        for side, counted in zip((one, other), kept, strict=True):
            steps = side.steps[request]
            first = len(steps[0])
            for emitted in drafted(side, max_tokens)[request]:
                first += emitted
                # The step after the last shared token verified drafts of the same context, but
                # its length includes the divergence.
                if end is None or first <= end:
                    counted.append(emitted)
    return kept


def noise(one: Side, other: Side) -> list[float]:
    """Return the differences of the two best log-probabilities after equal prefixes, sorted."""
    apart = []
    for request, (mine, theirs) in enumerate(zip(one.probed, other.probed, strict=True)):
        end = first_difference(mine, theirs)
        length = len(mine) if end is None else end + 1
        shown = zip(one.candidates[request], other.candidates[request], strict=False)
        for (a, b), _ in zip(shown, range(length), strict=False):
            known = dict(b)
            apart += [abs(known[token] - logprob) for token, logprob in a[:2] if token in known]
    return sorted(apart)


class Report:
    """The sections of the report, and the failures.

    Args:
        sides: the available sides by name.
        requests: names, in order.
    """

    def __init__(self, sides: dict[str, Side], requests: list[str]) -> None:
        self.sides, self.requests = sides, requests
        self.failures = [f"{name} has no results" for name in NAMES if name not in sides]
        self.probed = {n.split("_")[0]: s for n, s in sides.items() if s.probed}
        self.max_tokens = next(iter(sides.values())).settings["max_tokens"]

    def lines(self) -> Iterator[str]:
        yield "# SmolLM2 with the head that ships: ours beside vLLM"
        for name, side in self.sides.items():
            yield f"- {name}: {side.engine}, {side.settings}"
        yield from self.times()
        yield from self.acceptance()
        yield from self.tokens()
        yield ""
        yield "Failed: " + "; ".join(self.failures) if self.failures else "All as it should be."

    def times(self) -> Iterator[str]:
        yield ""
        yield "| tokens/s, prompts included | " + " | ".join((ONE_BY_ONE, TOGETHER)) + " |"
        yield "|---|---|---|"
        for name, side in self.sides.items():
            rates = []
            for one in side.passes.values():
                number = sum(map(len, one.tokens))
                every = [number / seconds for seconds in one.seconds]
                rates.append(f"{median(every):.0f} ({min(every):.0f} to {max(every):.0f})")
            yield f"| {name} | " + " | ".join(rates) + " |"

    def acceptance(self) -> Iterator[str]:
        yield ""
        yield "| acceptance length | counted alike | by position, % | as the engine counts |"
        yield "|---|---|---|---|"
        for pass_name in (ONE_BY_ONE, TOGETHER):
            lengths = {}
            for name in ("ours_eagle3", "vllm_eagle3"):
                if name not in self.sides:
                    continue
                one = self.sides[name].passes[pass_name]
                emitted = flat(drafted(one, self.max_tokens))
                lengths[name] = mean(emitted)
                places = range(1, NUM_DRAFTS + 1)
                shares = " ".join(f"{100 * mean([e > i for e in emitted]):.1f}" for i in places)
                drafts = one.counters.get("num_drafts") or 1
                own = 1 + one.counters.get("num_accepted_tokens", 0) / drafts
                row = f"{lengths[name]:.3f} of {len(emitted)} steps | {shares} | {own:.3f}"
                yield f"| {name}, {pass_name} | {row} |"
            if len(lengths) == 2:
                yield from self._together(pass_name, lengths["vllm_eagle3"], lengths["ours_eagle3"])

    def _together(self, pass_name: str, theirs: float, ours: float) -> Iterator[str]:
        passes = [self.sides[n].passes[pass_name] for n in ("ours_eagle3", "vllm_eagle3")]
        mine, other = in_common(*passes, self.max_tokens)
        if not abs(theirs / ours - 1) <= TOLERANCE:
            self.failures.append(f"acceptance {pass_name}: {theirs:.3f} beside our {ours:.3f}")
        yield (
            f"| vLLM over ours, {pass_name} | {theirs / ours:.4f} | until answers part: "
            f"{mean(mine):.3f} of {len(mine)} and {mean(other):.3f} of {len(other)} steps | |"
        )

    def tokens(self) -> Iterator[str]:
        if len(self.probed) == 2:
            apart = noise(self.probed["ours"], self.probed["vllm"])
            at = [apart[int(share * (len(apart) - 1))] for share in (0.5, 0.99, 1)]
            yield ""
            yield f"Log-probabilities of the two best tokens after equal prefixes: {len(apart)}"
            yield f"pairs, {at[0]:.3f} (median), {at[1]:.3f} (99 %), {at[2]:.3f} (most) nats apart."
        yield ""
        heads = " | ".join(f"to {edge}" for edge in EDGES)
        yield f"| answers | differ | first at (median) | margin {heads} | above | unknown |"
        yield "|---|---|---|" + "---|" * (len(EDGES) + 2)
        shown: list[tuple[str, Divergence]] = []
        for title, one, other in self._pairs():
            found = divergences(self.requests, one, other, self.probed)
            yield self._row(title, one, found)
            self._check(title, found)
            if "ours" in title and "vllm" in title:
                shown += [(title, divergence) for divergence in found]
        yield ""
        for title, p in shown:
            margins = ", ".join(f"{n} {m:.3f}" for n, m in p.margins.items()) or "unknown"
            yield f"- {title}: {p.request}, token {p.position}: {p.one} or {p.other}; {margins}"

    def _pairs(self) -> Iterator[tuple[str, Pass, Pass]]:
        def one(name: str, pass_name: str) -> Pass | None:
            return self.sides[name].passes[pass_name] if name in self.sides else None

        for mine, theirs in (
            (("ours_plain", ONE_BY_ONE), ("ours_plain", TOGETHER)),
            (("ours_plain", ONE_BY_ONE), ("ours_eagle3", ONE_BY_ONE)),
            (("ours_plain", TOGETHER), ("ours_eagle3", TOGETHER)),
            (("vllm_plain", ONE_BY_ONE), ("vllm_plain", TOGETHER)),
            (("vllm_plain", ONE_BY_ONE), ("vllm_eagle3", ONE_BY_ONE)),
            (("vllm_plain", TOGETHER), ("vllm_eagle3", TOGETHER)),
            (("ours_plain", TOGETHER), ("vllm_plain", TOGETHER)),
            (("ours_eagle3", TOGETHER), ("vllm_eagle3", TOGETHER)),
        ):
            a, b = one(*mine), one(*theirs)
            if a is not None and b is not None:
                yield f"{', '.join(mine)}; {', '.join(theirs)}", a, b

    def _row(self, title: str, one: Pass, found: list[Divergence]) -> str:
        first = median(p.position for p in found) if found else "-"
        margins = [p.margin for p in found if p.margin is not None]
        lows = (-1.0, *EDGES)
        counts = [
            sum(low < m <= high for m in margins)
            for low, high in zip(lows[:-1], EDGES, strict=True)
        ]
        counts += [sum(m > EDGES[-1] for m in margins), len(found) - len(margins)]
        cells = " | ".join(map(str, counts))
        return f"| {title} | {len(found)} of {len(one.tokens)} | {first} | {cells} |"

    def _check(self, title: str, found: list[Divergence]) -> None:
        if "vllm" not in title and found:
            self.failures.append(f"{title}: {len(found)} answers differ")
        wide = [p for p in found if p.margin is not None and p.margin > NEAR_TIE]
        if "vllm" in title and wide:
            self.failures.append(f"{title}: {len(wide)} answers part by more than {NEAR_TIE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("prompts", type=Path)
    args = parser.parse_args()
    paths = {name: args.directory / f"{name}.json" for name in NAMES}
    sides = {name: read_side(path) for name, path in paths.items() if path.is_file()}
    if not sides:
        sys.exit(f"{args.directory} holds no results")
    report = Report(sides, [prompt.request for prompt in read_prompts(args.prompts)])
    for line in report.lines():
        print(line)
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
