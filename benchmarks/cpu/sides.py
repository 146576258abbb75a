"""One side of ``whole_requests.py``: a process that loads a model and answers requests on stdin.

Input and output are JSON lines. The first input line is the ``Side``, then one line per request.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

#: One event per step that emitted tokens: seconds since the request, and the tokens.
Events = list[tuple[float, list[int]]]
LOOKUP = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
BANDWIDTH_BYTES = 1 << 30
BANDWIDTH_PASSES = 12
PROFILED = 5
OTHER_KERNELS = (
    "rms_norm",
    "add_rms_norm",
    "rope_and_cache",
    "attention",
    "sample",
)


@dataclass(frozen=True, slots=True)
class Side:
    """One side to run.

    Attributes:
        engine: "sametoken", "transformers", or "machine", which measures the hardware.
        num_drafts: maximum drafts per step; 0 is plain decoding.
        spin: GOMP_SPINCOUNT of the process; None is libgomp's default.
        load_format: ours.
    """

    engine: str
    model: str
    dtype: str
    threads: int
    num_drafts: int = 0
    spin: str | None = None
    load_format: str = "auto"

    @property
    def speculative(self) -> dict[str, Any] | None:
        """Our speculative config."""
        return LOOKUP | {"num_speculative_tokens": self.num_drafts} if self.num_drafts else None

    @property
    def name(self) -> str:
        method = "plain"
        if self.num_drafts:
            method = "n-gram" if self.engine == "sametoken" else "prompt lookup"
            method += f" {self.num_drafts}"
        return f"{self.engine} {self.dtype} {method}"


def rss(field: str) -> int:
    """Read VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def others_seconds() -> float:
    """Read the CPU seconds that all other processes have used since boot."""
    busy = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = busy[3] + busy[4]
    own = time.process_time()
    return (sum(busy) - idle) / os.sysconf("SC_CLK_TCK") - own


class SametokenModel:
    """Our engine, with token ids in and out.

    Args:
        side: the side to run.
        ignore_eos: ignore the end-of-text token.
    """

    def __init__(self, side: Side, *, ignore_eos: bool = True) -> None:
        from sametoken.llm import LLM
        from sametoken.types.sampling_params import SamplingParams

        # With the prefix cache, a repeat would skip its prefill.
        options = {
            "speculative_config": side.speculative,
            "dtype": side.dtype,
            "load_format": side.load_format,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
        }
        self._llm = LLM(side.model, announce=lambda text: None, **options)
        self._params = partial(SamplingParams, temperature=0.0, ignore_eos=ignore_eos)
        self._speculation: dict[str, Any] = {}
        self.weights_bytes = self._llm.resolved.weights_bytes

    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[list[int]]:
        params = self._params(max_tokens=max_tokens)
        num_seen = 0
        for output in self._llm.generate_stream({"prompt_token_ids": prompt}, params):
            token_ids = output.outputs[0].token_ids
            yield list(token_ids[num_seen:])
            num_seen = len(token_ids)
        metrics = output.metrics.speculation
        per_position = metrics.acceptance_per_position
        self._speculation = asdict(metrics) | {"acceptance_per_position": per_position}
        if output.outputs[0].error is not None:
            raise output.outputs[0].error

    def run(self, prompt: list[int], max_tokens: int) -> tuple[Events, dict[str, Any]]:
        start = time.perf_counter()
        events = [
            (time.perf_counter() - start, token_ids)
            for token_ids in self.stream(prompt, max_tokens)
        ]
        return events, self._speculation


class TransformersModel:
    """LlamaForCausalLM with the same GGUF file's weights, through ``generate``."""

    def __init__(self, side: Side) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        path, dtype = Path(side.model), getattr(torch, side.dtype)
        config = AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        )
        # As from_pretrained(gguf_file=...), without its requirement of the accelerate package.
        self._model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        parsed = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=self._model)
        self._model.load_state_dict(parsed["tensors"], strict=False)
        self._model.tie_weights()
        self._torch, self._configure = torch, GenerationConfig
        self._num_drafts = side.num_drafts or None
        # generate replaces None by values of the model's configs.
        self._model.config.eos_token_id = None
        self._model.generation_config = GenerationConfig()
        self.weights_bytes = sum(p.numel() * p.itemsize for p in self._model.parameters())

    def run(self, prompt: list[int], max_tokens: int) -> tuple[Events, dict[str, Any]]:
        config = self._configure(
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            prompt_lookup_num_tokens=self._num_drafts,
        )
        start = time.perf_counter()
        recorder = _Recorder(start)
        token_ids = self._torch.tensor([prompt])
        with self._torch.inference_mode():
            self._model.generate(
                token_ids,
                attention_mask=self._torch.ones_like(token_ids),
                generation_config=config,
                streamer=recorder,
            )
        return recorder.events[1:], {}


class _Recorder:
    """A streamer for ``generate``; its first event is the prompt."""

    def __init__(self, start: float) -> None:
        self.events: Events = []
        self._start = start

    def put(self, value: Any) -> None:
        self.events.append((time.perf_counter() - self._start, value.flatten().tolist()))

    def end(self) -> None:
        pass


