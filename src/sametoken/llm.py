"""The offline API: ``LLM`` runs the engine in the caller's thread."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from torch import Tensor

from sametoken.config import DEFAULT_MODEL, EngineConfig
from sametoken.engine.build import build_requested
from sametoken.engine.core import EngineCore
from sametoken.engine.exclusive import Exclusive, NoEngine, NotCopied
from sametoken.engine.input_processor import ProcessedRequest
from sametoken.engine.interrupts import DeferredInterrupts
from sametoken.engine.offline_adapters import OfflineAdapters
from sametoken.engine.output_processor import OutputProcessor, ProcessedUpdates
from sametoken.engine.progress import shown_progress
from sametoken.engine.resolve import ResolvedConfig
from sametoken.engine.sampling_defaults import default_sampling_params
from sametoken.engine.unloaded import UnloadedModel, inputs_of
from sametoken.engine.user_inputs import (
    OnFinished,
    Prompt,
    PromptTokens,
    conversations_of,
    params_of,
    parts_of,
    prompts_of,
    require_request_id,
)
from sametoken.errors import RequestError
from sametoken.io.garbage import objects_exempt
from sametoken.models.load.sent import source_of
from sametoken.models.names import at_revision
from sametoken.text.tokenizer import Messages, Tokenizer, require_own_end
from sametoken.types.lora_modules import AdapterChoice, AdapterNames
from sametoken.types.outputs import RequestOutput, SpeculationMetrics
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.vllm_arguments import takes_vllm_arguments
from sametoken.types.vllm_options import take_vllm_options

_logger = logging.getLogger("sametoken")


class LLM(NotCopied):
    """A loaded model for offline inference.

    Threads may share it: their requests run in the same steps, and each thread gets its own
    outputs. Ctrl-C, or another signal whose handler raises, aborts the interrupted call's requests
    after the current step (seconds for long prompts on a CPU); the ``LLM`` serves the next call. A
    second Ctrl-C interrupts the step, and then every later call raises ``EngineDeadError``, as does
    one in a fork. ``del llm`` gives all memory back, as does the end of ``with LLM(...) as llm:``.

    Args:
        model: checkpoint directory, GGUF file, short name or Hugging Face hub id.
        revision: branch, tag or commit of a hub id, as in ``"org/name@revision"``.
        announce: called with a line of text on each slow phase; logs it by default.
        options: the fields of ``EngineConfig``, and vLLM's options that have no effect here.

    Attributes:
        inputs: tokenizes prompts and checks requests.

    Raises:
        ConfigError: an option is unknown or impossible, or this is a fork of a process with an LLM.
        CheckpointError: the checkpoint or its tokenizer cannot be read.
        UnsupportedError: the model or an option is not implemented.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        revision: str | None = None,
        announce: Callable[[str], None] = _logger.info,
        **options: Any,
    ) -> None:
        notice = take_vllm_options(options, kept=EngineConfig.__slots__, offline=True)
        if notice is not None:
            _logger.warning(notice)
        config = EngineConfig.from_options(model=at_revision(model, revision), **options)
        self._load(UnloadedModel.of(config, announce), announce)

    @classmethod
    def from_unloaded(
        cls, unloaded: UnloadedModel, announce: Callable[[str], None] = _logger.info
    ) -> LLM:
        """Load a model whose options and tokenizer are checked already; errors as above."""
        llm = cls.__new__(cls)
        llm._load(unloaded, announce)
        return llm

    @classmethod
    def from_engine(cls, engine: EngineCore, tokenizer: Tokenizer | None) -> LLM:
        """Wrap an engine that is already built."""
        require_own_end(tokenizer, engine.resolved.model.vocab_size)
        llm = cls.__new__(cls)
        llm._start(engine, tokenizer, engine.resolved.config)
        return llm

    def _load(self, unloaded: UnloadedModel, announce: Callable[[str], None]) -> None:
        for what in unloaded.requested.config.synthetic:
            announce(f"{what}: only times mean anything")
        engine = build_requested(unloaded.requested, announce)
        self._start(engine, unloaded.inputs.tokenizer, unloaded.requested.given)

    def _start(self, engine: EngineCore, tokenizer: Tokenizer | None, given: EngineConfig) -> None:
        resolved = engine.resolved
        self._engine, self._named = engine, AdapterNames(given.lora_modules)
        self._exclusive = Exclusive()
        # From loading to writing: one set of new weights is held at most.
        self._updating = threading.Lock()
        self.inputs = inputs_of(tokenizer, resolved.model, resolved.config, resolved.max_model_len)
        self._outputs = OutputProcessor(tokenizer)
        self._latest: dict[str, RequestOutput] = {}
        self._request_ids = map(str, itertools.count())
        self._speculation = SpeculationMetrics()

    def __enter__(self) -> Self:
        """Enter a block at whose end the engine is let go."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let the engine and its memory go; later calls raise ``EngineDeadError``."""
        self._engine = cast("EngineCore", NoEngine())

    @property
    def resolved(self) -> ResolvedConfig:
        """Every setting of the engine, with its reason."""
        return self._engine.resolved

    @property
    def speculation_metrics(self) -> SpeculationMetrics:
        """Speculation counters summed over all finished requests."""
        return self._speculation

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer; with ``skip_tokenizer_init`` a ``RequestError``."""
        if self.inputs.tokenizer is None:
            raise RequestError("no tokenizer is loaded", "leave skip_tokenizer_init out")
        return self.inputs.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Defaults from the file that ``generation_config`` names, else those of SamplingParams.

        Raises:
            CheckpointError: the file is not a JSON object.
        """
        resolved = self.resolved
        return default_sampling_params(resolved.model_path, resolved.config.generation_config)

    @takes_vllm_arguments
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        on_finished: OnFinished = lambda index, output: None,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
    ) -> list[RequestOutput]:
        """Complete one prompt, or several in the same batch.

        Args:
            prompts: texts, lists of token ids, ``{"prompt": text}``,
                ``{"prompt_token_ids": [...]}``, or what ``render_chat`` returns.
            sampling_params: one for all, or one per prompt; None takes the model's defaults.
            use_tqdm: show progress on stderr.
            on_finished: called with a prompt's index and output as soon as it is complete, so that
                an interrupt loses none; interrupts wait for its end.
            lora_request: an adapter for all prompts, or one per prompt; None: the model itself.

        Returns:
            One output per prompt, in order. A request that fails while it runs has
            ``finish_reason`` ``"error"``; the others continue.

        Raises:
            RequestError: a prompt or a parameter is invalid; no request was started.
            OverloadedError: the grammars take up the memory; no request was started.
            EngineDeadError: the engine failed, or this is a fork.
            KeyboardInterrupt: Ctrl-C, after the current step.
        """
        tokenized = [self.inputs.tokenize(prompt) for prompt in prompts_of(prompts)]
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = params_of(given, len(tokenized))
        adapters = self.adapters.chosen(lora_request, len(tokenized))
        requests = [
            self.inputs.process(next(self._request_ids), *one).prepared()
            for one in zip(tokenized, params, adapters, strict=True)
        ]
        return self._run(requests, on_finished, use_tqdm=use_tqdm)

    @takes_vllm_arguments
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; otherwise like ``generate``.

        Args:
            messages: ``{"role": ..., "content": ...}`` in order, or a list of such lists.
            sampling_params, use_tqdm, lora_request: as in ``generate``.
            template_options: options of the chat template, including ``chat_template`` and
                ``chat_template_kwargs``; a template ignores those that it does not read.
        """
        prompts = [self.render_chat(one, **template_options) for one in conversations_of(messages)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def render_chat(self, messages: Messages, **template_options: Any) -> PromptTokens:
        """The prompt that ``chat`` completes, with the generation prompt added."""
        return self.inputs.tokenize_chat(messages, **template_options)

    @takes_vllm_arguments
    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: AdapterChoice = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the output so far after every step that extends it.

        Yielded text is final. The request starts with the first ``next``; closing the iterator, or
        an exception from ``next``, aborts it. Raises at the call what ``generate`` does before.
        """
        tokens = self.inputs.tokenize(prompt)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        (adapter,) = self.adapters.chosen(lora_request, 1)
        request = self.inputs.process(next(self._request_ids), tokens, params, adapter)
        return self._stream(request.prepared())

    @property
    def adapters(self) -> OfflineAdapters:
        """The LoRA adapters that requests may choose."""
        return OfflineAdapters(self._engine, self._named, self._updating, self._resting)

    @property
    def weight_version(self) -> int:
        """The version of the target's weights: 0 as loaded, larger after every update."""
        return self._engine.scheduler.weight_version

    def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | str | Path,
        version: int | None = None,
        *,
        target: str = "model",
    ) -> int:
        """Replace all weights in place, between two steps (docs/rollouts.md).

        If a tensor does not fit, the old weights stay, to the bit. Requests of other threads go on;
        later ones read no KV of older weights.

        Args:
            weights: every tensor of the checkpoint by its Hugging Face name, on any device, or a
                directory with them, of which the config is not read.
            version: of the new weights, above ``weight_version``; default the next.
            target: "model", with its own module (MTP, NextN) if that is sent, or "drafter".

        Returns:
            ``weight_version`` from now on; a drafter's weights do not change it.

        Raises:
            WeightUpdateError: a tensor or the version does not fit, or memory does not suffice.
            CheckpointError, UnsupportedError: the directory, or these weights, cannot be taken.
            EngineDeadError: the engine failed.
        """
        source = source_of(weights)
        with self._updating:
            new = self._engine.weights.load(source, target)
            with new.used_or_dropped(), self._resting():
                return self._engine.upkeep.use_weights(new, version)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; updates of weights need no reset (errors as in ``sleep``)."""
        with self._resting():
            self._engine.upkeep.forget_prefixes()

    @property
    def is_sleeping(self) -> bool:
        """Whether ``sleep`` has been called, and ``wake_up`` has not ended it."""
        return self._engine.upkeep.is_sleeping

    def sleep(self, level: int = 1) -> None:
        """Give memory back while no request runs; none may come before ``wake_up``.

        Level 1 gives back KV and the prefix cache, 2 also weights, which need an update then.

        Raises:
            RequestError: there is no such level, or requests are unfinished.
            UnsupportedError: memory of this engine cannot be given back.
            EngineDeadError: the engine failed.
        """
        with self._resting():
            self._engine.upkeep.require_sleep(level)
            if self._outputs.num_unfinished:
                raise RequestError("requests are unfinished", "let them end first")
            self._engine.upkeep.sleep(level)

    def wake_up(self, tags: str | Sequence[str] | None = None) -> None:
        """End a sleep, or that of "weights" or "kv_cache" alone; with both awake, requests run.

        Raises:
            RequestError: no such part, no room for it, or dropped weights have not come back.
        """
        with self._resting():
            self._engine.upkeep.wake_up(parts_of(tags))

    def abort(self, request_id: str) -> None:
        """Abort a request, with ``finish_reason`` ``"abort"``. Unknown ids are ignored.

        Any thread, signal handler or finalizer may call this; it never blocks. If another
        thread runs a step, the request ends after it. An id that is no text raises RequestError.
        """
        require_request_id(request_id)
        self._later(partial(self._end, request_id))

    def _run(
        self, requests: Sequence[ProcessedRequest], on_finished: OnFinished, *, use_tqdm: bool
    ) -> list[RequestOutput]:
        places = {request.request_id: place for place, request in enumerate(requests)}
        waiting, outputs = set(places), dict[str, RequestOutput]()
        with self._interrupts() as interrupts, objects_exempt():
            try:
                self._submit(requests, interrupts, stream=False)
                with shown_progress(len(places), shown=use_tqdm) as advance:
                    while waiting:
                        ready = self._advance(waiting, interrupts)
                        outputs |= ready
                        waiting -= ready.keys()
                        advance(len(ready))
                        for request_id, output in ready.items():
                            on_finished(places[request_id], output)
                self._drain(interrupts)
            except BaseException:
                self._later(partial(self._forget, list(places)))
                raise
        return [outputs[request_id] for request_id in places]

    def _submit(
        self, requests: Sequence[ProcessedRequest], interrupts: DeferredInterrupts, *, stream: bool
    ) -> None:
        """Queue all requests, or none if the engine refuses one of them."""
        completions = [completion for request in requests for completion in request.completions]
        num_added = 0
        with self._exclusive.held(interrupts.check):
            if self._engine.upkeep.is_sleeping:
                raise RequestError("the engine sleeps", "call wake_up first")
            try:
                for completion in completions:
                    self._engine.add_request(completion)
                    num_added += 1
                for request in requests:
                    self._outputs.add(request, time.monotonic(), stream=stream)
            except Exception:
                for added in completions[:num_added]:
                    self._engine.release(added.request_id)
                raise

    def _stream(self, request: ProcessedRequest) -> Iterator[RequestOutput]:
        request_id, finished = request.request_id, False
        try:
            with self._interrupts() as interrupts:
                self._submit([request], interrupts, stream=True)
            while not finished:
                output = self._next_output(request_id)
                finished = output.finished
                yield output
        finally:
            self._later(partial(self._forget, [request_id]))
        with self._interrupts() as interrupts:
            self._drain(interrupts)

    def _next_output(self, request_id: str) -> RequestOutput:
        with self._interrupts() as interrupts:
            while not (ready := self._advance({request_id}, interrupts)):
                pass
        return ready[request_id]

    def _advance(
        self, waiting: Set[str], interrupts: DeferredInterrupts
    ) -> dict[str, RequestOutput]:
        """New outputs of these requests, by id; runs a step if there are none yet."""
        interrupts.check()
        with self._exclusive.held(interrupts.check):
            if waiting.isdisjoint(self._latest):
                self._step(interrupts)
            return {one: self._latest.pop(one) for one in waiting & self._latest.keys()}

    def _step(self, interrupts: DeferredInterrupts) -> None:
        try:
            updates = interrupts.cuttable(self._engine.step)
            self._collect(self._outputs.process(updates, time.monotonic()))
        except BaseException as error:
            # The tokens of an interrupted step are lost, so no request can continue.
            self._engine.stop(error)
            raise

    def _drain(self, interrupts: DeferredInterrupts) -> None:
        """Process the steps that finished requests left in flight.

        Not called after an interrupt, when the engine may never become idle.
        """
        while True:
            interrupts.check()
            with self._exclusive.held(interrupts.check):
                if self._outputs.num_unfinished or not self._engine.has_unfinished:
                    return
                self._step(interrupts)

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """A block between two steps, whose interrupts wait."""
        with self._interrupts() as interrupts, self._exclusive.held(interrupts.check):
            yield

    def _interrupts(self) -> DeferredInterrupts:
        return DeferredInterrupts(self._engine.stop)

    def _later(self, work: Callable[[], None]) -> None:
        with self._interrupts():
            self._exclusive.later(work)

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._end(request_id)
            self._latest.pop(request_id, None)

    def _end(self, request_id: str) -> None:
        self._collect(self._outputs.abort(request_id, time.monotonic()), aborted=True)

    def _collect(self, processed: ProcessedUpdates, *, aborted: bool = False) -> None:
        for request_id, num_kept_tokens in processed.released.items():
            self._engine.release(request_id, num_kept_tokens, aborted=aborted)
        for output in processed.outputs:
            self._latest[output.request_id] = output
            if output.finished:
                self._speculation += output.metrics.speculation
