"""An engine in this process that says what a test tells it to, in windows of a few tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

from transformers import PreTrainedTokenizerFast

from helpers.chat_model import CHAT_TEMPLATE, SPECIAL, byte_tokenizer
from sametoken.engine.input_processor import InputProcessor, ProcessedRequest
from sametoken.engine.output_processor import OutputProcessor
from sametoken.engine.sampling_defaults import ServerDefaults
from sametoken.engine.user_inputs import PromptTokens
from sametoken.errors import DrainingError
from sametoken.serving.adapters import ServedAdapters
from sametoken.serving.request_stream import RequestStream
from sametoken.serving.stats import STEP_TIME_BOUNDS, EngineLoad, EngineStats, Histogram
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.engine_summary import EngineSummary
from sametoken.types.lora_modules import AdapterNames, LoRAModule
from sametoken.types.outputs import Logprob, RequestOutput, SpeculationMetrics
from sametoken.types.request import RequestUpdate
from sametoken.types.sampling_params import SamplingParams

SUMMARY = EngineSummary(
    model="toy",
    model_path="toy",
    max_model_len=512,
    vocab_size=byte_tokenizer().get_vocab_size(),
    eos_token_ids=(byte_tokenizer().token_to_id(SPECIAL[0]),),
    device="cpu",
    dtype="float32",
    method="ngram",
    num_speculative_tokens=4,
    block_size=16,
    num_kv_blocks=99,
    world_size=1,
    logprobs_mode="raw_logprobs",
    max_loras=3,
    max_lora_rank=16,
    synthetic=(),
    settings=(),
)
STATS = EngineStats(
    ready=True,
    load=EngineLoad(num_running=2, num_waiting=1, kv_usage=0.25),
    step_time=Histogram(STEP_TIME_BOUNDS, (3,) + (0,) * len(STEP_TIME_BOUNDS), 0.002),
    speculation=SpeculationMetrics(10, 16, 9, (8, 6, 2), (6, 3, 0)),
    num_prompt_tokens=100,
    num_cached_tokens=32,
    num_output_tokens=50,
    num_finished={"stop": 3, "length": 2},
    num_failed=0,
    num_overloaded=1,
    num_restarts=0,
)


class FakeEngine:
    """Stands for ``AsyncLLM``: real tokenizer, real output processing, no model.

    A prompt's first token has a step of its own, as a long prompt's chunks do.

    Args:
        say: the text of each answer, given the prompt's text and the completion's number;
            the end-of-text token follows it.
        window: tokens per step.
        refuse: raised by ``begin``.
        endless: whether answers go on as long as they may.
        failed: whether every answer fails.
        special: the special tokens, of which the first ends a text.
        template: the chat template.
        adapters: what requests may choose.
    """

    is_ready = True
    errored = None
    max_num_seqs = 64

    def __init__(
        self,
        say: Callable[[str, int], str] | str = "hello",
        *,
        window: int = 3,
        refuse: Exception | None = None,
        endless: bool = False,
        failed: bool = False,
        special: tuple[str, ...] = SPECIAL,
        template: str = CHAT_TEMPLATE,
        adapters: tuple[LoRAModule, ...] = (),
    ) -> None:
        backend = byte_tokenizer(special)
        self.tokenizer = Tokenizer(
            PreTrainedTokenizerFast(
                tokenizer_object=backend, eos_token=special[0], chat_template=template
            )
        )
        self.resolved = replace(SUMMARY, vocab_size=backend.get_vocab_size())
        self.say = say if callable(say) else lambda prompt, index: say
        self.window, self.refuse = window, refuse
        self.endless, self.failed = endless, failed
        self.adapters = ServedAdapters(AdapterNames(adapters), self.command)
        self.commands: list[object] = []
        self.seen: list[tuple[PromptTokens, SamplingParams]] = []
        self.chosen: list[str | None] = []
        self.aborted: list[str] = []
        self._tasks: set[asyncio.Task] = set()
        self._inputs = InputProcessor(
            self.tokenizer,
            vocab_size=self.resolved.vocab_size,
            max_model_len=SUMMARY.max_model_len,
            eos_token_ids=SUMMARY.eos_token_ids,
            num_speculative_tokens=SUMMARY.num_speculative_tokens,
            seed=0,
        )

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def tokenize(self, prompt, *, add_special_tokens: bool = True) -> PromptTokens:
        return self._inputs.tokenize(prompt, add_special_tokens=add_special_tokens)

    def render_chat(self, messages, **options) -> PromptTokens:
        return self._inputs.tokenize_chat(messages, **options)

    def server_defaults(self) -> ServerDefaults:
        return ServerDefaults(SamplingParams(temperature=0.5, max_tokens=None))

    async def prepare(self, prompts, params: SamplingParams, request_id: str, lora_request=None):
        given = prompts, params, self.adapters.named.name(lora_request)
        return await asyncio.to_thread(self._inputs.process_all, request_id, *given)

    async def command(self, command: object) -> int:
        self.commands.append(command)
        return 0

    def stats(self) -> EngineStats:
        return STATS

    def end_requests(self) -> None:
        self.refuse = DrainingError("it stops", "go elsewhere")

    def begin(self, request: ProcessedRequest) -> RequestStream:
        if self.refuse is not None:
            raise self.refuse
        self.seen.append((request.prompt, request.params))
        self.chosen += {one.lora_name for one in request.completions}
        stream = RequestStream(request.request_id, self.aborted.append)
        task = asyncio.get_running_loop().create_task(self._answer(request, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _answer(self, request, stream: RequestStream) -> None:
        outputs = OutputProcessor(self.tokenizer)
        outputs.add(request, 0.0, stream=True)
        text = self.tokenizer.decode(request.prompt.token_ids, skip_special_tokens=False)
        left = {
            one.request_id: [
                *self.tokenizer.encode(self.say(text, index), add_special_tokens=False),
                *(() if self.endless else SUMMARY.eos_token_ids),
            ]
            for index, one in enumerate(request.completions)
        }
        chunks = [self._chunk(one.request_id, request) for one in request.completions]
        now = 0.0
        outputs.begin(left, 0.004)
        await self._put(stream, outputs.process(chunks, now).outputs)
        while outputs.num_unfinished and stream.request_id not in self.aborted:
            now += 0.01
            updates = []
            for name, tokens in left.items():
                window = tokens[: self.window]
                left[name] = tokens if self.endless else tokens[self.window :]
                updates.append(self._update(name, window, request, first=now == 0.01))
            await self._put(stream, outputs.process(updates, now).outputs)
            await asyncio.sleep(0.001 if self.endless else 0)

    async def _put(self, stream: RequestStream, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            stream.put(output)
        # A reader sees every output, as it does while it is faster than a model, or the last one.
        while stream._newest and not (stream._at_end or stream.request_id in self.aborted):
            await asyncio.sleep(0)

    def _chunk(self, name: str, request: ProcessedRequest) -> RequestUpdate:
        second = request.prompt.token_ids[1:2]
        has_logprobs = request.params.prompt_logprobs is not None
        scored = tuple(map(candidates, second)) if has_logprobs else None
        return RequestUpdate(name, (), 0, 0, samples=False, num_cached=0, prompt_logprobs=scored)

    def _update(self, name: str, window: list[int], request, *, first: bool) -> RequestUpdate:
        params = request.params
        return RequestUpdate(
            name,
            () if self.failed else tuple(window),
            num_drafts=len(window) - 1,
            num_accepted=len(window) - 1,
            samples=True,
            num_cached=0,
            failed=self.failed,
            logprobs=tuple(map(candidates, window)) if params.logprobs is not None else None,
            prompt_logprobs=None
            if params.prompt_logprobs is None or not first
            else tuple(map(candidates, request.prompt.token_ids[2:])),
        )


def candidates(token_id: int) -> dict[int, Logprob]:
    """The token itself at rank 2, and a likelier one."""
    other = (token_id + 1) % SUMMARY.vocab_size
    return {token_id: Logprob(-1.5, 2), other: Logprob(-0.5, 1)}
