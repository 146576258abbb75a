"""The EAGLE-3 head that ships for SmolLM2, trained along with a target that a trainer changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sametoken.exact import ExactModel
from sametoken.layers.rotary import rotary_table
from sametoken.models.base import ModelConfig
from sametoken.models.names import HEAD_DIRECTORY
from sametoken.train.batches import Batches
from sametoken.train.compute import Compute
from sametoken.train.eagle3 import Eagle3Network
from sametoken.train.networks import DecoderNetwork
from sametoken.train.objectives import HeadObjective, Unroll
from sametoken.train.states import RunAnew
from sametoken.train.target import TargetStates
from sametoken.train.text import Sequences

# Drafts in a row that are trained, and the weight of each loss over the one before.
UNROLL = Unroll(4, 0.8)
BATCH_TOKENS = 16384


class Target:
    """A target in bf16 whose weights are copied from a trainer's; see ``train.states.Target``."""

    def __init__(self, config: ModelConfig, aux_layers: list[int], device: torch.device) -> None:
        self.config, self._aux_layers = config, aux_layers
        self.network = DecoderNetwork(config).to(device, torch.bfloat16)
        self.embedding, self.head = self.network.embedding.detach(), self.network.head.detach()

    @torch.no_grad()
    def states(self, token_ids: Tensor) -> TargetStates:
        """[B, L] int64 to hidden states."""
        found = self.network.model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
        entering = [found.hidden_states[layer] for layer in self._aux_layers]
        return TargetStates(torch.cat(entering, dim=-1), found.last_hidden_state)


class TrainedHead:
    """The head in fp32, and its optimizer.

    Args:
        model: the trainer's.
        longest: tokens of a sequence.
        learning_rate: of the head.
    """

    def __init__(self, model: ExactModel, longest: int, learning_rate: float) -> None:
        config, device = model.config, next(model.parameters()).device
        settings = json.loads((HEAD_DIRECTORY / "config.json").read_text())
        layer = settings["transformer_layer_config"]
        tensors = load_file(HEAD_DIRECTORY / "model.safetensors")
        self._maps = {name: tensors[name] for name in ("d2t", "t2d")}
        self._token_ids = torch.arange(settings["draft_vocab_size"]) + tensors["d2t"]
        self._target = Target(config, settings["eagle_aux_hidden_state_layer_ids"], device)
        kv_heads, inner = layer["num_key_value_heads"], layer["intermediate_size"]
        self._network = Eagle3Network(
            replace(config, num_kv_heads=kv_heads, intermediate_size=inner),
            draft_vocab_size=settings["draft_vocab_size"],
            num_aux=len(settings["eagle_aux_hidden_state_layer_ids"]),
            norm_before_residual=settings["norm_before_residual"],
            rotary=rotary_table(
                config.rope,
                head_dim=config.head_dim,
                # Batches are padded, and drafts go on behind them.
                max_positions=longest + 32 + UNROLL.steps,
                device=device,
            ),
        ).to(device)
        self._network.take(tensors)
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=learning_rate)
        self._device = device

    def step(
        self, model: nn.Module, sequences: Sequence[tuple[Sequence[int], int]]
    ) -> dict[str, Tensor]:
        """One pass over a rollout, towards the model's present weights.

        Args:
            model: has them under the checkpoint's names.
            sequences: token ids, each with the length of its prompt.

        Returns:
            The head's checkpoint, for ``update_weights``.
        """
        self._target.network.load_state_dict(model.state_dict())
        text = Sequences.of(sequences)
        everything, states = list(range(len(text))), RunAnew(self._target)
        batches = Batches(text, everything, batch_tokens=BATCH_TOKENS, seed=0, device=self._device)
        compute = Compute(self._device, torch.bfloat16)
        objective = HeadObjective(self._network, self._target, self._token_ids, UNROLL, compute)
        for index in range(len(batches)):
            batch = batches.at(index)
            objective.batch_loss(batch, states.of(batch))[0].loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return self._network.export_tensors(torch.bfloat16) | self._maps
