"""The registry of architectures, and which models tensor parallelism can divide."""

from __future__ import annotations

from sametoken.errors import ConfigError, UnsupportedError
from sametoken.models.bamba import BambaForCausalLM
from sametoken.models.base import ModelConfig
from sametoken.models.decoder import Decoder
from sametoken.models.deepseek import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteForCausalLM,
)
from sametoken.models.ernie4_5 import Ernie4_5_MoeForCausalLM, Ernie4_5ForCausalLM
from sametoken.models.falcon_h1 import FalconH1ForCausalLM
from sametoken.models.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from sametoken.models.gemma4 import Gemma4ForCausalLM, Gemma4UnifiedForCausalLM
from sametoken.models.glm4_moe import Glm4MoeForCausalLM
from sametoken.models.gpt_oss import GptOssForCausalLM
from sametoken.models.granite import GraniteForCausalLM, GraniteMoeHybridForCausalLM
from sametoken.models.hunyuan_dense import HunYuanDenseV1ForCausalLM
from sametoken.models.llama import LlamaForCausalLM
from sametoken.models.load.linear_format import UNQUANTIZED, Quantization
from sametoken.models.minimax_m2 import MiniMaxM2ForCausalLM
from sametoken.models.mistral import (
    Ministral3ForCausalLM,
    Mistral3ForConditionalGeneration,
    MistralForCausalLM,
)
from sametoken.models.mixtral import MixtralForCausalLM
from sametoken.models.nemotron_h import NemotronHForCausalLM
from sametoken.models.olmo2 import Olmo2ForCausalLM, Olmo3ForCausalLM
from sametoken.models.phi3 import Phi3ForCausalLM
from sametoken.models.qwen2 import (
    MiMoForCausalLM,
    Qwen2ForCausalLM,
    Qwen2VLForConditionalGeneration,
)
from sametoken.models.qwen2_moe import Qwen2MoeForCausalLM
from sametoken.models.qwen3 import Qwen3ForCausalLM, Qwen3VLForConditionalGeneration
from sametoken.models.qwen3_5 import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3NextForCausalLM,
)
from sametoken.models.qwen3_moe import Qwen3MoeForCausalLM
from sametoken.models.seed_oss import SeedOssForCausalLM
from sametoken.models.smollm3 import SmolLM3ForCausalLM
from sametoken.types.speculative_methods import TABLE, WITH_MODEL

ARCHITECTURES: dict[str, type[Decoder]] = {
    "BambaForCausalLM": BambaForCausalLM,
    "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
    "FalconH1ForCausalLM": FalconH1ForCausalLM,
    "Ernie4_5ForCausalLM": Ernie4_5ForCausalLM,
    "Ernie4_5_ForCausalLM": Ernie4_5ForCausalLM,
    "Ernie4_5_MoeForCausalLM": Ernie4_5_MoeForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration,
    "Gemma4ForCausalLM": Gemma4ForCausalLM,
    "Gemma4ForConditionalGeneration": Gemma4ForCausalLM,
    "Gemma4UnifiedForCausalLM": Gemma4UnifiedForCausalLM,
    "Gemma4UnifiedForConditionalGeneration": Gemma4UnifiedForCausalLM,
    "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
    "Glm4MoeLiteForCausalLM": Glm4MoeLiteForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "GraniteForCausalLM": GraniteForCausalLM,
    "GraniteMoeHybridForCausalLM": GraniteMoeHybridForCausalLM,
    "HunYuanDenseV1ForCausalLM": HunYuanDenseV1ForCausalLM,
    "KimiK2ForCausalLM": DeepseekV3ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MiMoForCausalLM": MiMoForCausalLM,
    "MiniMaxM2ForCausalLM": MiniMaxM2ForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MinistralForCausalLM": MistralForCausalLM,
    "Ministral3ForCausalLM": Ministral3ForCausalLM,
    "Mistral3ForConditionalGeneration": Mistral3ForConditionalGeneration,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Olmo2ForCausalLM": Olmo2ForCausalLM,
    "Olmo3ForCausalLM": Olmo3ForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen2MoeForCausalLM": Qwen2MoeForCausalLM,
    "Qwen2VLForConditionalGeneration": Qwen2VLForConditionalGeneration,
    "Qwen2_5_VLForConditionalGeneration": Qwen2VLForConditionalGeneration,
    "NemotronHForCausalLM": NemotronHForCausalLM,
    "NemotronHPuzzleForCausalLM": NemotronHForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3VLForConditionalGeneration": Qwen3VLForConditionalGeneration,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5ForConditionalGeneration": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen3_5MoeForCausalLM,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5MoeForCausalLM,
    "SeedOssForCausalLM": SeedOssForCausalLM,
    "SmolLM3ForCausalLM": SmolLM3ForCausalLM,
}


def model_class(architecture: str) -> type[Decoder]:
    """The class for a Hugging Face architecture name.

    Raises:
        UnsupportedError: it is not registered.
    """
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"architecture {architecture!r} is not supported", _remedy(architecture)
        )
    return ARCHITECTURES[architecture]


def _remedy(architecture: str) -> str:
    """The remedy for an architecture that no target has."""
    heads = (part for name in WITH_MODEL for part in TABLE[name].architectures)
    if any(part in architecture.lower() for part in heads):
        return 'it drafts for a target: give the target, and this as "model" of speculative_config'
    return f"supported: {', '.join(ARCHITECTURES)}"


def require_divisible(config: ModelConfig, size: int) -> None:
    """Refuse a model that ``size`` ranks cannot divide evenly by heads and features.

    Raises:
        UnsupportedError: the architecture is not registered.
        CheckpointError: a size is missing or impossible.
        ConfigError: a size is not divisible; named by its key in config.json.
    """
    if size > 1:
        _require_even(model_class(config.architecture), config, size)


def is_divisible(
    model: type[Decoder], config: ModelConfig, quantization: Quantization, size: int
) -> bool:
    """Whether ``size`` ranks divide a model of that class: unquantized, and evenly.

    A rank's columns may not begin within a quantized group.

    Raises:
        CheckpointError: a size is missing or impossible.
    """
    if quantization is not UNQUANTIZED:
        return False
    try:
        _require_even(model, config, size)
    except ConfigError:
        return False
    return True


def _require_even(model: type[Decoder], config: ModelConfig, size: int) -> None:
    for name, count in model.divided_sizes(config).items():
        _require_multiple(name, count, size)
    for name, count in model.shared_sizes(config).items():
        if size % count:
            _require_multiple(name, count, size, "no multiple and no divisor")


def _require_multiple(name: str, count: int, size: int, fault: str = "no multiple") -> None:
    if count % size:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the model: {name}={count} "
            f"is {fault} of {size}",
            "use a size that divides it, or 1",
        )
