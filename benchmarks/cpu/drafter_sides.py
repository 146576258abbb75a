"""One side of ``drafters.py``: our engine with a drafter, or llama.cpp.

The process protocol is that of ``sides.py``: the first input line is the side, then one line per
request. llama.cpp runs in an interpreter with the package llama-cpp-python and without ours.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from sides import SametokenModel, Side, others_seconds, rss

LLAMA = "llama.cpp"
LLAMA_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class DrafterSide(Side):
    """One side to run.

    Attributes:
        label: its name.
        spec: our speculative config; None is plain decoding.
    """

    label: str = ""
    spec: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.label

    @property
    def speculative(self) -> dict[str, Any] | None:
        return self.spec


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; decoding excludes the first step that emitted tokens."""

    token_ids: list[int]
    decode_tokens: int
    decode_seconds: float
    seconds: float
    speculation: dict[str, Any]


class Ours:
    """Our engine, which stops at the end-of-text token as the other side does."""

    def __init__(self, side: DrafterSide) -> None:
        self._model = SametokenModel(side, ignore_eos=False)
        self.facts: dict[str, Any] = {}

    def answer(self, prompt: list[int], max_tokens: int) -> Answer:
        events, speculation = self._model.run(prompt, max_tokens)
        (first_at, first), (last_at, _) = events[0], events[-1]
        token_ids = [token_id for _, given in events for token_id in given]
        decoded = len(token_ids) - len(first)
        return Answer(token_ids, decoded, last_at - first_at, last_at, speculation)


class Llama:
    """llama.cpp on the same file, token by token through its Python bindings."""

    def __init__(self, side: DrafterSide) -> None:
        import llama_cpp

        self._model = llama_cpp.Llama(
            side.model,
            n_ctx=LLAMA_CONTEXT,
            n_threads=side.threads,
            n_threads_batch=side.threads,
            verbose=False,
        )
        self.facts = {
            "llama-cpp-python": version("llama-cpp-python"),
            "system": llama_cpp.llama_print_system_info().decode().strip(" |\n"),
        }

    def answer(self, prompt: list[int], max_tokens: int) -> Answer:
        begun = time.perf_counter()
        token_ids: list[int] = []
        first_at = 0.0
        # Reset, so that no prompt prefix is reused.
        for token_id in self._model.generate(prompt, top_k=1, temp=0.0, reset=True):
            token_ids.append(token_id)
            first_at = first_at or time.perf_counter()
            if len(token_ids) == max_tokens or token_id == self._model.token_eos():
                break
        last_at = time.perf_counter()
        self._model.reset()
        return Answer(token_ids, len(token_ids) - 1, last_at - first_at, last_at - begun, {})


def main() -> None:
    side = DrafterSide(**json.loads(sys.stdin.readline()))
    if side.engine == LLAMA:
        model: Ours | Llama = Llama(side)
    else:
        # Before torch, because the package sets OpenMP's spin count.
        import sametoken.llm  # noqa: F401, I001
        import torch

        torch.set_num_threads(side.threads)
        model = Ours(side)
    print(json.dumps(model.facts), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        others, begun = others_seconds(), time.perf_counter()
        answer = model.answer(request["prompt"], request["max_tokens"])
        cores = (others_seconds() - others) / (time.perf_counter() - begun)
        more = {"others_cores": cores, "peak_rss": rss("VmHWM")}
        print(json.dumps(asdict(answer) | more), flush=True)


if __name__ == "__main__":
    main()