def read_bandwidth() -> dict[str, float]:
    """Measure GB/s at which all threads read 1 GiB in large pages: best pass by method."""
    import torch

    from sametoken.ops.native.backend import PanelWeight
    from sametoken.ops.native.library import WeightMemory, load_library

    library = load_library()
    memory = WeightMemory(library.prefer_large_pages, BANDWIDTH_BYTES).take(BANDWIDTH_BYTES)
    memory.fill_(1)
    features = 512
    columns = BANDWIDTH_BYTES // (2 * features)
    panels = PanelWeight(library, memory, memory.data_ptr(), columns, features, torch.bfloat16)
    x = torch.ones(1, features, dtype=torch.bfloat16)
    halves, floats = memory.view(torch.int64).view(2, -1), memory.view(torch.float32)
    methods: dict[str, Callable[[], object]] = {
        "torch.sum of int64": lambda: halves.sum(1),
        "torch.sum of float32": floats.sum,
        "native product, 1 row": lambda: panels.matmul(x),
    }
    fastest = dict.fromkeys(methods, float("inf"))
    for _ in range(BANDWIDTH_PASSES):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            fastest[name] = min(fastest[name], time.perf_counter() - start)
    return {name: BANDWIDTH_BYTES / seconds / 1e9 for name, seconds in fastest.items()}


class Profile:
    """Profile of the engine by patching its classes.

    Times of a plain step nest: engine step, runner step, kernels.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, int] = defaultdict(int)

    def patch(self) -> None:
        from sametoken.engine.core import EngineCore
        from sametoken.ops.native import backend as backend
        from sametoken.runner.runner import StepRunner

        self._wrap(EngineCore, "step", lambda args: ("engine step", 0))
        self._wrap(StepRunner, "submit", lambda args: ("runner step", 0))
        self._wrap(backend.PanelWeight, "matmul", _product_label)
        self._wrap(backend.PanelWeight, "rows", lambda args: ("embedding", 0))
        self._wrap(backend, "silu_mul", lambda args: ("silu_mul", 0))
        for op in OTHER_KERNELS:
            self._wrap(backend.NativeKernels, op, lambda args, op=op: (op, 0))

    def _wrap(self, owner: Any, name: str, label: Callable[[Any], tuple[str, int]]) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds = time.perf_counter() - start
            what, moved = label(args)
            self.seconds[what] += seconds
            self.bytes[what] += moved
            return result

        setattr(owner, name, timed)


def _product_label(args: Any) -> tuple[str, int]:
    weight = args[0]
    return f"product {weight.out_features} x {weight.in_features}", weight.nbytes


def tokenizer_bytes(side: Side) -> int:
    """Measure the memory of the tokenizer, which the sides do not load."""
    from sametoken.text.tokenizer import load_tokenizer

    before = rss("VmRSS")
    tokenizer = load_tokenizer(Path(side.model))
    tokenizer.encode("warm")
    return rss("VmRSS") - before


def kv_bytes_per_token(side: Side) -> int:
    """Compute the KV bytes of one token over all layers, in the side's dtype."""
    import torch

    from sametoken.models.loader import read_config

    config = read_config(Path(side.model))
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return elements * getattr(torch, side.dtype).itemsize


def profile(side: Side, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Profile a plain decoding step: means over the fastest of several requests."""
    model, record = SametokenModel(side), Profile()
    model.run(prompt, 8)
    record.patch()
    requests = [profile_request(model, record, prompt, max_tokens) for _ in range(PROFILED)]
    return min(requests, key=lambda parts: parts["ms_per_step"])


def profile_request(
    model: SametokenModel, record: Profile, prompt: list[int], max_tokens: int
) -> dict[str, Any]:
    stream = model.stream(prompt, max_tokens)
    next(stream)
    record.seconds.clear()
    record.bytes.clear()
    start = time.perf_counter()
    num_steps = sum(1 for _ in stream)
    whole = time.perf_counter() - start
    engine, runner = record.seconds.pop("engine step"), record.seconds.pop("runner step")
    parts = dict(record.seconds) | {
        "inputs, verify, commit, propose in PyTorch; Python": runner - sum(record.seconds.values()),
        "scheduler": engine - runner,
        "outputs": whole - engine,
    }
    return {
        "num_steps": num_steps,
        "ms_per_step": whole / num_steps * 1e3,
        "parts": {
            name: {
                "ms": seconds / num_steps * 1e3,
                "GB/s": record.bytes[name] / seconds / 1e9 if record.bytes.get(name) else None,
            }
            for name, seconds in parts.items()
        },
    }


def _print_json(value: Any) -> None:
    print(json.dumps(value), flush=True)


def measure(side: Side) -> None:
    """Answer requests until stdin ends."""
    imported = rss("VmRSS")
    model = SametokenModel(side) if side.engine == "sametoken" else TransformersModel(side)
    loaded_peak = rss("VmHWM")
    _print_json({"weights_bytes": model.weights_bytes})
    for line in sys.stdin:
        request = json.loads(line)
        others, begun = others_seconds(), time.perf_counter()
        events, speculation = model.run(request["prompt"], request["max_tokens"])
        wall = time.perf_counter() - begun
        _print_json(
            {
                "events": events,
                "speculation": speculation,
                "others_cores": (others_seconds() - others) / wall,
                "rss_imported": imported,
                "peak_loading": loaded_peak - imported,
                "peak": rss("VmHWM") - imported,
                "rss": rss("VmRSS") - imported,
            }
        )


def measure_machine(side: Side) -> None:
    """Answer requests on stdin for the machine's rates and sizes."""
    answers: dict[str, Callable[..., dict[str, Any]]] = {
        "bandwidth": read_bandwidth,
        "tokenizer": lambda: {"bytes": tokenizer_bytes(side)},
        "kv": lambda: {"bytes_per_token": kv_bytes_per_token(side)},
        "profile": lambda **request: profile(side, **request),
    }
    for line in sys.stdin:
        request = json.loads(line)
        _print_json(answers[request.pop("what")](**request))


def main() -> None:
    side = Side(**json.loads(sys.stdin.readline()))
    if side.engine != "transformers":
        # Before torch, because the package sets OpenMP's spin count.
        import sametoken.llm  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: F401
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(side.threads)
    if side.engine == "machine":
        measure_machine(side)
    else:
        measure(side)


if __name__ == "__main__":
    main()
