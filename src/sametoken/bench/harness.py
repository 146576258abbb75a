"""The engine as a language model of lm-eval. Importing this needs the ``eval`` extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from sametoken.errors import NumericalError, UnsupportedError
from sametoken.llm import LLM
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.outputs import RequestOutput
from sametoken.types.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 256
_LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING_NAMES = ("top_p", "top_k", "min_p", "seed", "repetition_penalty")


class EngineLM(TemplateLM):  # type: ignore[misc]
    """lm-eval's model interface; requests of one kind run as one batch.

    Args:
        llm: the engine, with a tokenizer.
        adapter: the name of the adapter that answers; None: the model itself.
        plain: decode without drafts.
        max_tokens: maximum answer length, overriding the tasks'.

    Attributes:
        answers: all answers in order: token ids of texts, and log-probabilities.
        num_truncated: prompts truncated on the left to fit.
    """

    def __init__(
        self,
        llm: LLM,
        adapter: str | None = None,
        *,
        plain: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self._llm, self._adapter = llm, adapter
        self._num_speculative_tokens = 0 if plain else None
        self._max_tokens = max_tokens
        self.tokenizer = llm.get_tokenizer()
        self.answers: list[Any] = []
        self.num_truncated = 0

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token id."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The context token of a text without context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's key in lm-eval's caches."""
        return str(self._llm.resolved.model_path)

    @property
    def max_length(self) -> int:
        """Maximum tokens of a request."""
        return self._llm.resolved.max_model_len

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation as prompt text.

        Raises:
            RequestError: the chat template refuses it.
        """
        return Tokenizer(self.tokenizer).apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text; one that already begins with the BOS token gets no second one."""
        if add_special_tokens is None:
            first = self.tokenizer.bos_token
            add_special_tokens = not (first and string.startswith(first))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate texts up to the first stop string, which is excluded.

        Raises:
            UnsupportedError: a task needs a generation option that the engine lacks.
        """
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            chosen = self._sampling(options)
            room = self.max_length - (chosen.max_tokens or 0)
            prompts.append(self._truncated(self.tok_encode(context), room))
            params.append(chosen)
        outputs = self._run(prompts, params, disable_tqdm)
        self.answers += [list(output.outputs[0].token_ids) for output in outputs]
        return [output.outputs[0].text for output in outputs]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Compute log-probabilities of whole texts, in windows of the model's length.

        A request has a window, a token of context before it, and one that it emits.
        """
        windows = []
        for request in requests:
            token_ids, length = self.tok_encode(request.args[0]), self.max_length - 2
            rolling = get_rolling_token_windows(token_ids, self.prefix_token_id, length, 1)
            windows.append([*map(make_disjoint_window, rolling)])
        parts = [(("", ""), context, text) for one in windows for context, text in one]
        scores = iter(self._loglikelihood_tokens(parts, disable_tqdm=disable_tqdm))
        return [sum(next(scores)[0] for _ in one) for one in windows]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Compute each continuation's log-probability, and whether it is the greedy one."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            num_speculative_tokens=self._num_speculative_tokens,
        )
        prompts = [
            self._truncated(context + text, self.max_length - 1) for _, context, text in requests
        ]
        outputs = self._run(prompts, [params] * len(prompts), disable_tqdm)
        scores = [
            _score(output, len(text))
            for output, (_, _, text) in zip(outputs, requests, strict=True)
        ]
        self.answers += scores
        return scores

    def _sampling(self, options: Mapping[str, Any]) -> SamplingParams:
        left = dict(options)
        until = left.pop("until", None) or []
        lengths = [int(left.pop(name)) for name in _LENGTH_NAMES if name in left]
        samples = left.pop("do_sample", None)
        temperature = float(left.pop("temperature", 1.0 if samples else 0.0))
        sampling = {name: left.pop(name) for name in _SAMPLING_NAMES if name in left}
        if left.pop("num_beams", 1) != 1 or left:
            names = ", ".join(left) or "num_beams"
            raise UnsupportedError(f"the task generates with {names}", "use another task")
        return SamplingParams(
            temperature=0.0 if samples is False else temperature,
            max_tokens=self._max_tokens or (lengths[0] if lengths else DEFAULT_MAX_TOKENS),
            stop=[text for text in ([until] if isinstance(until, str) else until) if text],
            num_speculative_tokens=self._num_speculative_tokens,
            **({"seed": 0} | sampling),
        )

    def _truncated(self, token_ids: list[int], room: int) -> list[int]:
        """Truncate a prompt on the left to ``room`` tokens."""
        if room < 1:
            raise UnsupportedError(
                f"the task's answers leave no room for a prompt in {self.max_length} tokens",
                "lower max_tokens",
            )
        self.num_truncated += len(token_ids) > room
        return token_ids[-room:]

    def _run(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], disable_tqdm: bool
    ) -> list[RequestOutput]:
        inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(
            inputs, list(params), use_tqdm=not disable_tqdm, lora_request=self._adapter
        )
        for output in outputs:
            if output.outputs[0].finish_reason == "error":
                raise output.outputs[0].error or NumericalError("a request failed")
        return outputs


def _score(output: RequestOutput, length: int) -> tuple[float, bool]:
    """Score the last ``length`` tokens of the prompt."""
    entries = (output.prompt_logprobs or ())[-length:] if length else ()
    chosen = [
        entry[token_id]
        for token_id, entry in zip(output.prompt_token_ids[-length:], entries, strict=False)
        if entry is not None
    ]
    return sum(one.logprob for one in chosen), all(one.rank == 1 for one in chosen)
