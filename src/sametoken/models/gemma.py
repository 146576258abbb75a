"""What Gemma's decoders share: windows with their own rope, scaled embeddings, capped logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from sametoken.layers.layer_input import scaled_rows
from sametoken.models.decoder import Decoder
from sametoken.models.layer_types import WINDOWED
from sametoken.models.load.settings import Settings


class GemmaDecoder(Decoder):
    """The shared decoder with windows, and embeddings multiplied by the root of their width."""

    layer_types = WINDOWED
    local_theta = 10_000.0
    activation = "gelu_pytorch_tanh"
    #: A rope by layer type has its own, if any; layer types alone say which have windows.
    ignored: ClassVar[tuple[str, ...]] = ("original_max_position_embeddings", "use_sliding_window")
    aliases: ClassVar[Mapping[str, str]] = {"hidden_activation": "hidden_act"}

    def compute_rank_logits(self, hidden: Tensor) -> Tensor:
        """As ``Decoder.compute_rank_logits``, capped softly if the config says so."""
        logits = super().compute_rank_logits(hidden)
        settings = Settings(self.config.extra, self.config.architecture)
        if settings.get("final_logit_softcapping") is None:
            return logits
        return self.kernels.soft_cap(logits, settings.number("final_logit_softcapping"))

    def _embed(self, token_ids: Tensor) -> Tensor:
        return scaled_rows(self.embedding, token_ids, self.config.hidden_size)
