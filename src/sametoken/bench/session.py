"""A benchmark session: one loaded engine and the device's memory bandwidth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sametoken.bench.datasets import require_dataset, require_named
from sametoken.bench.measure import measure
from sametoken.bench.prompts import dataset_prompts
from sametoken.bench.report import Summary, summarise
from sametoken.bench.roofline import Bandwidth, Traffic, read_bandwidth, step_traffic
from sametoken.bench.workload import RequestSource, Workload, read_prompts
from sametoken.config import EngineConfig
from sametoken.engine.build import build_requested
from sametoken.engine.core import EngineCore
from sametoken.engine.load import Requested, validate
from sametoken.engine.resolve import ResolvedConfig
from sametoken.errors import CheckpointError, ConfigError
from sametoken.text.tokenizer import Tokenizer, load_tokenizer_of

_WARMUP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Session:
    """One engine, measured at each concurrency in turn.

    Attributes:
        workload: the requests, with the prompts of a file.
        bandwidth: memory bandwidth, measured before the engine allocated memory.
        traffic: bytes that a decode step must move.
    """

    workload: Workload
    bandwidth: Bandwidth
    traffic: Traffic
    _engine: EngineCore
    _source: RequestSource

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        workload: Workload,
        *,
        prompts: Path | None = None,
        dataset: tuple[str, Path | None] | None = None,
        announce: Callable[[str], None] = lambda text: None,
    ) -> Session:
        """Check the workload, measure the memory bandwidth, then load the engine.

        Args:
            config: the engine's options.
            workload: the requests.
            prompts: a file for ``read_prompts``, replacing random prompts.
            dataset: name and file for ``load_dataset``, replacing random prompts.
            announce: called with a line about slow phases and about limits on the numbers.

        Raises:
            ConfigError: the workload does not fit the engine, or as ``build_engine``.
            CheckpointError, UnsupportedError, DrafterMismatchError: as ``build_engine``.
        """
        if dataset is not None:
            require_named(*dataset)
            require_dataset(*dataset)
        requested = validate(config, announce)
        workload.require_slots(requested.config.max_num_seqs)
        if prompts is not None:
            workload = replace(workload, prompts=_read(prompts, requested))
        if dataset is not None:
            tokenizer = tokenizer_or_none(requested.config, requested.path)
            workload = replace(workload, prompts=dataset_prompts(*dataset, tokenizer))
        _require_length(workload, requested.max_model_len)
        announce("measuring memory bandwidth")
        bandwidth = read_bandwidth(requested.device)
        announce(f"loading {config.model}")
        engine = build_requested(requested, announce)
        _require_fit(workload, engine.resolved, announce)
        return cls(
            workload=workload,
            bandwidth=bandwidth,
            traffic=step_traffic(engine.resolved),
            _engine=engine,
            _source=RequestSource(workload, engine.resolved.model.vocab_size),
        )

    def with_workload(self, workload: Workload) -> Session:
        """Return a session of the same engine and prompts with another workload.

        Raises:
            ConfigError: the workload does not fit the engine.
        """
        workload = replace(workload, prompts=self.workload.prompts)
        workload.require_slots(self.resolved.config.max_num_seqs)
        _require_fit(workload, self.resolved, lambda text: None)
        source = RequestSource(workload, self.resolved.model.vocab_size)
        return replace(self, workload=workload, _source=source)

    @property
    def resolved(self) -> ResolvedConfig:
        """The engine's resolved settings."""
        return self._engine.resolved

    def run(
        self,
        concurrency: int,
        sizes: Sequence[int],
        *,
        warmup: int = 1,
        num_traced: int = 0,
        advance: Callable[[], None] = lambda: None,
    ) -> Summary:
        """Measure at one concurrency.

        Args:
            concurrency: maximum number of running requests.
            sizes: number of requests of each run.
            warmup: batches with short outputs that run first and are not counted.
            num_traced: requests of the last run whose tokens and windows are recorded.
            advance: called for each finished measured request.

        Raises:
            NumericalError, EngineDeadError: as ``measure``.
        """
        short = min(_WARMUP_TOKENS, self.workload.output_len)
        for _ in range(warmup):
            measure(self._engine, self._source.take(concurrency, short), concurrency)
        runs = [
            measure(
                self._engine,
                self._source.take(size),
                concurrency,
                num_traced=num_traced,
                advance=advance,
            )
            for size in sizes
        ]
        summary = summarise(concurrency, runs, self.traffic, self.bandwidth)
        traces = [record.trace for record in runs[-1].requests if record.trace is not None]
        resolved = self.resolved
        tokenizer = tokenizer_or_none(resolved.config, resolved.model_path) if traces else None
        return replace(summary, traces=tuple(trace.as_json(tokenizer) for trace in traces))


def tokenizer_or_none(config: EngineConfig, path: Path) -> Tokenizer | None:
    """Load the model's tokenizer; None if it has none (token ids are shown instead)."""
    try:
        return load_tokenizer_of(config, path)
    except CheckpointError:
        return None


def _read(path: Path, requested: Requested) -> tuple[tuple[int, ...], ...]:
    tokenizer = functools.cache(lambda: load_tokenizer_of(requested.config, requested.path))

    def encode(text: str) -> tuple[int, ...]:
        loaded = tokenizer()
        if loaded is None:
            raise ConfigError(f"{path} holds text, and there is no tokenizer", "give token ids")
        return loaded.encode(text)

    return read_prompts(path, encode, requested.architecture.vocab_size)


def _require_length(workload: Workload, max_model_len: int) -> None:
    if workload.longest > max_model_len:
        raise ConfigError(
            f"requests of {workload.longest} tokens are longer than max_model_len={max_model_len}",
            "shorten input or output, or raise max_model_len",
        )


def _require_fit(
    workload: Workload, resolved: ResolvedConfig, announce: Callable[[str], None]
) -> None:
    # Memory may have lowered it.
    _require_length(workload, resolved.max_model_len)
    room = resolved.num_kv_blocks * resolved.config.block_size
    needed = max(workload.concurrency) * workload.longest
    if needed > room:
        announce(
            f"KV memory holds {room} of {needed} tokens: not all requests will run at once; "
            "raise kv_cache_memory_bytes"
        )
