"""The requests of an ``LLM``: threads that share it run the steps of one engine in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import cast

from sametoken.engine.core import EngineCore
from sametoken.engine.exclusive import Exclusive, NoEngine
from sametoken.engine.input_processor import ProcessedRequest
from sametoken.engine.interrupts import DeferredInterrupts
from sametoken.engine.output_processor import OutputProcessor, ProcessedUpdates
from sametoken.engine.progress import shown_progress
from sametoken.engine.user_inputs import OnFinished
from sametoken.errors import RequestError
from sametoken.io.garbage import objects_exempt
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.outputs import RequestOutput, SpeculationMetrics

#: Requests whose objects make searches for garbage frequent. Exempting the caller's objects first
#: counts those that are exempt already, which takes some 10 ms of a million.
_MANY = 64


class OfflineRequests:
    """Runs requests of the caller's thread; a step serves those of all threads.

    Args:
        engine: it runs no other requests.
        tokenizer: of the outputs' texts; None: they have none.

    Attributes:
        engine: see above; once it was let go, all that is asked of it raises.
        speculation: counters summed over all finished requests.
    """

    def __init__(self, engine: EngineCore, tokenizer: Tokenizer | None) -> None:
        self.engine, self.speculation = engine, SpeculationMetrics()
        self._exclusive = Exclusive()
        self._outputs = OutputProcessor(tokenizer)
        self._latest: dict[str, RequestOutput] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return self._outputs.num_unfinished

    def let_go(self) -> None:
        """Let the engine and its memory go; later calls raise ``EngineDeadError``."""
        self.engine = cast("EngineCore", NoEngine())

    def run(
        self, requests: Sequence[ProcessedRequest], on_finished: OnFinished, *, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Outputs in order; errors and arguments as of ``LLM.generate``."""
        places = {request.request_id: place for place, request in enumerate(requests)}
        waiting, outputs = set(places), dict[str, RequestOutput]()
        exempt = objects_exempt() if len(requests) >= _MANY else nullcontext()
        with self._interrupts() as interrupts, exempt:
            try:
                self._submit(requests, interrupts, stream=False)
                with shown_progress(len(places), shown=use_tqdm) as advance:
                    while waiting:
                        ready = self._advance(waiting, interrupts)
                        outputs |= ready
                        waiting.difference_update(ready)
                        advance(len(ready))
                        for request_id, output in ready.items():
                            on_finished(places[request_id], output)
                self._drain(interrupts)
            except BaseException:
                self._later(partial(self._forget, list(places)))
                raise
        return [outputs[request_id] for request_id in places]

    def stream(self, request: ProcessedRequest) -> Iterator[RequestOutput]:
        """As ``LLM.generate_stream``."""
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

    def abort(self, request_id: str) -> None:
        """As ``LLM.abort``."""
        self._later(partial(self._end, request_id))

    @contextmanager
    def resting(self) -> Iterator[None]:
        """A block between two steps, whose interrupts wait."""
        with self._interrupts() as interrupts, self._exclusive.held(interrupts.check):
            yield

    def _submit(
        self, requests: Sequence[ProcessedRequest], interrupts: DeferredInterrupts, *, stream: bool
    ) -> None:
        """Queue all requests, or none if the engine refuses one of them."""
        completions = [completion for request in requests for completion in request.completions]
        num_added = 0
        with self._exclusive.held(interrupts.check):
            if self.engine.upkeep.is_sleeping:
                raise RequestError("the engine sleeps", "call wake_up first")
            try:
                for completion in completions:
                    self.engine.add_request(completion)
                    num_added += 1
                for request in requests:
                    self._outputs.add(request, time.monotonic(), stream=stream)
            except Exception:
                for added in completions[:num_added]:
                    self.engine.release(added.request_id)
                raise

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
            began = time.monotonic()
            updates = interrupts.cuttable(self.engine.step)
            self._outputs.begin(self.engine.begun, began)
            self._collect(self._outputs.process(updates, time.monotonic()))
        except BaseException as error:
            # The tokens of an interrupted step are lost, so no request can continue.
            self.engine.stop(error)
            raise

    def _drain(self, interrupts: DeferredInterrupts) -> None:
        """Process the steps that finished requests left in flight.

        Not called after an interrupt, when the engine may never become idle.
        """
        while True:
            interrupts.check()
            with self._exclusive.held(interrupts.check):
                if self._outputs.num_unfinished or not self.engine.has_unfinished:
                    return
                self._step(interrupts)

    def _interrupts(self) -> DeferredInterrupts:
        return DeferredInterrupts(self.engine.stop)

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
            self.engine.release(request_id, num_kept_tokens, aborted=aborted)
        for output in processed.outputs:
            self._latest[output.request_id] = output
            if output.finished:
                self.speculation += output.metrics.speculation
