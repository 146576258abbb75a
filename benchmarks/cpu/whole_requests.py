"""sametoken beside transformers on the CPU: SmolLM2-135M, two real prompts, greedy.

Every side loads the same GGUF file in a separate process, and the sides answer in turn; figures
are medians over the repeats. The read bandwidth measured in the same run bounds the speed of a
step:

    python benchmarks/cpu/whole_requests.py [--threads 2] [--max-tokens 128] [--repeats 3]
        [--json PATH]

Exits with 1 if speculation changed one of our tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from report import MAX_OTHERS, Results, report
from rich.console import Console
from rich.progress import Progress
from sides import Side

from sametoken.cli.demo import CODE_EDIT
from sametoken.config import DEFAULT_MODEL
from sametoken.models.names import resolve_model
from sametoken.text.tokenizer import load_tokenizer

QUESTION = "Why is the sky blue, and why are sunsets red? Explain it to a curious child in detail."
PROMPTS = {"A code edit": CODE_EDIT, "A question": QUESTION}
WORKER = Path(__file__).with_name("sides.py")
NGRAM_DRAFTS = (4, 8, 12)
LOOKUP_DRAFTS = 10
OUR_SPIN = "3000"
WARM_UP_TOKENS = 16
MAX_TRIALS = 4
PAUSE_SECONDS = 1.0
FILE_WIDTH = 160
SPIN_VARIABLE = "GOMP_SPINCOUNT"


def sides(model: str, threads: int) -> list[Side]:
    """List all sides, ours and theirs alternating; theirs with both spin counts."""
    ours = [Side("sametoken", model, "bfloat16", threads, drafts) for drafts in (0, *NGRAM_DRAFTS)]
    ours += [
        Side("sametoken", model, "float32", threads, drafts) for drafts in (0, NGRAM_DRAFTS[-1])
    ]
    theirs = [
        Side("transformers", model, dtype, threads, drafts, spin)
        for dtype in ("bfloat16", "float32")
        for drafts in (0, LOOKUP_DRAFTS)
        for spin in (None, OUR_SPIN)
    ]
    mixed = [side for pair in zip(ours, theirs, strict=False) for side in pair]
    return mixed + theirs[len(ours) :]


class Worker:
    """A side's process; one request at a time."""

    def __init__(self, side: Side, process: subprocess.Popen[str]) -> None:
        self.side, self._process = side, process
        self._send(asdict(side))

    def _send(self, value: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.side.name!r} ended; see its error above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def request(self, **request: Any) -> dict[str, Any]:
        self._send(request)
        return self.read()


@contextmanager
def start(side: Side, command: Sequence[str] = (sys.executable, str(WORKER))) -> Iterator[Worker]:
    """Start a side's process, without this process's OpenMP settings."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_", "KMP_"))}
    environ |= {"OMP_NUM_THREADS": str(side.threads), "TQDM_DISABLE": "1"}
    if side.spin is not None:
        environ[SPIN_VARIABLE] = side.spin
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*command], env=environ, text=True, **pipes) as process:
        try:
            yield Worker(side, process)
        finally:
            process.kill()


@dataclass(slots=True)
class Measured:
    """A side and its answers by prompt, one per repeat."""

    worker: Worker
    weights_bytes: int = 0
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def as_json(self, kv_bytes_per_token: int, prompts: Mapping[str, list[int]]) -> dict[str, Any]:
        side, last = self.worker.side, self.answers[next(iter(self.answers))][-1]
        longest = max(
            len(prompts[title]) + len(ids_of(answers[-1]))
            for title, answers in self.answers.items()
        )
        kv_bytes = longest * kv_bytes_per_token * (2 if side.dtype == "float32" else 1)
        return {
            "name": side.name,
            "engine": side.engine,
            "dtype": side.dtype,
            "num_drafts": side.num_drafts,
            "spin": side.spin,
            "weights_bytes": self.weights_bytes,
            "kv_bytes_used": kv_bytes,
            "rss_after_imports": last["rss_imported"],
            "peak_rss_increase": max(a[-1]["peak"] for a in self.answers.values()),
            "rss_increase": last["rss"],
            "prompts": {title: summarise(answers) for title, answers in self.answers.items()},
        }


def ids_of(answer: Mapping[str, Any]) -> list[int]:
    return [token_id for _, token_ids in answer["events"] for token_id in token_ids]


def summarise(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute medians over the repeats, and the figures of every repeat."""
    samples = [rates(answer) for answer in answers]
    events = answers[0]["events"]
    ids = ids_of(answers[0])
    return {
        **{name: statistics.median(sample[name] for sample in samples) for name in samples[0]},
        "acceptance_length": len(ids) / len(events),
        "speculation": answers[0]["speculation"],
        "token_ids": ids,
        "repeatable": all(ids_of(answer) == ids for answer in answers),
        "samples": samples,
    }


