"""A decode step of Qwen3-8B's shape with random weights, each launch of it replaceable."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from gemm_gpu import normal
from graph_times import replayed

from sametoken.ops.backend import AttentionShape, LayerKV, QKNorm, RotaryTable
from sametoken.ops.model.attention.triton import AttentionConfig, attention
from sametoken.ops.model.embedding_triton import embedding
from sametoken.ops.model.gemm.product import product
from sametoken.ops.model.gemm.tuning import GemmConfig, GemmShape
from sametoken.ops.model.norm_triton import add_rms_norm, rms_norm
from sametoken.ops.model.rope_triton import rope_and_cache
from sametoken.ops.sampling.sample_triton import token_keys
from sametoken.ops.step.triton import prepare_inputs, verify
from sametoken.ops.step.types import LayoutTable
from sametoken.state.sequences import Sequences
from sametoken.types.layout import StepLayout
from sametoken.types.plan import ScheduledRequest, StepPlan

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128)
ROLES = {
    "qkv": GemmShape(6144, 4096),
    "o": GemmShape(4096, 4096),
    "gate_up": GemmShape(24576, 4096, "silu_mul"),
    "down": GemmShape(4096, 12288),
    "head": GemmShape(151936, 4096, "logits"),
}
HIDDEN, VOCABULARY, LAYERS = 4096, 151936, 36
#: The middle of 256 tokens after 512.
CONTEXT, BLOCK_SIZE, MAX_LEN, EPS = 640, 64, 2048, 1e-6
REPLAYS = 7

Choice = GemmConfig | AttentionConfig
Choices = dict[str, Choice]


@dataclass(frozen=True)
class Layer:
    """One layer's weights: roles, norms, and the norms of q and k."""

    matrices: dict[str, torch.Tensor]
    norms: tuple[torch.Tensor, torch.Tensor]
    qk_norm: QKNorm


def random_layers() -> list[Layer]:
    layers = []
    for _ in range(LAYERS):
        matrices = {
            role: normal(shape.out_features, shape.in_features).mul_(shape.in_features**-0.5)
            for role, shape in ROLES.items()
            if role != "head"
        }
        norms = (1 + 0.1 * normal(HIDDEN), 1 + 0.1 * normal(HIDDEN))
        ones = (1 + 0.1 * normal(SHAPE.head_dim), 1 + 0.1 * normal(SHAPE.head_dim))
        layers.append(Layer(matrices, norms, QKNorm(*ones, EPS)))
    return layers


