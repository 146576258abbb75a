"""The sampling parameters that a checkpoint's author recommends."""

from __future__ import annotations

import json
from pathlib import Path

from sametoken.core.sampling_params import SamplingParams
from sametoken.errors import CheckpointError

_RECOMMENDED = ("temperature", "top_p", "top_k", "repetition_penalty")


def default_sampling_params(model_path: Path) -> SamplingParams:
    """What the checkpoint's generation_config.json recommends, else the usual defaults.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    path = model_path / "generation_config.json"
    if not path.is_file():
        return SamplingParams()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        chosen = {name: values.get(name) for name in _RECOMMENDED}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a JSON object", "repair or delete it") from error
    return SamplingParams(**{name: v for name, v in chosen.items() if v is not None})
