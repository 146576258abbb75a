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

Nemotron-3's module (``mtp_nemotron_h``) runs alike: its two layers of one mixer are such a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.layers.linear import Linear
from sametoken.layers.norm import RMSNorm
from sametoken.layers.rotary import rotary_table
from sametoken.models.base import HiddenStates, ModelConfig
from sametoken.models.blocks import attention_cache
from sametoken.models.decoder import DERIVED_TENSORS, Decoder, DecoderLayer
from sametoken.models.heads.base import (
    HeadCheckpoint,
    HeadStates,
    SharedWeights,
    load_lm_head,
    require_sizes,
)
from sametoken.models.heads.mtp_form import Module, ModuleForm
from sametoken.models.heads.mtp_nemotron_h import NemotronHForm
from sametoken.models.load.quantization import read_quantization
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import Part, WeightReader
from sametoken.models.loader import read_config
from sametoken.models.nemotron_h import NemotronHForCausalLM
from sametoken.models.qwen3_5 import HybridDecoder, load_gated_attention, load_layer_mlp, load_norm
from sametoken.models.registry import ARCHITECTURES
from sametoken.ops.backend import AttentionRows, Kernels
from sametoken.ops.cache_types import PagedKV
from sametoken.ops.weight import UnquantizedWeight, Weight
from sametoken.state.caches import ModelCache

PREFIX = "mtp"
_ANOTHER_METHOD = "another speculative method"


class QwenForm:
    """See ``ModuleForm``."""

    fusion = f"{PREFIX}.fc"

    def num_layers(self, settings: Settings) -> object:
        """See ``ModuleForm.num_layers``."""
        implied = settings.get("num_nextn_predict_layers", 1)
        return settings.get("mtp_num_hidden_layers", implied)

    def require(self, settings: Settings) -> None:
        """See ``ModuleForm.require``."""
        if settings.get("mtp_use_dedicated_embeddings"):
            raise UnsupportedError(
                f"{settings.location}: a multi-token-prediction module with its own embedding is "
                "not supported",
                f"use {_ANOTHER_METHOD}",
            )

    def load(self, config: ModelConfig, reader: WeightReader, max_positions: int) -> Module:
        """See ``ModuleForm.load``."""
        return Module(
            embedding_norm=load_norm(config, reader, f"{PREFIX}.pre_fc_norm_embedding"),
            hidden_norm=load_norm(config, reader, f"{PREFIX}.pre_fc_norm_hidden"),
            fc=reader.linear(2 * config.hidden_size, Part(self.fusion, config.hidden_size)),
            layer=_load_layer(config, reader, max_positions),
            norm=load_norm(config, reader, f"{PREFIX}.norm"),
        )


#: The form of each family's module.
_FORMS: dict[type[Decoder], ModuleForm] = {
    HybridDecoder: QwenForm(),
    NemotronHForCausalLM: NemotronHForm(),
}


def _form_of(config: ModelConfig, directory: Path) -> ModuleForm:
    """The form of an architecture's module; anything except one module of it is refused."""
    architecture = ARCHITECTURES.get(config.architecture, Decoder)
    found = [form for family, form in _FORMS.items() if issubclass(architecture, family)]
    if not found:
        raise UnsupportedError(
            f"{directory}: method 'mtp' does not run with {config.architecture}",
            f"use a Qwen3.5, Qwen3-Next or Nemotron-3 checkpoint, or {_ANOTHER_METHOD}",
        )
    settings = Settings(config.extra, str(directory))
    num_layers = found[0].num_layers(settings)
    if num_layers == 0:
        raise _without_module(directory)
    if num_layers != 1:
        raise UnsupportedError(
            f"{directory}: a multi-token-prediction module of {short(num_layers)} layers "
            "is not supported",
            f"use {_ANOTHER_METHOD}",
        )
    found[0].require(settings)
    return found[0]


def _without_module(directory: Path) -> CheckpointError:
    return CheckpointError(
        f"{directory} holds no multi-token-prediction module ({PREFIX}.*): it was trained without "
        "one, or a conversion dropped it",
        f"use the published checkpoint, or {_ANOTHER_METHOD}",
    )