class Chain:
    """A decode step of ``batch`` windows, each choice of it replaceable."""

    def __init__(self, layers: list[Layer], head: torch.Tensor, batch: int, window: int) -> None:
        self.layers, self.head, self.batch, self.window = layers, head, batch, window
        device = torch.device("cuda")
        max_blocks = -(-(CONTEXT + window) // BLOCK_SIZE)
        num_blocks = batch * max_blocks + 1
        self.sequences = Sequences.allocate(
            max_num_seqs=batch,
            max_len=MAX_LEN,
            num_drafts=window - 1,
            block_size=BLOCK_SIZE,
            reserved_block=num_blocks - 1,
            device=device,
        )
        self.sequences.token_ids.random_(0, VOCABULARY)
        self.sequences.draft_ids.random_(0, VOCABULARY)
        self.sequences.num_tokens[:batch] = CONTEXT
        self.sequences.num_computed[:batch] = CONTEXT - 1
        self.sequences.num_drafts[:batch] = window - 1
        blocks = torch.randperm(num_blocks - 1, device=device).view(batch, max_blocks)
        self.sequences.block_table[:batch, :max_blocks] = blocks
        windows = tuple(ScheduledRequest(slot, 1, window - 1, True) for slot in range(batch))
        layout = StepLayout.of(StepPlan(0, requests=windows))
        table = layout.table(layout.shape, self.sequences.reserved_slot, 0)
        self.layout = LayoutTable(torch.tensor(table, device=device), layout.shape)
        size = (2, num_blocks, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim)
        memories = [normal(*size) for _ in layers]
        self.kvs = [LayerKV(memory[0], memory[1]) for memory in memories]
        angles = torch.randn(MAX_LEN, SHAPE.head_dim // 2, device=device)
        self.rotary = RotaryTable(angles.cos(), angles.sin())
        self.temperature = torch.zeros(batch + 1, device=device)
        self.seeds = torch.arange(batch + 1, device=device)
        self.staged = self.stage()
        # Replacements for the output of a kernel that is left out.
        rows = self.rows
        self.blank = {
            "qkv": normal(rows, SHAPE.q_size + 2 * SHAPE.kv_size),
            "o": normal(rows, HIDDEN),
            "gate_up": normal(rows, 12288),
            "down": normal(rows, HIDDEN),
            "head": torch.randn(rows, VOCABULARY, device=device),
            "embedding": normal(rows, HIDDEN),
            "rope_and_cache": normal(rows, SHAPE.num_heads, SHAPE.head_dim),
            "attention": normal(rows, SHAPE.q_size),
        }
        self.keys = self.keys_of(self.blank["head"])

    @property
    def rows(self) -> int:
        return self.batch * self.window

    def stage(self):
        return prepare_inputs(self.sequences, self.layout)

    def keys_of(self, logits: torch.Tensor) -> torch.Tensor:
        return token_keys(logits, self.temperature, self.seeds, self.staged.sampled)

    def attend(self, q, rows, kv: LayerKV, config: Choice) -> torch.Tensor:
        return attention(q, SHAPE, rows, kv, config=config)

    def multiply(self, role: str, x: torch.Tensor, index: int, choice: Choice) -> torch.Tensor:
        """The product of a layer's role, or of the head."""
        matrix = self.head if role == "head" else self.layers[index].matrices[role]
        return product(choice, x, matrix, ROLES[role].epilogue)

    def step(self, choices: Choices, without: str = "") -> torch.Tensor:
        """Launch the step and return its logits; ``without`` is a kernel to leave out."""
        blank = self.blank.get

        def multiply(role: str, x: torch.Tensor, index: int = 0) -> torch.Tensor:
            if role == without:
                return self.blank[role]
            return self.multiply(role, x, index, choices[role])

        staged = self.staged if without == "stage" else self.stage()
        rows = staged.rows
        hidden = blank("embedding")
        if without != "embedding":
            hidden = embedding(staged.token_ids, self.head)
        residual = hidden
        x = rms_norm(hidden, self.layers[0].norms[0], EPS)
        for index, (layer, kv) in enumerate(zip(self.layers, self.kvs, strict=True)):
            if index and without != "add_rms_norm":
                x, residual = add_rms_norm(x, residual, layer.norms[0], EPS)
            qkv = multiply("qkv", x, index)
            q = blank("rope_and_cache")
            if without != "rope_and_cache":
                q = rope_and_cache(qkv, SHAPE, self.rotary, rows, kv, layer.qk_norm)
            heads = blank("attention")
            if without != "attention":
                heads = self.attend(q, rows, kv, choices["attention"])
            x = multiply("o", heads, index)
            if without != "add_rms_norm":
                x, residual = add_rms_norm(x, residual, layer.norms[1], EPS)
            x = multiply("gate_up", x, index)
            x = multiply("down", x, index)
        x, _ = add_rms_norm(x, residual, self.layers[0].norms[1], EPS)
        logits = multiply("head", x)
        keys = self.keys if without == "keys" else self.keys_of(logits)
        if without != "verify":
            verify(keys, staged)
        return logits

    def milliseconds(self, choices: Choices, without: str = "") -> float:
        """Measure the median time of a step in a graph."""
        return statistics.median(replayed(lambda: self.step(choices, without), REPLAYS))
