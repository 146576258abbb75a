"""The tables of ``whole_requests.py``, from its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Results = dict[str, Any]
MAX_LOAD = 1.0
MAX_OTHERS = 0.1
MAX_MEMORY_RATIO = 1.3
SHOWN_POSITIONS = 8


def report(results: Results, console: Console) -> bool:
    """Print the report; return whether speculation changed none of our tokens."""
    same, verdicts = compare_tokens(results)
    console.print(
        f"SmolLM2-135M-Instruct, greedy, {results['max_tokens']} new tokens, {results['threads']} "
        f"threads on {results['cores']} cores ({results['cpu']}), torch {results['torch']}, "
        f"transformers {results['transformers']}, {results['date']}; medians of "
        f"{results['repeats']}: `{results['command']}`",
        soft_wrap=True,
    )
    for title, num_tokens in results["prompt_tokens"].items():
        console.print(f"\n**{title}** ({num_tokens} prompt tokens)\n")
        console.print(speed_table(results, title))
    console.print("\n**Memory** after imports, token ids in and out\n")
    console.print(memory_table(results))
    console.print("\n**One plain step, bf16**, of the fastest request, timers included\n")
    console.print(step_table(results))
    lines = [*limits(results), *verdicts, *quietness(results)]
    console.print("\n" + "\n".join(f"- {line}" for line in lines), soft_wrap=True)
    return same


def chosen(results: Results, title: str) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield each side with its answer to a prompt, at the faster of two spin counts."""
    fastest: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for side in results["sides"]:
        answer, known = side["prompts"][title], fastest.get(side["name"])
        if known is None or _speed(answer) > _speed(known[1]):
            fastest[side["name"]] = (side, answer)
    yield from sorted(fastest.values(), key=lambda pair: (pair[0]["dtype"], pair[0]["name"]))


def _speed(answer: Mapping[str, Any]) -> float:
    return float(answer["decode_tokens_per_second"])


def table_of(*headings: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table


def speed_table(results: Results, title: str) -> Table:
    table = table_of(
        "", "decode tok/s", "request tok/s", "first token ms", "tokens/step", "accepted %, by place"
    )
    for side, answer in chosen(results, title):
        per_position = answer["speculation"].get("acceptance_per_position", ())
        table.add_row(
            side["name"],
            f"{_speed(answer):.1f}",
            f"{answer['request_tokens_per_second']:.1f}",
            f"{answer['time_to_first_token'] * 1e3:.0f}",
            f"{answer['acceptance_length']:.2f}",
            " ".join(f"{100 * rate:.0f}" for rate in per_position[:SHOWN_POSITIONS]) or "-",
        )
    return table


def memory_table(results: Results) -> Table:
    table = table_of("", "weights MB", "KV used MB", "peak MB", "peak ratio", "at rest MB", "ratio")
    shown: set[str] = set()
    for side in results["sides"]:
        if side["name"] in shown:
            continue
        shown.add(side["name"])
        used = side["weights_bytes"] + side["kv_bytes_used"]
        table.add_row(
            side["name"],
            f"{side['weights_bytes'] / 1e6:.0f}",
            f"{side['kv_bytes_used'] / 1e6:.1f}",
            f"{side['peak_rss_increase'] / 1e6:.0f}",
            f"{side['peak_rss_increase'] / used:.2f}",
            f"{side['rss_increase'] / 1e6:.0f}",
            f"{side['rss_increase'] / used:.2f}",
        )
    return table


def step_table(results: Results) -> Table:
    table = table_of("part", "ms", "%", "GB/s of weights")
    profile = results["profile"]
    for name, part in profile["parts"].items():
        rate = part["GB/s"]
        table.add_row(
            name,
            f"{part['ms']:.2f}",
            f"{100 * part['ms'] / profile['ms_per_step']:.1f}",
            f"{rate:.1f}" if rate else "-",
        )
    table.add_row("whole step", f"{profile['ms_per_step']:.2f}", "100.0", "-")
    return table


def limits(results: Results) -> Iterator[str]:
    """Compare plain decoding with the time to read the weights once per step."""
    rates = results["bandwidth_gb_s"]
    best = max(rates.values())
    yield "Reading 1 GiB in large pages: " + ", ".join(
        f"{n} {r:.1f} GB/s" for n, r in rates.items()
    )
    for title in results["prompt_tokens"]:
        for side, answer in chosen(results, title):
            if side["num_drafts"]:
                continue
            floor = side["weights_bytes"] / best / 1e6
            step = 1e3 / _speed(answer)
            yield (
                f"{title}, {side['name']}: {step:.2f} ms a step; {floor:.2f} ms to read the "
                f"weights; {100 * floor / step:.0f} % of the limit"
            )
    over = [
        side["name"]
        for side in results["sides"]
        if side["engine"] == "sametoken"
        and side["peak_rss_increase"]
        > MAX_MEMORY_RATIO * (side["weights_bytes"] + side["kv_bytes_used"])
    ]
    yield f"Sides of ours with a peak above {MAX_MEMORY_RATIO} x (weights + KV): {over or 'none'}"
    yield f"A tokenizer adds {results['tokenizer_bytes'] / 1e6:.0f} MB"


def compare_tokens(results: Results) -> tuple[bool, list[str]]:
    """Return whether speculation changed none of our tokens, and the comparisons as text."""
    same, lines = True, []
    names = {side["name"]: side for side in results["sides"]}
    pairs = [
        (side["name"], f"{side['engine']} {side['dtype']} plain")
        for side in names.values()
        if side["num_drafts"]
    ]
    pairs += [(f"sametoken {d} plain", f"transformers {d} plain") for d in ("float32", "bfloat16")]
    for one, other in pairs:
        differences = []
        for title in results["prompt_tokens"]:
            left, right = (names[name]["prompts"][title]["token_ids"] for name in (one, other))
            differences.append(_first_difference(left, right))
        ours = one.startswith("sametoken") and other.startswith("sametoken")
        same = same and not (ours and any(place is not None for place in differences))
        found = ", ".join(
            f"{title}: " + ("same" if place is None else f"differ from token {place}")
            for title, place in zip(results["prompt_tokens"], differences, strict=True)
        )
        lines.append(f"Tokens of {one} and {other}: {found}")
    for side in results["sides"]:
        for title, answer in side["prompts"].items():
            if not answer["repeatable"]:
                same = same and side["engine"] != "sametoken"
                lines.append(f"{side['name']}, {title}: tokens changed from repeat to repeat")
    return same, lines


def _first_difference(left: list[int], right: list[int]) -> int | None:
    places = (i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
    return next(places, None)


def quietness(results: Results) -> Iterator[str]:
    """Report the disturbance by other processes."""
    shares = [
        sample["others_cores"]
        for side in results["sides"]
        for answer in side["prompts"].values()
        for sample in answer["samples"]
    ]
    yield from disturbance(results, shares)


def disturbance(results: Results, shares: list[float]) -> Iterator[str]:
    """Report the load, and the cores that others used while each request ran."""
    mean, most = sum(shares) / len(shares), max(shares)
    disturbed = sum(share > MAX_OTHERS for share in shares)
    yield (
        f"Load average before {results['load_before']:.2f}, after {results['load_after']:.2f} "
        f"(this run's own {results['threads']} threads included); cores that others used while a "
        f"request ran: mean {mean:.2f}, at most {most:.2f}, above {MAX_OTHERS} in {disturbed} of "
        f"{len(shares)}"
    )
    if results["load_before"] > MAX_LOAD or disturbed:
        yield "WARN: other processes disturbed this run"
