"""Which class runs which architecture."""

from __future__ import annotations

from sametoken.errors import UnsupportedError
from sametoken.models.decoder import Decoder
from sametoken.models.llama import LlamaForCausalLM
from sametoken.models.mistral import MistralForCausalLM
from sametoken.models.qwen3 import Qwen3ForCausalLM
from sametoken.models.qwen3_5 import Qwen3_5ForCausalLM
from sametoken.models.qwen3_next import Qwen3NextForCausalLM

ARCHITECTURES: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5ForConditionalGeneration": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5ForCausalLM,
}


def model_class(architecture: str) -> type[Decoder]:
    """The class for a Hugging Face architecture name.

    Raises:
        UnsupportedError: no class runs it.
    """
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"architecture {architecture!r} is not supported", f"known: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[architecture]
