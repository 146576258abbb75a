"""vLLM and this engine under the same load: one process for one engine and configuration.

    python benchmarks/under_load/drive.py --engine ENGINE --config CONFIG --out FILE
        [--workloads W...]
    python benchmarks/under_load/drive.py --machine --out FILE

ENGINE: sametoken or vllm. CONFIG: one of ``configs.py``; weights are random, and drafts of heads
and modules are accepted at 0.80, 0.64, 0.51, 0.41, 0.33, so only times mean something.
MODELS, or --models, is the folder that ``shapes.py`` writes: the models of ``configs.py``, each
with its config.json.

W: `burst:N`, N requests at once; `mixed:N`, of different lengths; `mixed:NxTOKENS`, where every
fourth prompt has TOKENS; `long:NxTOKENS`; `asked`, a batch in which none, a quarter or all of the
requests use sampling, penalties, masks, log-probabilities or a grammar;
`ngram-never[:TEMPERATURE]` and `ngram-repeat`, prompts without repeats and prompts of repeats only.
A short uncounted load of the same kind runs before each load, then the garbage is collected and
frozen. FILE is a JSON object, rewritten after every load.
--machine measures the rates of the floors. `run.sh` runs the whole comparison; `report.py` prints
it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs import CONFIGS, EngineArgs
from engines import ENGINES, Engine
from workloads import STEPS, WORKLOADS, Load, Request, Sizes, loads_of, requests_of, warm_up_of

BEGAN = time.perf_counter()


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGAN:7.1f} s  {text}", flush=True)


def measure(engine: Engine, requests: list[Request]) -> dict[str, Any]:
    """Run requests that arrive at once; times are seconds since before the first is queued."""
    left = {one.request_id: one.output_len for one in requests}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    steps: list[float] = []
    windows = 0
    drafts = engine.drafts()
    began = time.perf_counter()
    for one in requests:
        engine.add(one)
    while left:
        arrivals = [one for one in engine.step() if one.request_id in left]
        now = time.perf_counter() - began
        for request_id, num_tokens in arrivals:
            windows += request_id in first
            first.setdefault(request_id, now)
            left[request_id] -= num_tokens
            if left[request_id] <= 0:
                del left[request_id]
                last[request_id] = now
                engine.end(request_id)
        if arrivals:
            steps.append(now)
    offered, accepted = (
        after - before for after, before in zip(engine.drafts(), drafts, strict=True)
    )
    engine.rest()
    # Gaps between steps while all decode, as the first request's end is its last such step.
    steady = [at for at in steps if max(first.values()) < at <= min(last.values())]
    gaps = [1e3 * (after - before) for before, after in itertools.pairwise(steady)]
    wall, tokens = max(last.values()), sum(one.output_len for one in requests)
    return {
        "lengths": [(len(one.prompt), one.output_len) for one in requests],
        "tokens": tokens,
        "wall_s": wall,
        "tokens_per_second": tokens / wall,
        "step_ms": statistics.median(gaps) if gaps else None,
        "steady_steps": len(gaps),
        "steps": len(steps),
        "ttft_mean_ms": 1e3 * statistics.fmean(first.values()),
        "ttft_median_ms": 1e3 * statistics.median(first.values()),
        "ttft_max_ms": 1e3 * max(first.values()),
        "windows": windows,
        "tokens_per_window": (tokens - len(requests)) / windows if windows else None,
        "drafts": offered,
        "accepted": accepted,
    }


def _without_folder(options: dict[str, Any], models: Path) -> dict[str, Any]:
    """Engine options with models by name: the folder is one machine's."""
    loaded: dict[str, Any] = json.loads(json.dumps(options).replace(f"{models}/", ""))
    return loaded


class Recorder:
    """One engine, its loads, and the file of their results."""

    def __init__(
        self, engine_args: EngineArgs, arguments: argparse.Namespace, sizes: Sizes
    ) -> None:
        self._engine_args, self._sizes, self._out = engine_args, sizes, arguments.out
        self._vocab_size = engine_args.vocab_size
        self.record: dict[str, Any] = {
            "engine": arguments.engine,
            "config": arguments.config,
            "model": engine_args.model.name,
            "options": _without_folder(
                engine_args.options(arguments.engine) | engine_args.more, arguments.models
            ),
            "results": [],
            "skipped": [],
            "failed": [],
        }
        # Write the file before loading, so that it exists even if loading fails.
        self._write()
        self._engine: Engine = ENGINES[arguments.engine](engine_args)
        self.record |= {"start_s": time.perf_counter() - BEGAN, "facts": self._engine.facts()}
        self._write()

    def run(self, load: Load, repeats: int) -> bool:
        """Run a load ``repeats`` times; return False if the engine is dead."""
        if load.option == "grammar" and not self._engine_args.has_tokenizer:
            why = f"{self._engine_args.model.name} has no tokenizer, and a grammar needs one"
            self.record["skipped"].append({"load": load.name, "why": why})
            say(f"{load.name}: skipped, {why}")
            return True
        requests: list[Request] = []
        try:
            with self._weights_for(load) as note:
                requests = warm_up_of(load, self._requests(load, -1))
                measure(self._engine, requests)
                gc.collect()
                gc.freeze()
                for repeat in range(repeats):
                    requests = self._requests(load, repeat)
                    self._keep(load, repeat, note, measure(self._engine, requests))
        except Exception as error:
            # The failure of one load does not stop the others unless the engine is dead.
            self.record["failed"].append({"load": load.name, "why": repr(error)[:600]})
            say(f"{load.name}: FAILED, {repr(error)[:300]}")
            return self._recovers(requests)
        finally:
            self._write()
        return True

    def _requests(self, load: Load, repeat: int) -> list[Request]:
        return requests_of(load, self._sizes, self._vocab_size, repeat)

    def _weights_for(self, load: Load) -> contextlib.AbstractContextManager[str]:
        return self._engine.without_repeats() if load.never_repeats else contextlib.nullcontext("")

    def _keep(self, load: Load, repeat: int, note: str, found: dict[str, Any]) -> None:
        of_load = {"workload": load.workload, "load": load.name, "repeat": repeat, "note": note}
        option = {"asked": load.option, "num_asking": load.num_with_option, "count": load.count}
        self.record["results"].append(of_load | option | found)
        step = found["step_ms"]
        drafted = f", {found['accepted']} of {found['drafts']} drafts" if found["drafts"] else ""
        say(
            f"{load.name}: {found['tokens_per_second']:.0f} tokens/s in {found['wall_s']:.2f} s, "
            f"step {'-' if step is None else f'{step:.2f} ms'}, first token "
            f"{found['ttft_mean_ms']:.0f} ms, at most {found['ttft_max_ms']:.0f}{drafted}"
        )

    def _recovers(self, requests: list[Request]) -> bool:
        try:
            for one in requests:
                self._engine.abort(one.request_id)
            self._engine.rest()
        except Exception as error:
            say(f"the engine is dead: {error!r}")
            return False
        return True

    def _write(self) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self.record) + "\n", encoding="utf-8")


