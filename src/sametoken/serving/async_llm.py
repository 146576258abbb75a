"""The engine for servers: requests come from one event loop and run in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from sametoken.config import EngineConfig
from sametoken.engine.exclusive import NotCopied
from sametoken.engine.input_processor import InputProcessor, ProcessedRequest
from sametoken.engine.sampling_defaults import ServerDefaults, server_defaults
from sametoken.engine.user_inputs import (
    Prompt,
    PromptTokens,
    parts_of,
    require_level,
    require_request_id,
)
from sametoken.errors import ConfigError, RequestError, SametokenError, shown
from sametoken.serving.adapters import ServedAdapters
from sametoken.serving.engine_client import EngineClient
from sametoken.serving.engine_process import EngineProcess, build_engine
from sametoken.serving.limits import ServingLimits
from sametoken.serving.messages import (
    Build,
    ChangeWeights,
    CheckSleep,
    FallAsleep,
    FinishUpdate,
    ForgetPrefixes,
    JoinedTensors,
    JoinTrainer,
    NameWeights,
    Pause,
    Resume,
    SharedTensors,
    StartUpdate,
    TakeWeights,
    TensorForm,
    WakeUp,
)
from sametoken.serving.preparations import Preparations
from sametoken.serving.request_stream import RequestStream
from sametoken.serving.stats import EngineStats
from sametoken.text.grammar.trials import ProcessTrials
from sametoken.text.tokenizer import (
    Messages,
    Tokenizer,
    all_eos_ids,
    load_tokenizer_here,
    load_tokenizer_of,
    require_own_end,
)
from sametoken.types.engine_summary import EngineSummary
from sametoken.types.lora_modules import AdapterChoice
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.vllm_arguments import takes_vllm_arguments
from sametoken.types.weight_updates import Rendezvous

#: What a pause does with unfinished requests.
PAUSES = ("abort", "wait", "keep")


class AsyncLLM(NotCopied):
    """A model that is loaded and ready in a separate engine process.

    That process handles token ids only; detokenization and stop strings are done here. If it
    dies, its requests fail and it is restarted, within the limits. Call all methods on the
    event loop that started it. A command that is cancelled is withdrawn (docs/rollouts.md).

    Attributes:
        resolved: the engine's settings; ``eos_token_ids`` includes the tokenizer's.
        max_num_seqs: completions that the engine runs at once.
        adapters: those that requests may choose.
    """

    resolved: EngineSummary
    max_num_seqs: int
    adapters: ServedAdapters

    def __init__(
        self,
        process: EngineProcess,
        config: EngineConfig,
        limits: ServingLimits,
        build: Build,
        tokenizer: Tokenizer | None,
    ) -> None:
        summary = process.ready.summary
        require_own_end(tokenizer, summary.vocab_size)
        eos = all_eos_ids(summary.eos_token_ids, tokenizer)
        self.resolved = replace(summary, eos_token_ids=eos)
        self.max_num_seqs = process.ready.limits.max_num_seqs
        self._tokenizer = tokenizer
        self._generation_config = config.generation_config
        self._trials = ProcessTrials()
        self._inputs = InputProcessor(
            tokenizer,
            vocab_size=summary.vocab_size,
            max_model_len=summary.max_model_len,
            eos_token_ids=eos,
            num_speculative_tokens=summary.num_speculative_tokens,
            seed=config.seed,
            trials=self._trials,
        )
        self._client = EngineClient(process, config, build, limits, tokenizer)
        self.adapters = ServedAdapters(self._client.named, self._client.command)
        self._preparations = Preparations()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        limits: ServingLimits | None = None,
        *,
        build: Build = build_engine,
    ) -> AsyncLLM:
        """Start the engine process and wait until it is ready.

        Args:
            config: the engine's options.
            limits: the server's limits.
            build: makes the engine, in its process.

        Raises:
            ConfigError, CheckpointError, UnsupportedError, DrafterMismatchError: as
                ``build_engine``.
            EngineDeadError: the process ended for another reason.
        """
        if not isinstance(config, EngineConfig):
            raise ConfigError(
                f"config of type {type(config).__name__} is not possible",
                "give EngineConfig.from_options(model=...), from sametoken.config",
            )
        limits = limits or ServingLimits()
        if limits.shadow_audit_rate and config.synthetic:
            raise ConfigError(
                f"a shadow audit of {' and '.join(config.synthetic)} compares made-up tokens",
                "set shadow_audit_rate to 0",
            )
        starting = asyncio.ensure_future(EngineProcess.start(config, build))
        try:
            # Beside the process, so that a tokenizer is refused before minutes of loading.
            tokenizer = await asyncio.to_thread(load_tokenizer_here, config)
            process = await starting
            if tokenizer is None:
                path = Path(process.ready.summary.model_path)
                tokenizer = await asyncio.to_thread(load_tokenizer_of, config, path)
            return cls(process, config, limits, build, tokenizer)
        except BaseException:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, SametokenError):
                await (await starting).stop(grace_s=0.0)
            raise

    async def __aenter__(self) -> Self:
        """Enter a block that ends with ``shutdown``."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Shut down."""
        await self.shutdown()

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted: the engine process is up and not draining."""
        return self._client.is_ready

    @property
    def errored(self) -> SametokenError | None:
        """The cause if there is no engine process; None while one is up."""
        return self._client.supervisor.cause

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, in this process.

        Raises:
            RequestError: ``skip_tokenizer_init`` is set.
        """
        if self._tokenizer is None:
            raise RequestError("no tokenizer is loaded", "leave skip_tokenizer_init out")
        return self._tokenizer

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> PromptTokens:
        """The token ids of a prompt in any of its forms; see ``InputProcessor.tokenize``.

        Raises:
            RequestError: its form is unknown, it is too long, or a text without a tokenizer.
        """
        return self._inputs.tokenize(prompt, add_special_tokens=add_special_tokens)

    def render_chat(self, messages: Messages, **template_options: Any) -> PromptTokens:
        """The prompt of a conversation, with the generation prompt added.

        Raises:
            RequestError: there is no tokenizer or chat template, or it refuses the messages.
        """
        return self._inputs.tokenize_chat(messages, **template_options)

    async def start_grammar_trials(self) -> None:
        """Start the grammar processes; otherwise the first grammar's request waits for seconds."""
        # Requests with a grammar get the error.
        with contextlib.suppress(SametokenError):
            await self._preparations.start(self._inputs.grammars.start_trials)

    async def prepare(
        self,
        prompts: Sequence[PromptTokens],
        params: SamplingParams,
        request_id: str,
        lora_request: AdapterChoice = None,
    ) -> list[ProcessedRequest]:
        """Process requests off the event loop, ready for ``begin``.

        Args:
            prompts: token ids.
            params: for all of them.
            request_id: prompt i is ``request_id-i``.
            lora_request: the adapter of all of them; None: the model itself.

        Raises:
            RequestError: a prompt or a parameter is invalid, or there is no such adapter.
            OverloadedError: other grammars are being compiled, and take long.
            DrainingError, EngineRestartingError, EngineDeadError: no requests are accepted, or
                none are from now on.
        """
        self._client.require_ready()
        adapter = self._client.named.name(lora_request)
        process = partial(self._inputs.process_all, request_id, prompts, params, adapter)
        return await self._preparations.run(
            process, has_new_grammar=not self._inputs.grammars.knows(params)
        )

    def server_defaults(self) -> ServerDefaults:
        """Defaults of a server's requests, from the file that ``generation_config`` names.

        Raises:
            CheckpointError: the file is not a JSON object, or a value in it is impossible.
        """
        return server_defaults(Path(self.resolved.model_path), self._generation_config)

    @takes_vllm_arguments
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: AdapterChoice = None,
    ) -> RequestStream:
        """Complete one prompt; the stream yields the output so far after every step.

        The request is checked and sent before this returns, so its errors are raised here, not
        by the iterator. Outputs are cumulative: a slow reader gets only the newest. The last one
        is ``finished``. Closing the iterator (``aclose``), cancelling its reader, or dropping it
        aborts the request. If the engine process dies, the iterator raises ``EngineDeadError``.

        Raises:
            RequestError: the prompt or a parameter is invalid, there is no such adapter, the id is
                in use, or this is another event loop.
            OverloadedError: too many requests wait; it has the time to retry after.
            DrainingError: no new requests are accepted.
            EngineRestartingError: the engine died and is being restarted.
            EngineDeadError: the engine will not be restarted.
        """
        self._client.require_ready()
        require_request_id(request_id)
        tokens = self._inputs.tokenize(prompt)
        adapter = self._client.named.name(lora_request)
        return self.begin(self._inputs.process(request_id, tokens, sampling_params, adapter))

    def begin(self, request: ProcessedRequest) -> RequestStream:
        """``generate`` for a request from ``prepare``."""
        return self._client.begin(request)

    async def abort(self, request_id: str) -> None:
        """End a request; its finish reason is ``"abort"``. Unknown ids are ignored.

        Raises:
            RequestError: the id is no text, or this is another event loop.
        """
        self._client.require_own_loop()
        require_request_id(request_id)
        self._client.abort(request_id)

    def stats(self) -> EngineStats:
        """A snapshot of the statistics; cheap."""
        return self._client.stats

    @property
    def weight_version(self) -> int:
        """The version of the target's weights; 0 as loaded, and again after a restart."""
        return self._client.stats.load.weight_version

    async def update_weights(
        self, path: str | Path, version: int | None = None, *, target: str = "model"
    ) -> int:
        """Replace all weights by those of a directory; otherwise as ``LLM.update_weights``.

        The engine process reads the files while requests run, and writes between two steps.

        Args:
            path: the directory, as that process finds it.
            version: of the new weights; default the next.
            target: "model" or "drafter".

        Raises:
            WeightUpdateError, CheckpointError, UnsupportedError: as ``LLM.update_weights``.
            DrainingError, EngineRestartingError, EngineDeadError: there is no engine.
        """
        return await self._client.command(ChangeWeights(str(path), version, target))

    async def join_trainer(self, at: Rendezvous) -> None:
        """Join a trainer's process group, in place of the one before.

        Raises:
            WeightUpdateError: it does not come within ``at.timeout_s``.
            DrainingError, EngineRestartingError, EngineDeadError: there is no engine.
        """
        await self._client.command(JoinTrainer(at))

    async def start_update(self, target: str = "model") -> None:
        """Begin an update in parts; what was taken for another one is dropped.

        Raises:
            WeightUpdateError, UnsupportedError: there is no such target, or it cannot change.
            DrainingError, EngineRestartingError, EngineDeadError: there is no engine.
        """
        await self._client.command(StartUpdate(target))

    async def take_weights(
        self, weights: str | Path | tuple[TensorForm, ...] | JoinedTensors | SharedTensors
    ) -> None:
        """Take a part of an update: a directory with all tensors, or tensors of the trainer.

        Args:
            weights: a directory as the engine process finds it, or what the trainer's group sends
                now, in this order. If they do not come, the update and the group are dropped.
                Or what is in the trainer's memory, to be kept until the update is finished.

        Raises:
            WeightUpdateError: no update has begun, they do not come, or they are too many.
            DrainingError, EngineRestartingError, EngineDeadError: there is no engine.
        """
        taken = str(weights) if isinstance(weights, Path) else weights
        await self._client.command(TakeWeights(taken))

    async def finish_update(self, version: int | None = None) -> int:
        """Replace all weights by those that were taken; as ``update_weights``."""
        return await self._client.command(FinishUpdate(version))

    async def name_weights(self, version: int) -> int:
        """Give the weights, which stay, a larger version; as ``update_weights``."""
        return await self._client.command(NameWeights(version))

    @property
    def is_paused(self) -> bool:
        """Whether ``pause`` has been called, and no ``resume`` since."""
        return self._client.is_paused

    async def pause(self, mode: str = "abort") -> None:
        """Stop all steps, and return once they have stopped; requests that come wait.

        Args:
            mode: "abort" ends the unfinished requests, with finish reason "abort"; "wait" lets
                those that run end; "keep" keeps them as they are, to go on after ``resume``.

        Raises:
            RequestError: there is no such mode.
            DrainingError, EngineRestartingError, EngineDeadError: there is no engine.
        """
        await self._client.command(Pause(self._waits(mode)))

    def _waits(self, mode: str) -> bool:
        """Whether a pause waits for the requests that run; with "abort" they end here."""
        if mode not in PAUSES:
            raise RequestError(f"there is no pause {shown(mode)}", f"use one of {PAUSES}")
        if mode == "abort":
            self._client.require_ready()
            self._client.abort_all()
        return mode == "wait"

    async def resume(self) -> None:
        """Step again; errors as in ``pause``."""
        await self._client.command(Resume())

    @property
    def is_sleeping(self) -> bool:
        """Whether ``sleep`` has been called, and ``wake_up`` has not ended it."""
        return self._client.is_sleeping

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause, and give memory back as ``LLM.sleep``; requests that come wait.

        Args:
            level: 1 or 2, as there.
            mode: "abort" or "wait", as in ``pause``: no KV is kept.

        Raises:
            RequestError: there is no such level or mode.
            UnsupportedError: memory of this engine cannot be given back.
            DrainingError, EngineRestartingError, EngineDeadError: there is no engine.
        """
        require_level(level)
        if mode == "keep":
            raise RequestError("a sleep keeps no requests", "use the mode abort or wait")
        # Before any request ends for it.
        await self._client.command(CheckSleep(level))
        await self._client.command(FallAsleep(level, self._waits(mode)))

    async def wake_up(self, tags: str | Sequence[str] | None = None) -> None:
        """End a sleep as ``LLM.wake_up``; once all is awake, requests run."""
        await self._client.command(WakeUp(parts_of(tags)))

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache in the engine's memory; errors as in ``pause``."""
        await self._client.command(ForgetPrefixes())

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait until those in flight have ended.

        Returns:
            Whether all ended within ``timeout_s`` seconds.
        """
        self._refuse()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._client.idle.wait(), timeout_s)
        return self._client.idle.is_set()

    def end_requests(self) -> None:
        """Refuse new requests, and end the unfinished ones with finish reason "abort"."""
        self._refuse()
        self._client.abort_all()

    def _refuse(self) -> None:
        self._client.draining = True
        self._preparations.end()

    async def shutdown(self) -> None:
        """End the engine process; unfinished requests fail with ``EngineDeadError``."""
        self._preparations.stop()
        try:
            await self._client.supervisor.stop()
        finally:
            await asyncio.to_thread(self._trials.stop)
