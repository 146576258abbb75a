"""The multi-token-prediction (MTP, NextN) module of Qwen3-Next and Qwen3.5, and its checkpoint.

Row p takes the token at p + 1 and the target's last hidden state at p, and predicts the token at
p + 2. From vLLM (``vllm/model_executor/models/qwen3_next_mtp.py``, ``qwen3_5_mtp.py``) and SGLang
(``python/sglang/srt/models/qwen3_5_mtp.py``):

- ``fc`` maps ``[pre_fc_norm_embedding(embedding) | pre_fc_norm_hidden(hidden)]``, 2h wide, to h,
  without a bias, in drafted rows too.
- The target's state is the one after its final norm. The next row and the lm_head take the
  module's state after ``norm``. Acceptance falls with states from before those norms (measured
  in ggml-org/llama.cpp#24025 and ROCm/ATOM#1764).
- One layer of gated full attention follows, with the MLP type of the target's layer 0. The same
  layer runs for every further draft.
- Norm weights are stored as their difference from 1, like the target's.
- Embedding and lm_head are the target's.

The target's own checkpoint contains the module as ``mtp.*``, beside ``model.*`` or
``model.language_model.*``: ``mtp.fc``, ``mtp.pre_fc_norm_embedding``, ``mtp.pre_fc_norm_hidden``,
``mtp.layers.0.*`` and ``mtp.norm``. transformers ignores these tensors
(``_keys_to_ignore_on_load_unexpected``) and drops them when it saves.

Config keys: ``mtp_num_hidden_layers`` and ``mtp_use_dedicated_embeddings`` (Qwen3.5), and
``num_nextn_predict_layers``, which vLLM reads for Qwen3-Next. Without a count there is one layer.

Other families' modules run alike: Nemotron-3's (``mtp_nemotron_h``), whose two layers of one mixer
are such a layer, ERNIE 4.5's and MiMo's (``mtp_dense``).
"""

from __future__ import annotations

from pathlib import Path

import torch

from sametoken.errors import UnsupportedError
from sametoken.layers.norm import RMSNorm
from sametoken.layers.residual import DecoderLayer
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import attention_cache, load_centred_norm, rotary_of
from sametoken.models.decoder import Decoder
from sametoken.models.ernie4_5 import Ernie4_5_MoeForCausalLM
from sametoken.models.heads.mtp_dense import ErnieForm, MiMoForm
from sametoken.models.heads.mtp_form import (
    ANOTHER_METHOD,
    Module,
    ModuleCheckpoint,
    ModuleForm,
    ModuleHead,
)
from sametoken.models.heads.mtp_nemotron_h import NemotronHForm
from sametoken.models.heads.reader import HeadReader
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import Part
from sametoken.models.nemotron_h import NemotronHForCausalLM
from sametoken.models.qwen2 import MiMoForCausalLM
from sametoken.models.qwen3_5 import HybridDecoder, load_gated_attention
from sametoken.models.registry import ARCHITECTURES
from sametoken.ops.cache_types import PagedKV

PREFIX = "mtp"


class QwenForm(ModuleForm):
    """See ``ModuleForm``."""

    prefix, fusion = f"{PREFIX}.", f"{PREFIX}.fc"

    def num_layers(self, settings: Settings) -> object:
        """See ``ModuleForm.num_layers``; Qwen3.5's key comes first."""
        return settings.get("mtp_num_hidden_layers", super().num_layers(settings))

    def require(self, settings: Settings) -> None:
        """See ``ModuleForm.require``."""
        if settings.switch("mtp_use_dedicated_embeddings"):
            raise UnsupportedError(
                f"{settings.location}: a multi-token-prediction module with its own embedding is "
                "not supported",
                f"use {ANOTHER_METHOD}",
            )

    def load(self, config: ModelConfig, reader: HeadReader) -> Module:
        """See ``ModuleForm.load``."""
        weights, hidden, layer = reader.weights, config.hidden_size, f"{PREFIX}.layers.0"

        def norm(name: str) -> RMSNorm:
            return load_centred_norm(config, weights, name)

        rotary = rotary_of(config, reader.max_positions, weights.device)
        return Module(
            embedding_norm=norm(f"{PREFIX}.pre_fc_norm_embedding"),
            hidden_norm=norm(f"{PREFIX}.pre_fc_norm_hidden"),
            fc=weights.linear(2 * hidden, Part(self.fusion, hidden)),
            layer=DecoderLayer(
                norm(f"{layer}.input_layernorm"),
                load_gated_attention(config, weights, f"{layer}.self_attn", rotary),
                norm(f"{layer}.post_attention_layernorm"),
                HybridDecoder.load_layer_mlp(config, weights, f"{layer}.mlp", 0),
            ),
            norm=norm(f"{PREFIX}.norm"),
        )


#: The form of each family's module.
_FORMS: dict[type[Decoder], ModuleForm] = {
    HybridDecoder: QwenForm(),
    NemotronHForCausalLM: NemotronHForm(),
    Ernie4_5_MoeForCausalLM: ErnieForm(),
    MiMoForCausalLM: MiMoForm(),
}


def _form_of(config: ModelConfig, directory: Path) -> ModuleForm:
    """The form of an architecture's module."""
    architecture = ARCHITECTURES.get(config.architecture, Decoder)
    found = [form for family, form in _FORMS.items() if issubclass(architecture, family)]
    if not found:
        raise UnsupportedError(
            f"{directory}: method 'mtp' does not run with {config.architecture}",
            f"use a model with a module (docs/speculative.md), or {ANOTHER_METHOD}",
        )
    return found[0]


class MTPCheckpoint(ModuleCheckpoint):
    """The module in the target's directory.

    Raises:
        CheckpointError: no config, or a checkpoint without the module's weights.
        UnsupportedError: an architecture without an MTP module, or an unsupported form of it.
    """

    def __init__(self, directory: Path, *, load_format: str = "auto") -> None:
        super().__init__(directory, load_format=load_format)
        self._form = _form_of(self.config, directory)
        self.prefix = self._form.prefix
        settings = Settings(self.config.extra, str(directory))
        claimed = self._form.num_layers(settings)
        self._require_module("multi-token-prediction", claimed, self._form.fusion)
        self._form.require(settings)

    def is_divisible(self, size: int) -> bool:
        """See ``HeadCheckpoint``."""
        return self._form.is_divisible(Settings(self.config.extra, str(self._directory)), size)

    def aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """See ``HeadCheckpoint``."""
        return self._form.head.aux_layers(num_target_layers)

    def caches(self, dtype: torch.dtype) -> tuple[PagedKV, ...]:
        """See ``HeadCheckpoint``."""
        return (attention_cache(self.config, dtype),)

    def _build(self, reader: HeadReader) -> ModuleHead:
        return self._form.head(
            kernels=reader.weights.kernels,
            embedding=reader.shared.embedding,
            module=self._form.load(self.config, reader),
            lm_head=reader.target_lm_head(),
            caches=reader.caches(self.caches(reader.weights.dtype)),
            parallel=reader.weights.parallel,
            token_ids=reader.token_ids,
        )
