"""The multi-token-prediction (MTP) modules of ERNIE 4.5 and MiMo: one dense layer, full attention.

Both have norms of embedding and state, a projection of the two, and a layer as the target's dense
ones are. After a last norm the state goes to the target's lm_head, and to the next row.

ERNIE 4.5, from Baidu's FastDeploy (``model_executor/models/ernie4_5_mtp.py``): the embedding comes
first and is not zeroed at position 0; the last norm is the target's final one. The target's state
is the one after that norm there, in vLLM and in SGLang; Baidu's training code takes the one before
it. On ERNIE-4.5-21B-A3B-PT the one after, with the last norm, which vLLM and SGLang leave out,
drafts best (measured in jjang-ai/vmlx#272). Tensors: ``model.mtp_emb_norm.0``,
``model.mtp_hidden_norm.0``, ``model.mtp_linear_proj.0`` and a layer ``model.mtp_block.0``. The
projection of ERNIE-4.5-300B-A47B-PT was published as its transpose, [2h, h], as in Baidu's
framework (sgl-project/sglang#7657, PaddlePaddle/ERNIE#1265).

MiMo-7B, from its authors' code in vLLM (``vllm/model_executor/models/mimo.py``, ``mimo_mtp.py``;
vllm-project/vllm#17433): the state comes first, and is the target's from *before* its final norm
(SGLang takes the one after); the embedding is zeroed at position 0. Tensors, below
``model.mtp_layers.0``: ``token_layernorm``, ``hidden_layernorm``, ``input_proj``, a layer with
biases of q, k and v, and ``final_layernorm``.

Config key: ``num_nextn_predict_layers``; without it there is one. Both were trained to predict one
token. Embedding and lm_head are the target's.
"""

from __future__ import annotations

from torch import Tensor

from sametoken.layers.attention import Attention
from sametoken.layers.linear import Linear
from sametoken.layers.residual import DecoderLayer
from sametoken.models.base import HiddenStates, ModelConfig
from sametoken.models.blocks import load_attention, load_mlp, load_norm, rotary_of
from sametoken.models.ernie4_5 import load_paired_attention
from sametoken.models.heads.mtp_form import Module, ModuleForm, ModuleHead
from sametoken.models.heads.reader import HeadReader
from sametoken.models.load.settings import Settings
from sametoken.models.load.weights import Part, WeightReader
from sametoken.models.qwen2 import MiMoForCausalLM
from sametoken.ops.backend import AttentionRows


class _DenseForm(ModuleForm):
    """What the two have in common; see ``ModuleForm``."""

    def require(self, settings: Settings) -> None:
        """See ``ModuleForm.require``; every form is implemented."""


class ErnieForm(_DenseForm):
    """See ``ModuleForm``."""

    prefix, fusion = "model.mtp_", "model.mtp_linear_proj.0"

    def load(self, config: ModelConfig, reader: HeadReader) -> Module:
        """See ``ModuleForm.load``."""
        weights, block = reader.weights, "model.mtp_block.0"
        rotary = rotary_of(config, reader.max_positions, weights.device)
        attention = load_paired_attention(config, weights, f"{block}.self_attn", rotary)
        return Module(
            embedding_norm=load_norm(config, weights, "model.mtp_emb_norm.0"),
            hidden_norm=load_norm(config, weights, "model.mtp_hidden_norm.0"),
            fc=self._load_fusion(weights, config.hidden_size),
            layer=_load_layer(config, weights, block, attention),
            norm=reader.shared.final_norm,
        )

    def _load_fusion(self, weights: WeightReader, hidden: int) -> Linear:
        """The projection, as it is or as its transpose."""
        part, stored = Part(self.fusion, hidden), Part(f"{self.fusion}.weight", 2 * hidden)
        is_there = stored.name in weights
        if not is_there or weights.source.shape(stored.name) != (2 * hidden, hidden):
            return weights.linear(2 * hidden, part)
        matrix = weights.tensor(stored, (hidden,)).mT.contiguous()
        return Linear(weights.projection(weights.kernels.pack(matrix)), parts=(part,))


class MiMoHead(ModuleHead):
    """See ``ModuleHead``; the state comes before the embedding, and from before the final norm."""

    zeroes_first = True

    @staticmethod
    def aux_layers(num_target_layers: int) -> tuple[int, ...]:
        """What enters the target's final norm."""
        return (num_target_layers,)

    def target_states(self, hidden: HiddenStates, rows: Tensor | None) -> Tensor:
        """The target's states before its final norm; ``forward`` must not write to them."""
        return self.kernels.take_rows(hidden.auxiliary, rows)

    def _inputs(self, token_ids: Tensor, hidden: Tensor, rows: AttentionRows) -> Tensor:
        """As ``ModuleHead._inputs``, with the halves in the other order."""
        return super()._inputs(token_ids, hidden, rows).roll(hidden.shape[1], 1)


class MiMoForm(_DenseForm):
    """See ``ModuleForm``."""

    prefix, fusion = "model.mtp_layers.", "model.mtp_layers.0.input_proj"
    head = MiMoHead

    def load(self, config: ModelConfig, reader: HeadReader) -> Module:
        """See ``ModuleForm.load``."""
        weights, block = reader.weights, "model.mtp_layers.0"
        rotary = rotary_of(config, reader.max_positions, weights.device)
        biases = MiMoForCausalLM.biases(config)
        attention = load_attention(config, weights, f"{block}.self_attn", rotary, biases=biases)
        return Module(
            embedding_norm=load_norm(config, weights, f"{block}.token_layernorm"),
            hidden_norm=load_norm(config, weights, f"{block}.hidden_layernorm"),
            fc=weights.linear(2 * config.hidden_size, Part(self.fusion, config.hidden_size)),
            layer=_load_layer(config, weights, block, attention),
            norm=load_norm(config, weights, f"{block}.final_layernorm"),
        )


def _load_layer(
    config: ModelConfig, weights: WeightReader, prefix: str, attention: Attention
) -> DecoderLayer:
    return DecoderLayer(
        load_norm(config, weights, f"{prefix}.input_layernorm"),
        attention,
        load_norm(config, weights, f"{prefix}.post_attention_layernorm"),
        load_mlp(config, weights, f"{prefix}.mlp"),
    )
