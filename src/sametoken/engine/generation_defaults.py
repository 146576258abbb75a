"""The sampling parameters that a checkpoint's author recommends."""

from __future__ import annotations

from pathlib import Path

from sametoken.core.sampling_params import SamplingParams
from sametoken.errors import CheckpointError, RequestError
from sametoken.models.huggingface import read_generation_config

_RECOMMENDED = ("temperature", "top_p", "top_k", "repetition_penalty")


def default_sampling_params(model_path: Path) -> SamplingParams:
    """What the checkpoint's generation_config.json recommends, else the usual defaults.

    Raises:
        CheckpointError: the file is not a JSON object, or a value in it is impossible.
    """
    recommended = read_generation_config(model_path)
    chosen = {name: recommended.get(name) for name in _RECOMMENDED}
    try:
        return SamplingParams(**{name: v for name, v in chosen.items() if v is not None})
    except RequestError as error:
        raise CheckpointError(
            f"{recommended.location}: {error.cause}", "repair or delete the file"
        ) from error
