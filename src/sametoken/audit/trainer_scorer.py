"""The engine's log-probabilities of rollouts, which it scores as prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sametoken.audit.trainer_rollouts import ScoredRollout
from sametoken.engine.core import EngineCore
from sametoken.errors import NumericalError
from sametoken.types.request import EngineRequest
from sametoken.types.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Scorer:
    """The engine's log-probabilities of given tokens.

    Attributes:
        core: idle before and after.
        concurrency: the most rollouts at once.
    """

    core: EngineCore
    concurrency: int

    @property
    def most_tokens(self) -> int:
        """Tokens of a rollout that can be scored: the engine samples one more."""
        return self.core.resolved.max_model_len - 1

    def answers(
        self,
        rollouts: Sequence[ScoredRollout],
        temperature: float,
        sequences: Sequence[tuple[int, ...]] | None = None,
    ) -> list[Tensor]:
        """Score the answers of rollouts; what is past ``most_tokens`` is cut off first.

        Args:
            rollouts: their answers are scored.
            temperature: the log-probabilities are of softmax(logits / temperature).
            sequences: other token ids that end with the answers; None: the rollouts' own.

        Returns:
            By rollout, fp32 of the answer's tokens that are left.

        Raises:
            RequestError, NumericalError: as ``audit_trainer``.
        """
        if sequences is None:
            sequences = [one.token_ids for one in rollouts]
        waiting = deque(range(len(sequences)))
        running: dict[str, list[float]] = {}
        found: dict[int, Tensor] = {}
        while waiting or running:
            while waiting and len(running) < self.concurrency:
                index = waiting.popleft()
                self.core.add_request(self._request(index, sequences[index], temperature))
                running[str(index)] = []
            for update in self.core.step():
                if update.failed:
                    raise NumericalError(
                        "the model gives NaN for a rollout", "check the weights and the dtype"
                    )
                scores = running[update.request_id]
                for position in update.prompt_logprobs or ():
                    scores.extend(candidate.logprob for candidate in position.values())
                if update.samples:
                    index = int(update.request_id)
                    rollout = rollouts[index]
                    num_wanted = len(rollout.token_ids) - rollout.prompt_len
                    first = len(sequences[index]) - num_wanted - 1
                    found[index] = torch.tensor(scores[first:], dtype=torch.float32)
                    del running[update.request_id]
                    self.core.release(update.request_id)
        while self.core.has_unfinished:
            self.core.step()
        return [found[index] for index in range(len(sequences))]

    def _request(self, index: int, token_ids: tuple[int, ...], temperature: float) -> EngineRequest:
        kept = token_ids[: self.most_tokens]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        return EngineRequest(
            str(index),
            kept,
            params,
            len(kept) + 1,
            use_prefix_cache=False,
            prompt_temperature=temperature,
        )