def rates(answer: Mapping[str, Any]) -> dict[str, float]:
    events = answer["events"]
    (first_at, first), (last_at, _) = events[0], events[-1]
    num_tokens = len(ids_of(answer))
    return {
        "decode_tokens_per_second": (num_tokens - len(first)) / (last_at - first_at),
        "request_tokens_per_second": num_tokens / last_at,
        "time_to_first_token": first_at,
        "others_cores": answer["others_cores"],
        "trials": answer["trials"],
    }


def best_bandwidth(machine: Worker, so_far: Mapping[str, float]) -> dict[str, float]:
    found = machine.request(what="bandwidth")
    return {name: max(rate, so_far.get(name, 0.0)) for name, rate in found.items()}


def run(options: argparse.Namespace, console: Console) -> Results:
    """Run all measurements; return the results as JSON values."""
    model = str(resolve_model(DEFAULT_MODEL, console.print))
    tokenizer = load_tokenizer(Path(model))
    prompts = {
        title: list(
            tokenizer.encode(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True
                ),
                add_special_tokens=False,
            )
        )
        for title, text in PROMPTS.items()
    }
    environment = describe(options)
    with ExitStack() as stack:
        machine = stack.enter_context(start(Side("machine", model, "bfloat16", options.threads)))
        tokenizer_bytes = machine.request(what="tokenizer")["bytes"]
        kv_bytes_per_token = machine.request(what="kv")["bytes_per_token"]
        bandwidth = best_bandwidth(machine, {})
        question = prompts["A question"]
        parts = machine.request(what="profile", prompt=question, max_tokens=options.max_tokens)
        measured = []
        for side in sides(model, options.threads):
            worker = stack.enter_context(start(side))
            # Sides load and warm up one at a time, before any measurement.
            loaded = worker.read()
            measured.append(Measured(worker, loaded["weights_bytes"]))
            for prompt in prompts.values():
                worker.request(prompt=prompt, max_tokens=WARM_UP_TOKENS)
        take_turns(measured, prompts, options, console)
        bandwidth = best_bandwidth(machine, bandwidth)
    return environment | {
        "load_after": os.getloadavg()[0],
        "prompt_tokens": {title: len(prompt) for title, prompt in prompts.items()},
        "bandwidth_gb_s": bandwidth,
        "tokenizer_bytes": tokenizer_bytes,
        "profile": parts,
        "sides": [one.as_json(kv_bytes_per_token, prompts) for one in measured],
    }


def take_turns(
    measured: list[Measured],
    prompts: Mapping[str, list[int]],
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Let every side answer a prompt before any side answers the next."""
    # No automatic refresh: its thread would disturb the measurement.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("requests", total=options.repeats * len(prompts) * len(measured))
        for _ in range(options.repeats):
            for title, prompt in prompts.items():
                for one in measured:
                    answer = quiet_answer(one.worker, prompt, options.max_tokens)
                    if len(ids_of(answer)) != options.max_tokens:
                        raise SystemExit(f"{one.worker.side.name} ended its answer early")
                    one.answers.setdefault(title, []).append(answer)
                    progress.update(task, advance=1, refresh=True)


def quiet_answer(
    worker: Worker, prompt: list[int], max_tokens: int, max_trials: int = MAX_TRIALS
) -> dict[str, Any]:
    """Answer again while other processes used the cores, up to ``max_trials`` times."""
    for trial in range(max_trials):
        if trial:
            time.sleep(PAUSE_SECONDS)
        answer = worker.request(prompt=prompt, max_tokens=max_tokens)
        if answer["others_cores"] <= MAX_OTHERS:
            break
    return answer | {"trials": trial + 1}


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Return date, machine, versions and options."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
        cpu = f"{facts['model name']} family {facts['cpu family']} model {facts['model']}".strip()
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "cpu": " ".join(cpu.split()),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "sametoken": version("sametoken"),
        "load_before": os.getloadavg()[0],
    }


def measure(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace, Console], Results],
    report: Callable[[Results, Console], bool],
) -> NoReturn:
    """Run, report and store; exit with 1 if one of our tokens changed."""
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128, help="maximum tokens per answer")
    parser.add_argument(
        "--json",
        type=Path,
        help="file for the raw results; the tables are written beside it as .md",
    )
    options = parser.parse_args()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    results = run(options, console)
    same = report(results, console)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        with options.json.with_suffix(".md").open("w", encoding="utf-8") as file:
            report(results, Console(file=file, width=FILE_WIDTH, highlight=False))
    sys.exit(0 if same else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    measure(parser, run, report)


if __name__ == "__main__":
    main()
