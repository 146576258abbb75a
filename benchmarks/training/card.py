"""Write the card of the head that ships, from the files of its training and measurement.

    python benchmarks/training/card.py RESULTS HEAD

RESULTS holds ``training.json`` of ``sametoken train``, ``acceptance.json`` of ``acceptance.py``
and ``data.json``, which describes the text. HEAD is the head's directory; its ``README.md`` is
replaced. No number of the card is written by hand.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CARD = "README.md"
WEIGHTS = "model.safetensors"
TITLES = {"gsm8k": "GSM8K, test set", "humaneval": "HumanEval", "mt-bench": "MT-Bench, first turns"}


@dataclass(frozen=True, slots=True)
class Facts:
    """The sources of the card: three JSON files, and the head's config and weights."""

    training: dict[str, Any]
    acceptance: dict[str, Any]
    data: dict[str, Any]
    config: dict[str, Any]
    weights: bytes


def read_facts(results: Path, head: Path) -> Facts:
    names = ("training.json", "acceptance.json", "data.json")
    paths = [*(results / name for name in names), head / "config.json"]
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return Facts(*parts, (head / WEIGHTS).read_bytes())


def card(facts: Facts) -> str:
    """Render the card as Markdown."""
    data = facts.data
    sections = [
        f"# {data['name']}",
        f"An EAGLE-3 head that drafts for {data['target']}. It cannot change a token: the target "
        f"judges every draft. Licence of the weights: {data['licence']}.",
        usage(facts),
        "## Acceptance\n\n" + acceptance(facts.acceptance),
        "## Training\n\n" + training(facts),
        "## Data\n\n" + text(facts),
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in data["limits"]),
    ]
    return "\n\n".join(sections) + "\n"


def usage(facts: Facts) -> str:
    (method,) = facts.config["speculators_config"]["proposal_methods"]
    spec = {
        "method": facts.training["settings"]["kind"],
        "model": facts.data["name"],
        "num_speculative_tokens": method["speculative_tokens"],
    }
    command = f"sametoken generate smollm2 --speculative-config '{json.dumps(spec)}'"
    return (
        f'```bash\n{command} \\\n  --chat "Why is the sky blue?"\n```\n\n'
        'For the target `smollm2`, `"model"` may be left out.'
    )


def acceptance(found: dict[str, Any]) -> str:
    settings = found["settings"]
    rows = (
        (
            title,
            found[name]["requests"],
            f"{found[name]['acceptance_length']:.2f}",
            percentages(found[name]["per_position"]),
        )
        for name, title in TITLES.items()
    )
    said = (
        f"Greedy, {settings['k']} drafts a step, at most {settings['limit']} prompts of a set "
        f"and {settings['max_tokens']} tokens of an answer. The acceptance length is the mean "
        "number of tokens of a step that had drafts, the target's own counted; a draft is "
        "accepted at position i if all before it were."
    )
    heads = ("prompts of", "number", "acceptance length", "accepted by position, %")
    return f"{said}\n\n{table(heads, rows)}\n\nMean of the sets: **{found['mean']:.2f}**."


def training(facts: Facts) -> str:
    settings, result = facts.training["settings"], facts.training["result"]
    loop, digest = settings["loop"], hashlib.sha256(facts.weights).hexdigest()
    before = minutes(facts.data["text_seconds"])
    steps = f"{settings['ttt_steps']} drafts in a row are trained"
    rows = (
        ("by", f"`sametoken train {settings['kind']}`, on {facts.data['machine']}"),
        (
            "time",
            f"{minutes(result['seconds'])}, and {before} before it for the text",
        ),
        ("optimizer steps", f"{result['steps']}, of at most {loop['batch_tokens']} tokens"),
        ("sequences", f"of at most {loop['max_length']} tokens"),
        ("learning rate", f"{loop['learning_rate']:g}, after {loop['warmup_steps']} warm-up steps"),
        ("training-time test", f"{steps}, each weighs {settings['step_loss_decay']:g} of the last"),
        ("seed", loop["seed"]),
        ("draft vocabulary", f"{facts.config['draft_vocab_size']} tokens, {covered(result)}"),
        ("held back", f"{result['held_back']} sequences: {held_back(result)}"),
        ("size", f"{len(facts.weights) / 1e6:.1f} MB, bf16"),
        (f"sha256 of {WEIGHTS}", f"`{digest}`"),
    )
    return table(("", ""), rows)


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes"


def covered(result: dict[str, Any]) -> str:
    return f"{100 * result['coverage']:.2f} % of those in the answers"


def held_back(result: dict[str, Any]) -> str:
    length, rates = result["acceptance_length"], result["acceptance_per_position"]
    return f"acceptance length {length:.2f}, by position {percentages(rates)} %"


def text(facts: Facts) -> str:
    data, result = facts.data, facts.training["result"]
    rows = ((source["name"], source["licence"]) for source in data["sources"])
    also = ", their prompts as well" if facts.training["settings"]["loop"]["prompt_rows"] else ""
    return (
        f"{data['answers']} {result['sequences']} answers with {result['tokens']} tokens were "
        f"trained on{also}. The prompts:\n\n{table(('from', 'licence'), rows)}\n\n{data['notice']}"
    )


def percentages(rates: Iterable[float]) -> str:
    return " ".join(f"{100 * rate:.0f}" for rate in rates)


def table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    heads = tuple(heads)
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="directory of the three JSON files")
    parser.add_argument("head", type=Path, help="the head's directory; its card goes there")
    args = parser.parse_args()
    written = card(read_facts(args.results, args.head))
    (args.head / CARD).write_text(written, encoding="utf-8")
    print(f"{args.head / CARD}: {len(written.splitlines())} lines")


if __name__ == "__main__":
    main()