@dataclass(frozen=True, slots=True)
class MTPHead:
    """The module's weights and its forward pass, as an ``EagleHead``.

    Attributes:
        embedding: [V, hidden], the target's.
        lm_head: [V', hidden], likewise; V' is V, or the length of ``token_ids``.
        caches: KV of the one layer.
        token_ids: [V'] int64, ascending, the only tokens to propose; None: all.
    """

    kernels: Kernels
    embedding: UnquantizedWeight
    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    fc: Linear
    layer: DecoderLayer
    norm: RMSNorm
    lm_head: Weight
    caches: tuple[PagedKV, ...]
    token_ids: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices except embedding and lm_head."""
        return self.fc.nbytes + self.layer.nbytes

    def target_states(self, hidden: HiddenStates, rows: Tensor | None) -> Tensor:
        """The target's states after its final norm; ``forward`` does not write to them."""
        return self.kernels.take_rows(hidden.last, rows)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        rows: AttentionRows,
        cache: ModelCache,
        kept: Tensor | None = None,
    ) -> HeadStates:
        """Run rows over paged KV; see ``EagleHead.forward``."""
        both = self.kernels.embed_beside(
            token_ids, self.embedding, self.embedding_norm, hidden, self.hidden_norm
        )
        residual = self.fc(both)
        layer = self.layer
        attended = layer.attention(layer.input_norm(residual), rows, cache.kv(0), kept)
        x, residual = layer.post_attention_norm.add(
            attended, self.kernels.take_rows(residual, kept)
        )
        last, _ = self.norm.add(layer.mlp(x), residual)
        return HeadStates(last, last)

    def compute_logits(self, last: Tensor) -> Tensor:
        """[R, hidden] to [R, V'] fp32."""
        return self.lm_head.matmul(last, out_dtype=torch.float32)


def _load_layer(config: ModelConfig, reader: WeightReader, max_positions: int) -> DecoderLayer:
    prefix = f"{PREFIX}.layers.0"
    rotary = rotary_table(
        config.rope, head_dim=config.head_dim, max_positions=max_positions, device=reader.device
    )
    return DecoderLayer(
        load_norm(config, reader, f"{prefix}.input_layernorm"),
        load_gated_attention(config, reader, f"{prefix}.self_attn", rotary),
        load_norm(config, reader, f"{prefix}.post_attention_layernorm"),
        load_layer_mlp(config, reader, f"{prefix}.mlp", 0),
    )


class MTPCheckpoint(HeadCheckpoint[MTPHead]):
    """The module in the target's directory.

    Raises:
        CheckpointError: no config, or a checkpoint without the module's weights.
        UnsupportedError: an architecture without an MTP module, or an unsupported form of it.
    """

    unused_tensors = DERIVED_TENSORS
    prefix = f"{PREFIX}."

    def __init__(self, directory: Path, *, load_format: str = "auto") -> None:
        super().__init__(directory, load_format=load_format)
        self.config = read_config(directory, load_format=load_format)
        self._form = _form_of(self.config, directory)
        self.quantization = read_quantization(self.config.extra, str(directory))
        fusion = f"{self._form.fusion}.weight"
        if not self._is_dummy and fusion not in self._open_tensors().names():
            raise _without_module(directory)

    def require_fit(self, target: ModelConfig) -> None:
        """Refuse a target of another vocabulary or hidden size."""
        require_sizes(self.config.vocab_size, self.config.hidden_size, target)

    def aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """None: the module reads the target's last hidden state."""
        return ()

    def _build(
        self,
        reader: WeightReader,
        shared: SharedWeights,
        max_positions: int,
        token_ids: Tensor | None,
    ) -> MTPHead:
        module = self._form.load(self.config, reader, max_positions)
        return MTPHead(
            kernels=reader.kernels,
            embedding=shared.embedding,
            embedding_norm=module.embedding_norm,
            hidden_norm=module.hidden_norm,
            fc=module.fc,
            layer=module.layer,
            norm=module.norm,
            lm_head=load_lm_head(reader, shared.whole_head(), token_ids),
            caches=(attention_cache(self.config, reader.dtype),),
            token_ids=token_ids,
        )
