"""Default sampling parameters: what a generation_config.json recommends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sametoken.errors import CheckpointError, RequestError
from sametoken.models.load.files import read_generation_config
from sametoken.types.option_values import MODELS_OWN, NO_FILE
from sametoken.types.sampling_params import RECOMMENDED, SamplingParams


@dataclass(frozen=True, slots=True)
class ServerDefaults:
    """Defaults of a server's requests.

    Attributes:
        params: for what a request leaves out. ``max_tokens`` None fills the context.
        most_tokens: limit on every request's ``max_tokens``.
    """

    params: SamplingParams
    most_tokens: int | None = None

    def max_tokens(self, requested: int | None) -> int | None:
        """``max_tokens`` of a request that asks for this number, or leaves it out."""
        wanted = self.params.max_tokens if requested is None else requested
        return min((n for n in (wanted, self.most_tokens) if n is not None), default=None)


def default_sampling_params(model_path: Path, source: str = MODELS_OWN) -> SamplingParams:
    """Defaults from a generation_config.json, else those of SamplingParams.

    Args:
        model_path: the checkpoint.
        source: ``EngineConfig.generation_config``.

    Raises:
        CheckpointError: the file is not a JSON object, or a value in it is impossible.
    """
    return _recommended(SamplingParams(), model_path, source)


def server_defaults(model_path: Path, source: str = MODELS_OWN) -> ServerDefaults:
    """``default_sampling_params`` for a server.

    As in vLLM, ``max_new_tokens`` is the default of requests that may fill the context; that of a
    directory which the server's owner has named is their limit too.
    """
    params = _recommended(SamplingParams(max_tokens=None), model_path, source)
    is_named = source not in (MODELS_OWN, NO_FILE)
    return ServerDefaults(params, params.max_tokens if is_named else None)


def _recommended(usual: SamplingParams, model_path: Path, source: str) -> SamplingParams:
    if source == NO_FILE:
        return usual
    settings = read_generation_config(model_path if source == MODELS_OWN else Path(source))
    values = {ours: settings.get(name) for name, ours in RECOMMENDED.items()}
    try:
        return replace(usual, **{name: v for name, v in values.items() if v is not None})
    except RequestError as error:
        raise CheckpointError(
            f"{settings.location}: {error.cause}",
            f"repair the file, or set generation_config to {NO_FILE!r}",
        ) from error
