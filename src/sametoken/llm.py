"""The offline API: ``LLM`` runs the engine in the caller's thread."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from sametoken.config import DEFAULT_MODEL, EngineConfig
from sametoken.engine.build import build_requested
from sametoken.engine.core import EngineCore
from sametoken.engine.exclusive import NotCopied
from sametoken.engine.offline_adapters import OfflineAdapters
from sametoken.engine.offline_requests import OfflineRequests
from sametoken.engine.resolve import ResolvedConfig
from sametoken.engine.sampling_defaults import default_sampling_params
from sametoken.engine.unloaded import UnloadedModel, inputs_of
from sametoken.engine.upkeep import used_or_dropped
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
        self._requests = OfflineRequests(engine, tokenizer)
        self._named = AdapterNames(given.lora_modules)
        # From loading to writing: one set of new weights is held at most.
        self._updating = threading.Lock()
        self.inputs = inputs_of(tokenizer, resolved.model, resolved.config, resolved.max_model_len)
        self._request_ids = map(str, itertools.count())

    def __enter__(self) -> Self:
        """Enter a block at whose end the engine is let go."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let the engine and its memory go; later calls raise ``EngineDeadError``."""
        self._requests.let_go()

    @property
    def _engine(self) -> EngineCore:
        return self._requests.engine

    @property
    def resolved(self) -> ResolvedConfig:
        """Every setting of the engine, with its reason."""
        return self._engine.resolved

    @property
    def speculation_metrics(self) -> SpeculationMetrics:
        """Speculation counters summed over all finished requests."""
        return self._requests.speculation

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
        return self._requests.run(requests, on_finished, use_tqdm=use_tqdm)

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
        return self._requests.stream(request.prepared())

    @property
    def adapters(self) -> OfflineAdapters:
        """The LoRA adapters that requests may choose."""
        return OfflineAdapters(self._engine, self._named, self._updating, self._requests.resting)

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
            weights: every tensor of the checkpoint by its Hugging Face name, on any device, read
                once the iterable has ended; or a directory with them, of which the config is not
                read.
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
            with used_or_dropped(new), self._requests.resting():
                return self._engine.upkeep.use_weights(new, version)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; updates of weights need no reset (errors as in ``sleep``)."""
        with self._requests.resting():
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
        with self._requests.resting():
            self._engine.upkeep.require_sleep(level)
            if self._requests.num_unfinished:
                raise RequestError("requests are unfinished", "let them end first")
            self._engine.upkeep.sleep(level)

    def wake_up(self, tags: str | Sequence[str] | None = None) -> None:
        """End a sleep, or that of "weights" or "kv_cache" alone; with both awake, requests run.

        Raises:
            RequestError: no such part, no room for it, or dropped weights have not come back.
        """
        with self._requests.resting():
            self._engine.upkeep.wake_up(parts_of(tags))

    def abort(self, request_id: str) -> None:
        """Abort a request, with ``finish_reason`` ``"abort"``. Unknown ids are ignored.

        Any thread, signal handler or finalizer may call this; it never blocks. If another
        thread runs a step, the request ends after it. An id that is no text raises RequestError.
        """
        require_request_id(request_id)
        self._requests.abort(request_id)