@contextlib.contextmanager
def turn(arguments: argparse.Namespace) -> Iterator[None]:
    """Wait until all parallel processes are ready or have failed, then take the lock.

    They are told apart by the names of their results.
    """
    gate = arguments.gate
    if gate is None:
        yield
        return
    (gate / f"ready.{arguments.out.stem}").touch()
    until = time.monotonic() + arguments.patience
    while len(list(gate.glob("ready.*"))) < arguments.parties and time.monotonic() < until:
        time.sleep(0.1)
    with (gate / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    arguments = parse()
    if arguments.machine:
        measure_machine(arguments)
        return 0
    engine_args = EngineArgs(
        arguments.config,
        arguments.models,
        arguments.device,
        arguments.max_num_seqs,
        arguments.max_model_len,
        arguments.kv_gib,
        json.loads(arguments.set),
    )
    sizes = Sizes(
        arguments.input_len,
        arguments.output_len,
        tuple(arguments.mixed_input),
        tuple(arguments.mixed_output),
        arguments.long_output,
        arguments.crowd,
    )
    workloads = arguments.workloads or WORKLOADS.get(arguments.config, STEPS)
    loads = [load for workload in workloads for load in loads_of(workload, sizes)]
    recorder = Recorder(engine_args, arguments, sizes)
    say(f"{arguments.engine} {arguments.config} is up: {json.dumps(recorder.record['facts'])}")
    with turn(arguments):
        say("measuring")
        going = all(recorder.run(load, arguments.repeat) for load in loads)
    say("done")
    return 0 if going and not recorder.record["failed"] else 1


def measure_machine(arguments: argparse.Namespace) -> None:
    import torch
    from machine import machine_figures

    cuda = torch.cuda.is_available() and arguments.device != "cpu"
    names = dict.fromkeys(config.model for config in CONFIGS.values())
    models = [path for name in names if (path := arguments.models / name).is_dir()]
    device = torch.device("cuda" if cuda else "cpu")
    figures = machine_figures(models, arguments.machine_rows, device)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": figures}) + "\n", encoding="utf-8")
    say(json.dumps(figures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, sizes = parser.add_argument, Sizes()
    add("--engine", choices=ENGINES, default="sametoken")
    add("--config", choices=CONFIGS, default="plain")
    add("--machine", action="store_true", help="measure only the machine")
    add("--machine-rows", type=int, default=4096)
    add("--out", type=Path, required=True)
    add("--workloads", nargs="*", help="default: those of the configuration")
    add("--models", type=Path, default=Path(os.environ.get("MODELS", "models")))
    add("--repeat", type=int, default=1, help="number of runs of every load; all are recorded")
    add("--device", default="auto", help="device of sametoken and of --machine")
    add("--max-num-seqs", type=int, default=256)
    add("--max-model-len", type=int, default=0, help="default: the configuration's")
    add("--kv-gib", type=float, default=0, help="default: the configuration's")
    add("--set", default="{}", help="further engine options, JSON")
    add("--input-len", type=int, default=sizes.input_len)
    add("--output-len", type=int, default=sizes.output_len)
    add("--mixed-input", type=int, nargs=2, default=sizes.mixed_input)
    add("--mixed-output", type=int, nargs=2, default=sizes.mixed_output)
    add("--long-output", type=int, default=sizes.long_output)
    add("--crowd", type=int, default=sizes.crowd, help="number of requests of asked and of ngram-*")
    add("--gate", type=Path, help="directory through which parallel processes wait for each other")
    add("--parties", type=int, default=1, help="number of parallel processes")
    add("--patience", type=float, default=240, help="seconds to wait for them")
    return parser.parse_args()


if __name__ == "__main__":
    status = main()
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        # vLLM's in-process engine may never exit.
        os._exit(status)
    raise SystemExit(status)
