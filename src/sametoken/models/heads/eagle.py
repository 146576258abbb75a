"""The EAGLE-1 draft head (Li et al., arXiv:2401.15077), which EAGLE-2 uses unchanged.

Row p takes the token at p + 1 and the target's last hidden state at p, and predicts the token at
p + 2. From the reference (SafeAILab/EAGLE ``eagle/model/cnets1.py``) and vLLM
(``vllm/model_executor/models/llama_eagle.py``):

- ``fc`` maps ``[embedding | hidden]``, 2h wide, to h, in drafted rows too.
- The target's state is the one after its final norm, the input of its lm_head
  (``ea_model.py`` takes ``base_model.model(...)[0]``, ``ge_data`` ``hidden_states[-1]``).
- Llama layers follow; the first has no ``input_layernorm``. There is no final norm: the residual
  stream is the input of the lm_head and of the next row.
- The ``lm_head`` is the target's.
- RoPE positions of rows need only be consistent: row p gets position p.

Two checkpoint layouts are published:

- SafeAILab: config.json describes a Llama of ``num_hidden_layers`` layers, usually one, with
  ``bias`` for ``fc``; tensors are ``fc.weight``, sometimes ``fc.bias``, ``layers.<i>.*`` without
  ``layers.0.input_layernorm`` and usually ``embed_tokens.weight`` (``eagle/model/cnets1.py``;
  the published heads are ``pytorch_model.bin``).
- ``speculators`` (vllm-project): config.json has ``"speculators_model_type": "eagle"``, the
  layer's config under ``transformer_layer_config``, ``fusion_bias`` and ``layernorms``; tensors
  are ``transformer.*``, always one layer regardless of ``num_hidden_layers``, and ``fusion_fc.*``
  (``convert/eagle/eagle_converter.py`` of its first releases).

``fc`` has a bias if the tensors include one: some trainers write one without a config key
(sgl-project/sglang#5773, vllm-project/vllm#22323). So have q, k and v (``qkv_bias``), as in the
heads for Qwen2 (SafeAILab/EAGLE#117 and #135).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short

import torch
from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.layers.linear import Linear
from sametoken.layers.residual import DecoderLayer, NoNorm
from sametoken.models.base import ModelConfig
from sametoken.models.blocks import (
    Biases,
    attention_cache,
    load_attention,
    load_mlp,
    load_norm,
    rotary_of,
)
from sametoken.models.decoder import Decoder
from sametoken.models.heads.base import (
    EagleHead,
    HeadCheckpoint,
    HeadStates,
    refuse,
    require_sizes,
)
from sametoken.models.heads.layer_config import (
    layer_windows,
    read_head_quantization,
    read_layer_config,
)
from sametoken.models.heads.reader import HeadReader
from sametoken.models.load.files import read_settings
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import Part
from sametoken.models.registry import is_divisible
from sametoken.ops.backend import AttentionRows, KeptRows, RotaryTable
from sametoken.ops.cache_types import PagedKV
from sametoken.state.caches import ModelCache


@dataclass(frozen=True, slots=True)
class Eagle1Config:
    """A head's architecture.

    Attributes:
        layer: sizes and number of its decoder layers; hidden size and vocabulary are the target's.
        windows: of the layers' attention, in positions; None: full attention.
        fc_bias: whether ``fc`` must have a bias; it may have one anyway.
    """

    layer: ModelConfig
    windows: tuple[int | None, ...]
    fc_bias: bool


def _head_config(settings: Settings) -> Eagle1Config:
    config, location = settings.values, settings.location
    implied = "eagle3" if "draft_vocab_size" in config else "eagle"
    kind = config.get("speculators_model_type", implied)
    if kind != "eagle":
        raise UnsupportedError(
            f"{location} describes a {short(kind)} drafter", 'use a head for the method "eagle"'
        )
    refuse(
        location,
        (config.get("layernorms"), "layernorms"),
        (config.get("add_para_norm"), "add_para_norm"),
    )
    layer = read_layer_config(settings)
    if "speculators_model_type" in config:
        layer = replace(layer, num_layers=1)
    fc_bias = settings.switch("fusion_bias", default=settings.switch("bias"))
    return Eagle1Config(layer, tuple(layer_windows(layer, location)), fc_bias)


@dataclass(frozen=True, slots=True)
class Eagle1Head(EagleHead):
    """The head's weights and its forward pass.

    The first of its layers has no norm in front.
    """

    fc: Linear
    layers: tuple[DecoderLayer, ...]

    @property
    def nbytes(self) -> int:
        """See ``EagleHead``."""
        return self.fc.nbytes + sum(layer.nbytes for layer in self.layers)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        rows: AttentionRows,
        cache: ModelCache,
        kept: KeptRows | None = None,
    ) -> HeadStates:
        """Run rows over paged KV; see ``EagleHead.forward``."""
        embedded = self.embedding.rows(token_ids)
        residual = self.fc(torch.cat((embedded, hidden), dim=1))
        for index, layer in enumerate(self.layers):
            # Only the last layer may drop rows: an earlier one's outputs become the next one's KV.
            wanted = kept if index + 1 == len(self.layers) else None
            x = layer.input_norm(residual)
            _, residual = layer(x, residual, NoNorm(), rows, cache.kv(index), kept=wanted)
        return HeadStates(residual, residual)


class Eagle1Checkpoint(HeadCheckpoint[Eagle1Head]):
    """A directory with a head of the first EAGLE."""

    def __init__(self, directory: Path, *, load_format: str = "auto") -> None:
        super().__init__(directory, load_format=load_format)
        given = read_settings(directory / "config.json")
        self.config = _head_config(given)
        self.quantization = read_head_quantization(given)

    def require_fit(self, target: ModelConfig) -> None:
        """Refuse a target of another vocabulary or hidden size."""
        require_sizes(self.config.layer.vocab_size, self.config.layer.hidden_size, target)

    def is_divisible(self, size: int) -> bool:
        """See ``HeadCheckpoint``."""
        return is_divisible(Decoder, self.config.layer, self.quantization, size)

    def caches(self, dtype: torch.dtype) -> tuple[PagedKV, ...]:
        """See ``HeadCheckpoint``."""
        config = self.config
        return tuple(attention_cache(config.layer, dtype, window) for window in config.windows)

    def _build(self, reader: HeadReader) -> Eagle1Head:
        weights, layer = reader.weights, self.config.layer
        vocab_size, hidden_size = layer.vocab_size, layer.hidden_size
        rotary = rotary_of(layer, reader.max_positions, weights.device)
        fc_bias = self.config.fc_bias or "fc.bias" in weights
        return Eagle1Head(
            kernels=weights.kernels,
            caches=reader.caches(self.caches(weights.dtype)),
            parallel=weights.parallel,
            embedding=reader.embedding(vocab_size, hidden_size),
            fc=weights.linear(2 * hidden_size, Part("fc", hidden_size), bias=fc_bias),
            layers=tuple(self._load_layer(reader, rotary, i) for i in range(layer.num_layers)),
            lm_head=reader.lm_head(vocab_size, hidden_size),
            token_ids=reader.token_ids,
        )

    def _load_layer(self, reader: HeadReader, rotary: RotaryTable, index: int) -> DecoderLayer:
        weights, layer, prefix = reader.weights, self.config.layer, f"layers.{index}"
        cache = self.caches(weights.dtype)[index].within(reader.max_positions)
        says_so = Settings(layer.extra, weights.source.location).switch("qkv_bias")
        qkv_bias = layer.attention_bias or says_so or f"{prefix}.self_attn.q_proj.bias" in weights
        biases = Biases(qkv_bias, output=layer.attention_bias)
        return DecoderLayer(
            load_norm(layer, weights, f"{prefix}.input_layernorm") if index else NoNorm(),
            load_attention(
                layer, weights, f"{prefix}.self_attn", rotary, cache=cache, biases=biases
            ),
            load_norm(layer, weights, f"{prefix}.post_attention_layernorm"),
            load_mlp(layer, weights, f"{prefix}.mlp"),
        )
