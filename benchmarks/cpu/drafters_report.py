"""The tables of ``drafters.py``, from its JSON."""

from __future__ import annotations

from collections.abc import Iterator

from report import SHOWN_POSITIONS, Results, disturbance, table_of
from rich.console import Console
from rich.table import Table


def report(results: Results, console: Console) -> bool:
    """Print the report; return whether no drafter changed one of our tokens."""
    counts = ", ".join(f"{count} of {name}" for name, count in results["prompts"].items())
    console.print(
        f"SmolLM2-135M-Instruct, greedy, one request at a time, at most {results['max_tokens']} "
        f"tokens, prompts: {counts}; {results['threads']} threads on {results['cores']} cores "
        f"({results['cpu']}), torch {results['torch']}, head {results['head']['name']} "
        f"(sha256 {results['head']['sha256'][:12]}), {results['date']}: `{results['command']}`",
        soft_wrap=True,
    )
    for rate, title in (
        ("decode", "After the first token"),
        ("request", "Whole requests, prompts included"),
    ):
        console.print(f"\n**{title}**, tokens/s and times plain decoding\n")
        console.print(speed_table(results, rate))
    console.print("\n**Acceptance length** of steps with drafts, accepted %, by place\n")
    console.print(acceptance_table(results))
    same, verdicts = compare_tokens(results)
    shares = [share for side in results["sides"] for share in side["others_cores"]]
    peaks = ", ".join(f"{one['name']} {one['peak_rss'] / 1e6:.0f}" for one in results["sides"])
    memory = f"Peak memory of the process, MB: {peaks}"
    lines = [*verdicts, *beside_llama(results), memory, *disturbance(results, shares)]
    console.print("\n" + "\n".join(f"- {line}" for line in lines), soft_wrap=True)
    return same


def speed_table(results: Results, rate: str) -> Table:
    table = table_of("", *results["prompts"], "mean speed-up")
    for side in results["sides"]:
        cells = [
            f"{found[f'{rate}_tokens_per_second']:.1f} ({found[f'{rate}_speed_up']:.2f}x)"
            for found in side["datasets"].values()
        ]
        table.add_row(side["name"], *cells, f"{side[f'mean_{rate}_speed_up']:.2f}x")
    return table


def acceptance_table(results: Results) -> Table:
    table = table_of("", *results["prompts"])
    for side in results["sides"]:
        if not side["speculative"]:
            continue
        cells = []
        for found in side["datasets"].values():
            drafted = found["speculation"]
            rates = drafted["per_position"][:SHOWN_POSITIONS]
            shown = " ".join(f"{100 * rate:.0f}" for rate in rates)
            cells.append(f"{drafted['acceptance_length']:.2f}: {shown or '-'}")
        table.add_row(side["name"], *cells)
    return table


def compare_tokens(results: Results) -> tuple[bool, list[str]]:
    """Return whether drafters changed none of our tokens, and the comparisons as text."""
    total = sum(results["prompts"].values())
    lines = [
        f"FAILED: {side['name']} changed tokens of the prompts {side['other_than_plain']}"
        for side in results["sides"]
        if side["engine"] == "sametoken" and side["other_than_plain"]
    ]
    if not lines:
        return True, [f"Tokens of every side of ours: the same in all {total} prompts"]
    return False, lines


def beside_llama(results: Results) -> Iterator[str]:
    """Compare the fastest side with a head with llama.cpp, if it ran."""
    total = sum(results["prompts"].values())
    drafting = [s for s in results["sides"] if (s["speculative"] or {}).get("model")]
    theirs = [side for side in results["sides"] if side["engine"] != "sametoken"]
    best = max(drafting, key=lambda side: side["mean_decode_speed_up"])
    yield f"Fastest with the head: {best['name']}, {best['mean_decode_speed_up']:.2f}x plain"
    if not theirs:
        yield "llama.cpp was left out: give --llama-python an interpreter that has llama-cpp-python"
    for other in theirs:
        for rate, what in (("decode", "after the first token"), ("request", "whole requests")):
            ratios = ", ".join(
                f"{name} {found[f'{rate}_tokens_per_second'] / their:.2f}x"
                for name, found in best["datasets"].items()
                for their in [other["datasets"][name][f"{rate}_tokens_per_second"]]
            )
            yield f"{best['name']} over {other['name']}, {what}: {ratios}"
        facts, equal = other["facts"], total - len(other["other_than_plain"])
        yield (
            f"{other['name']}: llama-cpp-python {facts['llama-cpp-python']}, {facts['system']}; "
            f"our tokens in {equal} of {total} prompts, its arithmetic being another"
        )
