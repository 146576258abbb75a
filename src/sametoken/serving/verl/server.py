"""What verl asks of a rollout server, over ``AsyncLLM``. Imports neither verl nor Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from sametoken.config import EngineConfig
from sametoken.errors import RequestError, UnsupportedError
from sametoken.serving.async_llm import AsyncLLM
from sametoken.serving.http.app import create_app
from sametoken.serving.http.config import ServerConfig
from sametoken.serving.http.listen import bind, listen
from sametoken.serving.http.run import DrainingServer
from sametoken.types.outputs import PositionLogprobs, RequestOutput
from sametoken.types.sampling_params import SamplingParams, derive_seed, replica_seed

#: What is put to sleep, by verl's mode of a rollout; a standalone one never sleeps.
_LEVELS = {"hybrid": 2, "colocated": 1}
#: The name of the trainer's adapter.
_ADAPTER = "policy"
_NO_TOKENS: dict[str, Any] = {"token_ids": [], "stop_reason": "aborted"}


def engine_config(
    rollout: Any, model_path: str, lora_rank: int = 0, replica_rank: int = 0
) -> EngineConfig:
    """The engine of verl's ``RolloutConfig``; ``engine_kwargs.sametoken`` has further options.

    Weights are read from the checkpoint whatever ``load_format`` says, until an update comes.

    Args:
        rollout: the config.
        model_path: the checkpoint.
        lora_rank: see ``lora_rank_of``.
        replica_rank: of the replica. Each has a seed of its own, as verl spreads the answers to a
            prompt over replicas, and none of them has a seed.

    Raises:
        ConfigError: an option is unknown or impossible.
        UnsupportedError: weights are to be quantized as they come.
    """
    if rollout.quantization is not None or (rollout.qat or {}).get("enable"):
        raise UnsupportedError(
            "a rollout does not quantize a model whose checkpoint is not quantized",
            "leave rollout.quantization and qat out, or name a quantized checkpoint",
        )
    options = {
        "dtype": rollout.dtype,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "seed": replica_seed(rollout.seed, replica_rank),
        "logprobs_mode": rollout.logprobs_mode,
        "enable_return_routed_experts": rollout.enable_rollout_routing_replay,
    }
    if lora_rank:
        # A place for the next one, while requests have the one before.
        options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": lora_rank}
    own = rollout.engine_kwargs.get("sametoken") or {}
    return EngineConfig.from_options(model=model_path, **options | dict(own))


def lora_rank_of(model: Any) -> int:
    """The rank of the adapter that a trainer of verl's ``HFModelConfig`` sends; 0: it sends none.

    FSDP's settings have a name of their own, Megatron's are in a mapping.
    """
    return 0 if model.lora.get("merge") else max(model.lora_rank, model.lora.get("rank", 0))


def request_defaults(rollout: Any) -> dict[str, Any]:
    """What requests have of verl's ``RolloutConfig`` unless they say it, as in verl's servers."""
    return {"repetition_penalty": rollout.repetition_penalty, "ignore_eos": rollout.ignore_eos}


class RolloutServer:
    """One engine and its OpenAI API, with the methods of verl's servers.

    Args:
        config: the engine's options.
        host: address to listen on, at a port that the system chooses.
        mode: verl's: "hybrid", "colocated" or "standalone".
        lengths: of prompts and of responses, at most.
        sleeps: whether memory is given back between rollouts.
        defaults: see ``request_defaults``.
        seeded_by_id: whether a request without a seed has one of its id (``full_determinism``).
    """

    def __init__(
        self,
        config: EngineConfig,
        host: str,
        mode: str = "hybrid",
        lengths: tuple[int, int] = (512, 512),
        *,
        sleeps: bool = False,
        defaults: Mapping[str, Any] | None = None,
        seeded_by_id: bool = False,
    ) -> None:
        self._config, self._server_config = config, ServerConfig(host=host, port=0)
        self._level = _LEVELS.get(mode) if sleeps else None
        if self._level and config.enable_lora:
            # The model's weights do not come again.
            self._level = 1
        self._adapter: str | None = None
        self._lengths, self._defaults = lengths, defaults or {}
        self._seeded_by_id = seeded_by_id
        self._global_steps: int | None = None
        self._rejects = False

    async def launch_server(self) -> None:
        """Start the engine, and serve it; errors as in ``AsyncLLM.start``."""
        self._listener = bind(self._server_config)
        self._engine = await AsyncLLM.start(self._config)
        app = create_app(self._engine, self._server_config)
        server = DrainingServer(app, self._engine, self._server_config)
        listen(self._listener)
        self._serving = asyncio.ensure_future(server.serve(sockets=[self._listener]))

    def get_server_address(self) -> tuple[str, int]:
        """Address and port of the OpenAI API."""
        host, port, *_ = self._listener.getsockname()
        return host, port

    async def answer(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str
    ) -> dict[str, Any]:
        """The fields of verl's ``TokenOutput`` for one prompt.

        During ``abort_all_requests`` a request waits, or comes back as aborted if it is rejected.

        Raises:
            RequestError: the prompt or a parameter is invalid.
        """
        extra = {"global_steps": self._global_steps}
        if self._rejects:
            return _NO_TOKENS | {"extra_fields": extra}
        given = {**self._defaults, **sampling_params}
        if self._seeded_by_id and given.get("seed") is None:
            # Not in the order of arrival, which differs from run to run.
            given["seed"] = derive_seed(self._config.seed, request_id)
        params = self._params(given, len(prompt_ids))
        asked = {"prompt_token_ids": list(prompt_ids)}
        output: RequestOutput | None = None
        stream = self._engine.generate(asked, params, request_id, lora_request=self._adapter)
        async for one in stream:
            # Outputs are cumulative, so only the newest is kept.
            output = one
        assert output is not None
        (made,) = output.outputs
        if made.error is not None:
            raise made.error
        counts = output.metrics.speculation
        extra |= {
            "num_cached_tokens": output.metrics.num_cached_tokens,
            "spec_num_draft_tokens": counts.num_draft_tokens,
            "spec_num_accepted_tokens": counts.num_accepted_tokens,
            "spec_num_verify_steps": counts.num_steps,
        }
        if output.prompt_logprobs is not None:
            extra |= _of_prompt(output.prompt_logprobs, max(params.prompt_logprobs or 0, 1))
        pairs = zip(made.token_ids, made.logprobs or (), strict=False)
        return {
            "token_ids": list(made.token_ids),
            "log_probs": None
            if made.logprobs is None
            else [entry[token].logprob for token, entry in pairs],
            "routed_experts": made.routed_experts,
            "stop_reason": "aborted" if made.finish_reason == "abort" else "completed",
            "extra_fields": extra,
        }

    async def update_weights(self, directory: str, global_steps: int | None = None) -> None:
        """Replace the weights by those of a directory; errors as in ``AsyncLLM``."""
        await self._engine.update_weights(directory)
        await self.set_global_steps(global_steps)

    async def update_adapter(self, directory: str, global_steps: int | None = None) -> None:
        """Replace the adapter that answers by that of a directory; errors as in ``AsyncLLM``."""
        await self._engine.adapters.load(_ADAPTER, directory)
        self._adapter = _ADAPTER
        await self.set_global_steps(global_steps)

    async def set_global_steps(self, global_steps: int | None) -> None:
        """Note the trainer's step, which answers then have."""
        if global_steps is not None:
            self._global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End all requests, and hold or reject new ones until ``resume_generation``."""
        self._rejects = reject_request
        await self._engine.pause("abort")

    async def resume_generation(self) -> None:
        """Take requests again."""
        self._rejects = False
        await self._engine.resume()

    async def clear_kv_cache(self) -> None:
        """Empty the prefix cache."""
        await self._engine.reset_prefix_cache()

    async def sleep(self) -> None:
        """Give memory back, where the mode lets it; errors as in ``AsyncLLM``."""
        if self._level is not None:
            await self._engine.sleep(self._level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """End the sleep, or that of some parts."""
        if self._engine.is_sleeping:
            await self._engine.wake_up(tags)

    async def release_kv_cache(self) -> None:
        """Give the memory of KV back."""
        if self._level is not None and not self._engine.is_sleeping:
            await self._engine.sleep(1)

    async def resume_kv_cache(self) -> None:
        """End ``release_kv_cache``, which kept the weights."""
        await self.wake_up()

    async def shutdown(self) -> None:
        """End the engine process and the API."""
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await self._engine.shutdown()
        self._listener.close()

    def _params(self, given: dict[str, Any], num_prompt_tokens: int) -> SamplingParams:
        prompt_length, response_length = self._lengths
        room = self._engine.resolved.max_model_len - num_prompt_tokens
        if room < 1:
            raise RequestError(
                f"a prompt of {num_prompt_tokens} tokens leaves no room for an answer",
                "raise max_model_len, or shorten the prompt",
            )
        left = min(response_length, prompt_length + response_length - num_prompt_tokens)
        # What is left of a budget may be 0, for which verl's servers make one token.
        named = [given.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
        wanted = next((one for one in named if one is not None), left)
        logprobs = 0 if given.pop("logprobs", False) else None
        limit = max(1, min(wanted, room))
        # Text is needed for stop strings alone.
        given = {"detokenize": bool(given.get("stop")), **given}
        return SamplingParams(**given | {"logprobs": logprobs, "max_tokens": limit})


def _of_prompt(positions: Sequence[PositionLogprobs | None], count: int) -> dict[str, Any]:
    """What verl reads of a teacher: the likeliest tokens of each position, or its own alone.

    The first token has none, so verl's rows begin with the second, and end with zeros.
    """
    found = [position for position in positions if position is not None]
    rows = [sorted(one.items(), key=lambda item: item[1].rank)[:count] for one in found]
    return {
        "prompt_ids": [*([token for token, _ in row] for row in rows), [0] * count],
        "prompt_logprobs": [*([one.logprob for _, one in row] for row in rows), [0.0] * count],
    }
